// What is known of the engine: the events of /watch put together. Knows nothing of drawing.

const HISTORY = 240; // samples of the rates, four a second
const MAX_STEPS = 240;

/** A node of the tree; `id` < 0: on the host only. Counts are tokens. */
function nodeOf(row) {
  const [id, parent, root, start, tokens, locks, leases, pins, onHost, hits, usedS, hidden, owner] = row;
  return { id, parent, root, start, tokens, locks, leases, pins, onHost, hits, usedS, hidden, owner };
}

export class Model {
  constructor() {
    Object.assign(this, { treeVersion: 0, poolVersion: 0, sequence: 0 }); // these only rise
    this.reset();
  }

  /** Forget everything: it was another engine's. */
  reset() {
    Object.assign(this, {
      run: null, replica: null, name: "", engine: null, rates: null, nowS: 0, receivedMs: 0, isLive: false, outage: null,
      nodes: new Map(), roots: {}, numNodes: 0, numHidden: 0, pool: null, evictedTokens: 0,
      queue: { running: [], waiting: [], num_running: 0, num_waiting: 0, policy: "" },
      steps: [], names: new Map(), leases: new Map(), users: new Map(),
      history: { decode: [], prefill: [], hit: [], kv: [] },
      changes: { added: [], removed: [] },
    });
  }

  /** Seconds by the engine's clock, as it would say now. */
  get clockS() {
    return this.nowS + (performance.now() - this.receivedMs) / 1000;
  }

  /** Seconds since the last use; Infinity: it was used for the last time. */
  age(node) {
    return node.usedS === null ? Infinity : Math.max(0, this.clockS - node.usedS);
  }

  take(told) {
    if (told.run !== this.run) {
      const { history, replica } = this;
      this.reset();
      Object.assign(this, { run: told.run, replica: told.replica ?? null });
      if (replica === this.replica) this.history = history; // it was started anew
    }
    Object.assign(this, {
      name: told.model ?? this.name, engine: told.engine, rates: told.rates, queue: told.queue, nowS: told.now_s,
      receivedMs: performance.now(), isLive: true, outage: null, evictedTokens: told.evicted_tokens,
    });
    this.#takeTree(told.tree, told.is_whole);
    this.#takeSteps(told.steps, told.is_whole);
    if (told.pool) {
      this.pool = told.pool;
      this.poolVersion++;
    }
    this.leases = new Map();
    for (const lease of told.leases) this.leases.set(lease.node, [...(this.leases.get(lease.node) ?? []), lease]);
    this.#findUsers();
    this.#remember();
  }

  /** The engine cannot be asked: what is shown is what it was. */
  lose(reason) {
    Object.assign(this, { isLive: false, outage: reason });
  }

  /** The nodes from the root to this one. */
  path(id) {
    const path = [];
    for (let node = this.nodes.get(id); node; node = this.nodes.get(node.parent)) path.push(node.id);
    return path.reverse();
  }

  /** Tokens of the pool by state. */
  get parts() {
    const { total_tokens: total, free_tokens: free, evictable_tokens: cached, leases } = this.engine;
    const leased = leases.leased_tokens;
    return { total, free, cached, leased, used: total - free - cached - leased };
  }

  #takeTree(tree, isWhole) {
    this.changes = { added: [], removed: [] };
    const known = this.nodes;
    if (isWhole) this.nodes = new Map();
    for (const [id, isGone] of tree.removed) {
      const node = this.nodes.get(id);
      if (node && isGone) this.changes.removed.push(node);
      this.nodes.delete(id);
    }
    for (const row of tree.nodes) {
      const fresh = nodeOf(row);
      const before = known.get(fresh.id);
      if (before) this.nodes.set(fresh.id, Object.assign(before, fresh));
      else {
        this.nodes.set(fresh.id, Object.assign(fresh, { text: "", sequence: this.sequence++ }));
        this.changes.added.push(fresh);
      }
    }
    for (const [id, text] of Object.entries(tree.texts)) {
      const node = this.nodes.get(Number(id));
      if (node) node.text = text;
    }
    if (tree.nodes.length || tree.removed.length || isWhole) this.treeVersion++;
    Object.assign(this, { roots: tree.roots, numNodes: tree.num_nodes, numHidden: tree.num_hidden });
  }

  #takeSteps(steps, isWhole) {
    if (isWhole) this.steps = [];
    this.steps.push(...steps.items);
    this.steps.splice(0, this.steps.length - MAX_STEPS);
    for (const [id, name] of Object.entries(steps.names)) this.names.set(Number(id), name);
    while (this.names.size > 4 * MAX_STEPS) this.names.delete(this.names.keys().next().value);
  }

  #findUsers() {
    this.users = new Map();
    for (const request of this.queue.running)
      for (const id of this.path(request.node)) {
        if (!this.users.has(id)) this.users.set(id, []);
        this.users.get(id).push(request);
      }
  }

  #remember() {
    const { total, free } = this.parts;
    const now = {
      decode: this.rates.decode_tokens + this.rates.forced_tokens, prefill: this.rates.prefill_tokens + this.rates.score_tokens,
      hit: this.rates.hit_rate, kv: 1 - free / total,
    };
    for (const [name, value] of Object.entries(now)) {
      this.history[name].push(value);
      if (this.history[name].length > HISTORY) this.history[name].shift();
    }
  }
}
