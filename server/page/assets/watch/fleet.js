// All replicas at a glance, a row each; one of them is chosen to be looked at more closely.

import { h, put } from "../dom.js";
import { count } from "./explain.js";

const ROLES = { prefill: ["computes prompts"], decode: ["decodes"] }; // as shown; none without roles

/** The rows; `onChoose(number)` when one is chosen. Hidden until there are several engines. */
export class Fleet {
  constructor(onChoose) {
    this.onChoose = onChoose;
    this.replicas = [];
    this.rows = new Map(); // by number: an element stays its own, and keeps the focus
    this.sums = h("p", { class: "headline" });
    this.list = h("ul", { class: "replicas" });
    this.element = h("section", { class: "fleet", "aria-label": "Replicas", hidden: true },
      h("header", {}, h("h2", { text: "Replicas" }), this.sums), this.list);
  }

  /** `replicas`: as the event tells of them. */
  take(replicas) {
    this.replicas = replicas;
    this.element.hidden = false;
    const numReady = replicas.filter(({ state }) => state === "ready").length;
    const sum = (of) => count(Math.round(replicas.reduce((total, replica) => total + of(replica), 0)));
    put(this.sums, fact(`${numReady} of ${replicas.length}`, "ready"), fact(sum((r) => r.num_calls), "calls in flight"),
      fact(sum((r) => r.num_programs), "open programs"), fact(sum((r) => r.rates.output_tokens), "tokens/s"));
    const numbers = new Set(replicas.map(({ replica }) => replica));
    for (const [number, row] of this.rows) {
      if (numbers.has(number)) continue;
      row.element.remove();
      this.rows.delete(number);
    }
    for (const told of replicas) {
      const row = this.rows.get(told.replica) ?? this.#row(told.replica);
      row.show(told);
    }
  }

  /** Which one is looked at. */
  mark(number) {
    for (const [own, { button }] of this.rows) button.setAttribute("aria-pressed", String(own === number));
  }

  #row(number) {
    const row = rowOf(number, () => this.onChoose(number));
    const next = [...this.rows.entries()].filter(([own]) => own > number).sort(([a], [b]) => a - b)[0];
    this.list.insertBefore(row.element, next?.[1].element ?? null);
    this.rows.set(number, row);
    return row;
  }
}

function rowOf(number, onClick) {
  const state = h("span", { class: "state" });
  const cells = Object.fromEntries(["calls", "programs", "hits", "speed", "restarts"].map((name) => [name, h("span", { class: `cell is-${name}` })]));
  const bar = h("span", { class: "pool-bar", "aria-hidden": "true" });
  const pool = h("span", { class: "pool-words num" });
  const button = h("button", { type: "button", class: "replica", "aria-pressed": "false", on: { click: onClick } },
    h("span", { class: "name" }, h("i", { "aria-hidden": "true" }), h("b", { text: `Replica ${number}` }), " ", state),
    h("span", { class: "facts" }, cells.calls, cells.programs),
    h("span", { class: "pool" }, bar, pool),
    h("span", { class: "facts" }, cells.hits, cells.restarts), cells.speed);
  return {
    element: h("li", {}, button), button,
    show(told) {
      button.dataset.state = told.state;
      button.title = told.why ? `${told.state}: ${told.why}` : `Look at replica ${number}`;
      state.textContent = [told.state, ...ROLES[told.role] ?? []].join(", ");
      put(cells.calls, fact(count(told.num_calls), plural(told.num_calls, "call")));
      put(cells.programs, fact(count(told.num_programs), plural(told.num_programs, "program")));
      put(cells.hits, fact(told.rates.hit_rate === null ? "–" : `${Math.round(100 * told.rates.hit_rate)}%`, "hits"));
      put(cells.restarts, fact(count(told.num_restarts), plural(told.num_restarts, "restart")));
      put(cells.speed, fact(count(Math.round(told.rates.output_tokens)), "tokens/s"));
      showPool(bar, pool, told);
    },
  };
}

function showPool(bar, words, { total_tokens: total, free_tokens: free, evictable_tokens: cached, why }) {
  if (total === undefined || total === null) {
    put(bar);
    words.textContent = why ?? "";
    return;
  }
  const parts = [["used", total - free - cached], ["cached", cached], ["free", free]];
  put(bar, ...parts.map(([kind, number]) => {
    const part = h("i", { class: `is-${kind}` });
    part.style.flexGrow = number / total;
    return part;
  }));
  words.textContent = `${count(total - free - cached)} held, ${count(cached)} cached of ${count(total)}`;
}

const fact = (value, name) => h("span", {}, h("b", { class: "num", text: value }), ` ${name}`);

const plural = (number, name) => (number === 1 ? name : `${name}s`);
