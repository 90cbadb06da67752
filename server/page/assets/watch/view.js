// The watch view: what the engine does now, drawn from the events of /watch.

import { addressParts } from "../address.js";
import { h, put, useStyle } from "../dom.js";
import { runDemo } from "./demo.js";
import { count, explainCell, explainNode, explainRequest, explainStep, whyWaiting } from "./explain.js";
import { follow } from "./feed.js";
import { Fleet } from "./fleet.js";
import { Model } from "./model.js";
import { PoolCanvas } from "./pool_canvas.js";
import { spark } from "./spark.js";
import { Timeline } from "./timeline.js";
import { TreeCanvas } from "./tree_canvas.js";

const MAX_LISTED = 40;
const NEXT_TO_NOTHING = 8; // tokens: a probe of the engine's health leaves a few

/** Draws into `root`; returns what ends it. */
export async function mount(root, { api, theme }) {
  await useStyle("watch/watch.css");
  const view = new WatchView(api);
  put(root, view.element);
  const stopTheme = theme.onChange(() => view.recolour());
  const onAddress = () => view.start();
  addEventListener("hashchange", onAddress);
  view.start();
  return () => {
    stopTheme();
    removeEventListener("hashchange", onAddress);
    view.close();
  };
}

class WatchView {
  constructor(api) {
    this.api = api;
    this.model = new Model();
    this.aborter = new AbortController();
    this.reading = null; // what ends the stream of the engine that is looked at
    this.replica = null; // which of several; null: the first
    this.fleet = new Fleet((number) => { location.hash = `#/watch/${number}`; });
    this.parts = build(this);
    this.element = this.parts.element;
    this.element.watch = this; // for tests and the curious
    const { parts, model } = this;
    this.tree = new TreeCanvas(parts.tree, model, {
      onHover: (node, place) => this.#tip(node && explainNode(node, model), parts.tree, place, node),
      onPin: (node, place) => this.#pin(node, place),
    });
    this.pool = new PoolCanvas(parts.pool, model, (cell, event) => {
      this.#tip(cell && explainCell(cell, model), parts.pool, event && { x: event.offsetX, y: event.offsetY });
      this.tree.light(cell && model.nodes.has(cell.owner) ? new Set(model.path(cell.owner)) : null);
    });
    this.timeline = new Timeline(parts.timeline, model, (step, place) => this.#tip(step && explainStep(step, model), parts.timeline, place));
  }

  /** Look at the engine that the address names (`#/watch/1`), unless that is looked at already. */
  start() {
    const [name, number] = addressParts();
    if (name !== "watch") return; // the view is about to be left
    const replica = /^\d{1,6}$/.test(number ?? "") ? Number(number) : null;
    if (this.reading && replica === this.replica) return;
    this.replica = replica;
    this.reading?.abort();
    this.reading = new AbortController();
    this.tree.pin(null);
    this.element.dataset.live = false;
    if (replica !== null) this.fleet.mark(replica);
    follow(this.api, AbortSignal.any([this.reading.signal, this.aborter.signal]), replica, {
      onState: (told) => this.take(told), onFleet: (told) => this.takeFleet(told), onOutage: (reason) => this.lose(reason),
    });
  }

  close() {
    this.aborter.abort();
    for (const part of [this.tree, this.pool, this.timeline]) part.close();
  }

  recolour() {
    for (const part of [this.tree, this.pool, this.timeline]) part.recolour();
  }

  take(told) {
    const { replica } = this.model;
    this.model.take(told);
    if (this.model.replica !== replica) {
      this.fleet.mark(this.model.replica);
      this.tree.fit();
    }
    this.show();
  }

  takeFleet(told) {
    this.fleet.take(told.replicas);
    this.fleet.mark(this.replica ?? this.model.replica);
  }

  lose(reason) {
    this.model.lose(reason);
    this.#showState();
  }

  show() {
    this.tree.insets = { top: this.parts.head.offsetHeight + 16, bottom: this.parts.foot.offsetHeight + 10 };
    this.tree.update();
    this.pool.update();
    this.timeline.update();
    this.#showState();
    this.#showRates();
    this.#showPool();
    this.#showQueue();
    if (this.tree.pinned) this.#showPinned(this.tree.pinned, this.tree.at(this.tree.pinned));
  }

  // --- parts --------------------------------------------------------------------------------------

  #showState() {
    const { parts, model } = this;
    parts.outage.hidden = model.isLive || !model.outage;
    parts.outage.textContent = model.outage ? `The engine cannot be watched at the moment: ${model.outage}` : "";
    this.element.dataset.live = model.isLive;
    if (!model.engine) return;
    const { queue } = model;
    put(parts.headline,
      fact(count(model.numNodes), model.numHidden ? `nodes, the ${count(model.numHidden)} oldest not shown` : "nodes"), fact(count(model.engine.cached_tokens), "tokens cached"),
      fact(count(queue.num_running), "running"), fact(count(queue.num_waiting), "waiting"));
    parts.empty.hidden = model.engine.cached_tokens >= NEXT_TO_NOTHING || queue.num_running > 0;
  }

