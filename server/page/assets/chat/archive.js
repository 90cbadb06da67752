// The conversations that this browser keeps: which there are, which one is open, saving in time.

import { MAX_CONVERSATIONS, openStore } from "./store.js";
import { readExport } from "./exchange.js";
import { newConversation } from "./tree.js";

const SAVE_MS = 400;
const MAX_IMPORT_BYTES = 50_000_000;

export class Archive {
  /** Opens what is stored; an answer that was being written when the page was left is a stopped one. */
  static async open(onProblem) {
    const archive = new Archive(await openStore(), onProblem);
    archive.items = (await archive.store.all()).map((stored) => ({ ...newConversation(), ...stored })); // what an older page kept
    for (const conversation of archive.items)
      for (const node of Object.values(conversation.nodes)) if (node.state === "writing") node.state = "stopped";
    return archive;
  }

  constructor(store, onProblem) {
    this.store = store;
    this.onProblem = onProblem;
    this.items = []; // last changed first
    this.waiting = new Map(); // id -> timer of a save
  }

  get(id) {
    return this.items.find((item) => item.id === id) ?? null;
  }

  /** A fresh conversation; it is kept once it has a message. */
  create() {
    const conversation = newConversation();
    this.items.unshift(conversation);
    return conversation;
  }

  /** Notes that a message has come or ended: to the front, and saved at once. */
  touch(conversation) {
    conversation.updatedMs = Date.now();
    this.items = [conversation, ...this.items.filter((item) => item !== conversation)];
    this.save(conversation);
    this.flush(conversation);
  }

  /** Notes a smaller change: saved soon. */
  save(conversation) {
    if (!Object.keys(conversation.nodes).length || this.waiting.has(conversation.id)) return;
    this.waiting.set(conversation.id, setTimeout(() => this.flush(conversation), SAVE_MS));
    while (this.items.length > MAX_CONVERSATIONS) this.remove(this.items.at(-1));
  }

  /** Writes what waits to be saved. */
  flush(conversation) {
    clearTimeout(this.waiting.get(conversation.id));
    if (!this.waiting.delete(conversation.id)) return;
    this.store.save(conversation).catch((error) => this.onProblem(`This conversation could not be saved: ${error?.message ?? "no room"}`));
  }

  flushAll() {
    for (const item of this.items) this.flush(item);
  }

  remove(conversation) {
    this.items = this.items.filter((item) => item !== conversation);
    clearTimeout(this.waiting.get(conversation.id));
    this.waiting.delete(conversation.id);
    this.store.remove(conversation.id).catch(() => this.onProblem("It could not be deleted from this browser's store."));
  }

  /** Adds the conversations of an export; returns how many. Raises Error. */
  async import(file) {
    if (file.size > MAX_IMPORT_BYTES) throw new Error(`the file is larger than ${MAX_IMPORT_BYTES / 1e6} MB`);
    const found = readExport(await file.text());
    const room = MAX_CONVERSATIONS - this.items.length;
    if (found.length > room) throw new Error(`it holds ${found.length} conversations; there is room for ${room}`);
    for (const conversation of found.reverse()) this.touch(conversation);
    return found.length;
  }
}
