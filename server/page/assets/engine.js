// Whether the engine is there, and which model it runs. Asked once; after a failure once a second
// until it is there again.

import { api } from "./api.js";

const RETRY_MS = 1000;
const listeners = new Set();
let timer = null;

export const engine = {
  state: "loading", // "loading", "ready", "down"
  model: null, // the one that is served
  models: [], // it and its adapters: {id, isAdapter}
  maxModelLen: null,
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
      engine.models = models.data.map(({ id, parent }) => ({ id, isAdapter: Boolean(parent) }));
      engine.model = engine.models[0].id;
      engine.maxModelLen = models.data[0].max_model_len ?? null;
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
