// Conversations in the browser's IndexedDB. Where there is none (private windows), in memory, and
// `isKept` says so.

const DATABASE = "stemma";
const TABLE = "conversations";
export const MAX_CONVERSATIONS = 200;

/** Opens what this browser keeps. */
export async function openStore() {
  const database = await new Promise((resolve) => {
    let request;
    try { request = indexedDB.open(DATABASE, 1); } catch { return resolve(null); }
    request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => resolve(null);
  });
  return new Store(database);
}

class Store {
  constructor(database) {
    this.database = database;
    this.isKept = database !== null;
  }

  /** All conversations, the last changed first. */
  async all() {
    const found = this.isKept ? await this.run("readonly", (table) => table.getAll()) : [];
    return found.sort((a, b) => b.updatedMs - a.updatedMs);
  }

  async save(conversation) {
    if (this.isKept) await this.run("readwrite", (table) => table.put(structuredClone(conversation)));
  }

  async remove(id) {
    if (this.isKept) await this.run("readwrite", (table) => table.delete(id));
  }

  run(mode, act) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction(TABLE, mode);
      const request = act(transaction.objectStore(TABLE));
      transaction.commit?.(); // now: the page may be left at once
      transaction.oncomplete = () => resolve(request.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }
}