  #showRates() {
    const { tiles } = this.parts;
    const { rates, history, parts } = this.model;
    tiles.decode.set(count(rates.decode_tokens + rates.forced_tokens), rates.forced_tokens ? `tokens/s, ${count(rates.forced_tokens)} forced` : "tokens/s", history.decode);
    tiles.prefill.set(count(rates.prefill_tokens + rates.score_tokens), "tokens/s", history.prefill);
    tiles.hit.set(rates.hit_rate === null ? "–" : `${Math.round(100 * rates.hit_rate)}%`, rates.hit_rate === null ? "no prompts of late" : "of prompts, last 10 s", history.hit, 1);
    tiles.kv.set(`${Math.round(100 * (1 - parts.free / parts.total))}%`, `of ${count(parts.total)} tokens`, history.kv, 1);
    this.parts.steps.textContent = rates.steps ? `${count(rates.steps)} steps/s, busy ${Math.round(100 * rates.busy)}% of the time` : "idle";
  }

  #showPool() {
    const { poolBar, poolFacts } = this.parts;
    const { parts, engine, evictedTokens, pool } = this.model;
    const kinds = [["used", "in use", parts.used], ["leased", "leased", parts.leased], ["cached", "cached", parts.cached], ["free", "free", parts.free]];
    put(poolBar, ...kinds.map(([kind, , number]) => {
      const bar = h("i", { class: `is-${kind}` });
      bar.style.flexGrow = number / parts.total;
      return bar;
    }));
    put(poolFacts, ...kinds.map(([kind, name, number]) => h("li", { data: { kind } }, h("i", { class: `is-${kind}` }), h("b", { class: "num", text: count(number) }), ` ${name}`)));
    const host = engine.host ? ` · host ${count(engine.host.cached_tokens)} of ${count(engine.host.total_tokens)}` : "";
    const perCell = pool ? pool.pages_per_cell * pool.page_size : 1;
    this.parts.poolNote.textContent = `a square is ${perCell === 1 ? "one token" : `${perCell} tokens`} · ${count(evictedTokens)} evicted since the start${host}`;
  }

  #showQueue() {
    const { queue } = this.model;
    const { running, waiting, policy } = this.parts;
    policy.textContent = queue.policy ? `policy ${queue.policy}` : "";
    this.#list(running, queue.running, queue.num_running, "Nothing runs.", progress);
    this.#list(waiting, queue.waiting, queue.num_waiting, "Nobody waits.", (request) => [h("span", { class: "why", text: whyWaiting(request) })]);
    if (this.lit && !this.lit.item.isConnected) this.#light(null);
    else if (this.lit) this.#light(this.lit);
  }

  /** The first requests, each in an element that stays its own as long as it is listed. */
  #list(list, requests, total, nothing, what) {
    const shown = requests.slice(0, MAX_LISTED);
    const known = new Map([...list.children].map((item) => [item.entry?.request.id, item]));
    const items = shown.map((request) => {
      const item = known.get(request.id) ?? this.#requestItem();
      item.entry.request = request;
      return put(item, h("span", { class: "num name", text: request.program ?? `#${request.id}` }), ...what(request));
    });
    const note = total > shown.length ? `and ${count(total - shown.length)} more` : total ? null : nothing;
    if (note) items.push(h("li", { class: "nothing", text: note }));
    if (items.length !== list.children.length || items.some((item, i) => item !== list.children[i])) arrange(list, items);
  }

  #requestItem() {
    const item = h("li", { tabindex: "0", on: {
      pointerenter: () => this.#light(item.entry), pointerleave: () => this.#light(null),
      focus: () => this.#light(item.entry), blur: () => this.#light(null),
    } });
    item.entry = { item, request: null };
    return item;
  }

  /** A listed request's path stands out, and it is explained. */
  #light(entry) {
    this.lit = entry;
    const node = entry?.request.node;
    const ids = node ? new Set(this.model.path(node)) : null;
    this.tree.light(ids);
    this.pool.light(ids);
    if (!entry) return this.#tip(null);
    this.#tip(explainRequest(entry.request, this.model), entry.item, { x: 0, y: entry.item.offsetHeight / 2 }, null, true);
  }

  // --- explanations -------------------------------------------------------------------------------

  #tip(content, over, place, node = null, isLeft = false) {
    const { tip } = this.parts;
    tip.hidden = !content || (node && node === this.tree?.pinned);
    if (tip.hidden) return;
    put(tip, ...content);
    if (node) tip.append(h("p", { class: "hint", text: "Click to keep this open." }));
    this.#put(tip, over, place, isLeft);
  }

  #pin(node, place) {
    this.parts.pinned.hidden = !node;
    this.parts.tip.hidden = true;
    if (node) this.#showPinned(node, place);
  }

  #showPinned(node, place) {
    const { pinned, pinnedBody } = this.parts;
    put(pinnedBody, ...explainNode(node, this.model));
    this.#put(pinned, this.parts.tree, place);
  }

  /** Beside a place on an element, within the view. */
  #put(box, over, place, isLeft = false) {
    const frame = this.element.getBoundingClientRect();
    const from = over.getBoundingClientRect();
    const x = from.left - frame.left + place.x;
    const y = from.top - frame.top + this.element.scrollTop + place.y;
    const { offsetWidth: width, offsetHeight: height } = box;
    const top = this.element.scrollTop + 8;
    const bottom = this.element.scrollTop + frame.height - height - 8;
    const right = x + 18 + width > frame.width - 8 || isLeft;
    box.style.left = `${Math.min(Math.max(8, right ? x - width - 14 : x + 18), frame.width - width - 8)}px`;
    box.style.top = `${Math.max(top, Math.min(y - 12, bottom))}px`;
  }

  // --- what can be done ---------------------------------------------------------------------------

  search(text) {
    const wanted = text.trim().toLowerCase();
    if (!wanted) {
      this.tree.find(null);
      this.parts.found.textContent = "";
      return;
    }
    const hits = [...this.model.nodes.values()].filter((node) => node.text.toLowerCase().includes(wanted) || node.owner === wanted);
    this.tree.find(new Set(hits.flatMap((node) => this.model.path(node.id))));
    this.parts.found.textContent = hits.length ? `${count(hits.length)} found` : "not found";
    if (hits.length) this.tree.reveal(hits[0]);
  }

  async demo(button) {
    button.disabled = true;
    const before = button.textContent;
    button.textContent = "Running…";
    try {
      await runDemo(this.api, this.aborter.signal);
    } catch (error) {
      if (error.name !== "AbortError") this.lose(error.message);
    }
    button.textContent = before;
    button.disabled = false;
  }

  key(event) {
    const { tree } = this;
    const node = tree.pinned ?? tree.hovered;
    const steps = { "+": () => tree.zoom(1.25), "=": () => tree.zoom(1.25), "-": () => tree.zoom(0.8), 0: () => tree.fit(), Escape: () => tree.pin(null) };
    const near = () => {
      if (!node) return tree.layout.roots[0];
      const siblings = this.model.nodes.get(node.parent)?.children ?? tree.layout.roots;
      const at = siblings.indexOf(node);
      return { ArrowLeft: this.model.nodes.get(node.parent), ArrowRight: node.children[0], ArrowUp: siblings[at - 1], ArrowDown: siblings[at + 1] }[event.key];
    };
    if (steps[event.key]) steps[event.key]();
    else if (event.key.startsWith("Arrow")) {
      const next = near();
      if (next) {
        tree.reveal(next);
        tree.pin(next);
        this.parts.spoken.textContent = next.text || "root";
      }
    } else return;
    event.preventDefault();
  }
}

