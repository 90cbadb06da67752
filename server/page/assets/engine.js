// Whether the engine is there, and which model it runs. Asked once; after a failure once a second
// until it is there again.

import { api } from "./api.js";

const RETRY_MS = 1000;
const listeners = new Set();
let timer = null;

export const engine = {
  state: "loading", // "loading", "ready", "down"
  model: null, // the one that answers where none is chosen
  models: [], // it, other models, and adapters: {id, isAdapter, maxModelLen}
  /** The context length of a model by its name, "" the first one's; null: not known. */
  maxModelLenOf(name) {
    return (engine.models.find(({ id }) => id === name) ?? engine.models[0])?.maxModelLen ?? null;
  },
  /** `listener()` after each change; returns how to stop it. */
  onChange(listener) {
    listeners.add(listener);
    return () => listeners.delete(listener);
  },
  /** Something failed: look now, and once more when the server must have noticed. */
  async doubt() {
    await engine.check();
    timer ??= setTimeout(engine.check, RETRY_MS);
  },
  /** Ask now. */
  async check() {
    clearTimeout(timer);
    timer = null;
    try {
      const [models] = await Promise.all([api.json("/v1/models"), api.json("/health")]);
      engine.models = models.data.map(({ id, parent, max_model_len: maxModelLen }) =>
        ({ id, isAdapter: Boolean(parent), maxModelLen }));
      engine.model = engine.models[0].id;
      tell("ready");
    } catch (error) {
      tell("down");
      const isRefused = error.status === 401 || error.status === 403; // and will be
      if (!isRefused) timer ??= setTimeout(engine.check, RETRY_MS);
    }
  },
};

function tell(state) {
  engine.state = state;
  for (const listener of listeners) listener();
}
