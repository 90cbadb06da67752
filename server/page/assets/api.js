// The server's API as the views call it: JSON, server-sent events over fetch, and the key where the
// server asks for one.

import { h, showDialog } from "./dom.js";

const KEY = "stemma.api_key";
let asking = null;

/** What the server, or the way to it, had to say against a request. `status` 0: no answer. */
export class ApiError extends Error {
  constructor(message, { status = 0, kind = "", field = null, retryAfterS = null } = {}) {
    super(message);
    Object.assign(this, { status, kind, field, retryAfterS });
  }

  /** Whether it is the engine that is missing, and not the request that is wrong. */
  get isOutage() { return this.status === 0 || this.status === 502 || this.status === 503; }
}

export const api = {
  /** GET or, with `body`, POST; the answer's JSON. Raises ApiError, AbortError. */
  async json(path, { body, signal } = {}) {
    return (await request(path, { body, signal })).json();
  },
  /** Events of a stream, each {event, data, id}, `data` the text. Raises ApiError, AbortError. */
  async *events(path, { body, signal } = {}) {
    const response = await request(path, { body, signal });
    if (!(response.headers.get("content-type") ?? "").startsWith("text/event-stream"))
      throw new ApiError("the server answered with no stream", { status: response.status });
    try {
      yield* parseEvents(response.body);
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("the connection to the server broke off");
    }
  },
};

/** Server-sent events of a byte stream (WHATWG HTML, "interpreting an event stream"). */
export async function* parseEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = fresh();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line !== "") take(event, line);
        else if (event.lines.length) {
          yield { event: event.event, data: event.lines.join("\n"), id: event.id };
          event = fresh();
        } else event = fresh();
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

const fresh = () => ({ event: "message", lines: [], id: null });

function take(event, line) {
  const colon = line.indexOf(":");
  if (colon === 0) return;
  const field = colon < 0 ? line : line.slice(0, colon);
  const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
  if (field === "data") event.lines.push(value);
  else if (field === "event") event.event = value;
  else if (field === "id") event.id = value;
}

async function request(path, { body, signal }) {
  for (;;) {
    const key = storedKey();
    const headers = { ...(key && { authorization: `Bearer ${key}` }) };
    if (body !== undefined) headers["content-type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store",
        body: body === undefined ? undefined : JSON.stringify(body),
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("the server cannot be reached");
    }
    if (response.ok) return response;
    if (response.status !== 401 || !(await askForKey(key))) throw await errorOf(response);
  }
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  let said = {};
  try { said = JSON.parse(text).error ?? {}; } catch { /* not of ours: the status must do */ }
  const retryAfter = Number(response.headers.get("retry-after"));
  return new ApiError(said.message || `${response.status} ${response.statusText}`.trim(), {
    status: response.status, kind: said.type ?? "", field: said.param ?? null,
    retryAfterS: retryAfter > 0 ? retryAfter : null,
  });
}

function storedKey() {
  try { return localStorage.getItem(KEY) ?? ""; } catch { return ""; }
}

/** Asks for a key; false where none was given. Requests that fail together ask once. */
function askForKey(refused) {
  if (storedKey() !== refused) return Promise.resolve(true); // another request has asked already
  asking ??= keyDialog(refused).finally(() => { asking = null; });
  return asking;
}

async function keyDialog(refused) {
  const input = h("input", { type: "password", name: "key", autocomplete: "off", required: true, spellcheck: "false" });
  const form = h("form", { method: "dialog" },
    h("h2", { text: "An API key, please" }),
    h("p", { text: refused ? "The server refused the stored key." : "This server answers only to those who have a key. It is kept in this browser." }),
    h("label", { class: "dialog-field" }, "Key", input),
    h("div", { class: "dialog-row" },
      h("button", { type: "submit", value: "", formnovalidate: true, class: "quiet", text: "Cancel" }),
      h("button", { type: "submit", value: "ok", class: "primary", text: "Use this key" })));
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    form.querySelector(".primary").click();
  });
  if ((await showDialog("API key", form)) !== "ok") return false;
  try { localStorage.setItem(KEY, input.value.trim()); } catch { return false; }
  return true;
}