const fact = (value, name) => h("span", {}, h("b", { class: "num", text: value }), ` ${name}`);

/** Makes `items` the children of a list; those that stay are not taken out, and keep the focus. */
function arrange(list, items) {
  for (const child of [...list.children]) if (!items.includes(child)) child.remove();
  items.forEach((item, i) => {
    if (list.children[i] !== item) list.insertBefore(item, list.children[i] ?? null);
  });
}

/** How far a request is: cached, computed and to be computed of the prompt, then output. */
function progress(request) {
  const whole = request.prompt + request.max_output || 1;
  const computed = Math.min(request.computed, request.prompt) - request.cached;
  const parts = [["reused", request.cached], ["computed", Math.max(0, computed)], ["todo", request.prompt - Math.min(request.prompt, Math.max(request.computed, request.cached))], ["made", request.output]];
  const bar = h("span", { class: "progress", "aria-hidden": "true" }, ...parts.map(([kind, number]) => {
    const part = h("i", { class: `is-${kind}` });
    part.style.width = `${(100 * number) / whole}%`;
    return part;
  }));
  return [bar, h("span", { class: "num amount", text: request.task !== "generate" ? `${request.task}s ${count(request.prompt)}` : `${count(request.output)}/${count(request.max_output)}` })];
}

function tile(name, title) {
  const value = h("b", { class: "num", text: "–" });
  const unit = h("small", {});
  const line = spark();
  const element = h("div", { class: `tile is-${name}`, title }, h("h3", { text: { decode: "Decode", prefill: "Prefill", hit: "Cache hits", kv: "KV filled" }[name] }), value, unit, line.element);
  return {
    element,
    set(text, what, values, most) {
      value.textContent = text;
      unit.textContent = what;
      line.show(values, most);
    },
  };
}

const LEGEND = [
  ["use", "read by a request now"], ["hot", "used just now"], ["warm", "a while ago"], ["cold", "long ago"],
  ["aged", "used for the last time"], ["host", "on the host only"], ["pinned", "pinned"], ["leased", "leased"],
];
const STEPS = [["computed", "prompts"], ["disk", "scored"], ["made", "decoded"], ["forced", "forced by a grammar"], ["reused", "from the cache"], ["time", "time taken"]];

function legend(entries) {
  return h("ul", { class: "legend" }, ...entries.map(([kind, text]) => h("li", {}, h("i", { class: `key-${kind}`, "aria-hidden": "true" }), text)));
}

/** The elements of the view. */
function build(view) {
  const parts = {
    tree: h("canvas", { class: "tree-canvas", tabindex: "0", role: "img", "aria-label": "The radix tree. Arrow keys go from node to node, plus and minus zoom, 0 shows all of it.", on: { keydown: (event) => view.key(event) } }),
    pool: h("canvas", { role: "img", "aria-label": "The KV pool: what each part of it holds" }),
    timeline: h("canvas", { class: "timeline-canvas", tabindex: "0", role: "img", "aria-label": "The last steps: what each computed and how long it took. Left and right go from step to step." }),
    headline: h("p", { class: "headline" }), outage: h("p", { class: "outage", role: "alert", hidden: true }),
    steps: h("span", { class: "num soft" }), policy: h("span", { class: "soft" }), found: h("span", { class: "found", role: "status" }),
    spoken: h("p", { class: "unseen", role: "status" }), poolBar: h("div", { class: "pool-bar", "aria-hidden": "true" }), poolFacts: h("ul", { class: "pool-facts" }),
    poolNote: h("p", { class: "note" }), running: h("ul", { class: "requests" }), waiting: h("ul", { class: "requests" }),
    tip: h("div", { class: "tip", role: "tooltip", hidden: true }),
    pinnedBody: h("div", { class: "tip-body" }),
    tiles: {
      decode: tile("decode", "Tokens that requests were given in the last second"),
      prefill: tile("prefill", "Prompt tokens that had to be computed in the last second"),
      hit: tile("hit", "The part of admitted prompts whose KV was cached already"),
      kv: tile("kv", "The part of the pool that is not free; what is only cached gives way when it is needed"),
    },
  };
  parts.pinned = h("div", { class: "tip is-pinned", role: "dialog", "aria-label": "A node of the tree", hidden: true },
    h("button", { type: "button", class: "quiet close", "aria-label": "Close", text: "×", on: { click: () => view.tree.pin(null) } }), parts.pinnedBody);
  const demoButton = () => h("button", { type: "button", class: "demo", text: "Run a demo load", on: { click: (event) => view.demo(event.currentTarget) } });
  const shapes = ["rows", "round"].map((shape) => h("button", {
    type: "button", class: "quiet", text: shape === "rows" ? "Rows" : "Round", "aria-pressed": String(shape === "rows"), data: { shape },
    on: { click: (event) => {
      view.tree.setShape(shape);
      for (const button of shapes) button.setAttribute("aria-pressed", String(button === event.currentTarget));
    } },
  }));
  const search = h("input", { type: "search", placeholder: "Find a text", "aria-label": "Find nodes by their text", on: { input: (event) => view.search(event.target.value) } });
  parts.empty = h("div", { class: "empty", hidden: true },
    h("h2", { text: "The cache is empty" }),
    h("p", { text: "Send a request, in the chat or with any client, and its prompt grows into this tree. Requests that begin alike share a branch." }), demoButton());
  parts.element = h("div", { class: "watch" }, h("h1", { class: "unseen", text: "The engine at work" }), view.fleet.element,
    h("section", { class: "tree-panel", "aria-label": "Radix tree" },
      parts.tree,
      (parts.head = h("div", { class: "tree-head" },
        h("div", {}, h("h2", { text: "Radix tree" }), parts.headline),
        h("div", { class: "tools" }, search, parts.found, h("span", { class: "shapes", role: "group", "aria-label": "Shape" }, ...shapes),
          h("button", { type: "button", text: "Fit", title: "Show all of it (0)", class: "quiet fit", on: { click: () => view.tree.fit() } }), demoButton()))),
      parts.empty, parts.outage,
      (parts.foot = h("div", { class: "tree-foot" }, legend(LEGEND)))),
    h("section", { class: "steps-panel", "aria-label": "Steps" },
      h("header", {}, h("h2", { text: "Steps" }), parts.steps, legend(STEPS)), parts.timeline),
    h("aside", { class: "side" },
      h("section", { class: "tiles", "aria-label": "Rates" }, ...Object.values(parts.tiles).map(({ element }) => element)),
      h("section", { "aria-label": "KV pool" }, h("header", {}, h("h2", { text: "KV pool" })), parts.poolBar, parts.poolFacts, h("div", { class: "pool-cells" }, parts.pool), parts.poolNote),
      h("section", { "aria-label": "Running" }, h("header", {}, h("h2", { text: "Running" }), parts.policy), parts.running),
      h("section", { "aria-label": "Waiting" }, h("header", {}, h("h2", { text: "Waiting" })), parts.waiting)),
    parts.tip, parts.pinned, parts.spoken);
  return parts;
}
