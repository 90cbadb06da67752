// The path through a conversation, as a column of messages; before the first one, ways to begin.

import { h, put, s } from "../dom.js";
import { MessageView } from "./message.js";
import { startersFor } from "./starters.js";
import { pendingCalls } from "./tools/calls.js";
import { ROOT, childTable, pathOf } from "./tree.js";

const NEAR_END_PX = 90;

/** `actions`: those of a message, and start(starter). */
export class Thread {
  constructor(actions) {
    this.actions = actions;
    this.views = new Map(); // node id -> MessageView
    this.column = h("div", { class: "column" });
    this.element = h("div", { class: "thread", role: "log", "aria-live": "off", "aria-label": "Messages", tabindex: "-1" }, this.column);
    this.isAtEnd = true;
    this.element.addEventListener("scroll", () => { this.isAtEnd = this.distance() < NEAR_END_PX; }, { passive: true });
  }

  /** Another conversation comes. */
  reset() {
    this.views.clear();
    put(this.column);
  }

  show(conversation, engine) {
    const table = childTable(conversation);
    const path = pathOf(conversation, table);
    if (!path.length) return void put(this.column, this.beginning(engine));
    const views = path.map((node) => this.viewOf(node));
    const pendingIds = new Set(pendingCalls(conversation, path.at(-1).id).map((call) => call.id));
    views.forEach((view, index) => view.show(table.get(path[index].parent), pendingIds));
    const elements = views.map((view) => view.element);
    if (elements.length !== this.column.children.length || elements.some((element, i) => element !== this.column.children[i])) put(this.column, ...elements);
    this.element.classList.toggle("forked", [...table].some(([parent, children]) => parent !== ROOT && children.length > 1));
    const reachable = this.column.querySelector('[tabindex="0"].message') ?? elements.at(-1);
    for (const element of elements) element.tabIndex = element === reachable ? 0 : -1;
  }

  viewOf(node) {
    if (!this.views.has(node.id)) this.views.set(node.id, new MessageView(node, this.actions));
    return this.views.get(node.id);
  }

  /** `node`'s text has grown. */
  grow(node) {
    const view = this.views.get(node.id);
    if (!view?.element.isConnected) return;
    view.showText();
    if (this.isAtEnd) this.toEnd();
  }

  focus(id, isNearest = false) {
    const element = this.views.get(id)?.element;
    if (!element?.isConnected) return;
    for (const other of this.column.children) other.tabIndex = other === element ? 0 : -1;
    element.focus({ preventScroll: true });
    element.scrollIntoView({ block: isNearest ? "center" : "nearest" });
  }

  /** Where a conversation that is opened is read on: at its end; an empty one, from the top. */
  toOpening() {
    if (this.views.size) this.toEnd();
    else this.element.scrollTop = 0;
  }

  toEnd() {
    this.element.scrollTop = this.element.scrollHeight;
  }

  distance() {
    return this.element.scrollHeight - this.element.scrollTop - this.element.clientHeight;
  }

  beginning(engine) {
    if (!engine.model) {
      const text = engine.state === "loading" ? "Looking for the engine…" : "There is no engine yet. This page asks for it every second.";
      return h("div", { class: "beginning" }, emblem(), h("h2", { text: "One moment" }), h("p", { text }));
    }
    const { note, starters } = startersFor(engine.model);
    return h("div", { class: "beginning" }, emblem(), h("h2", { text: `Chat with ${engine.model}` }),
      h("p", { text: "Stemma runs a language model on this server: chat with it here, and see which parts of your prompts it reuses." }),
      h("div", { class: "starters" }, ...starters.map((starter) => h("button", { type: "button", class: "starter", on: { click: () => this.actions.start(starter) } },
        h("b", { text: starter.title }), h("span", { text: starter.text })))),
      h("p", { class: "hint", text: note }));
  }
}

/** A small stemma. */
function emblem() {
  const line = (d, isLit) => s("path", { d, class: isLit ? "edge lit" : "edge" });
  const dot = (x, y, r, isLit) => s("circle", { cx: x, cy: y, r, class: isLit ? "dot lit" : "dot" });
  return s("svg", { class: "emblem", viewBox: "0 0 160 92", "aria-hidden": "true" },
    line("M80 10C80 30 36 22 36 44"), line("M80 10C80 30 124 22 124 44"), line("M36 44C36 62 16 58 16 80"), line("M36 44C36 62 56 58 56 80"),
    line("M124 44C124 62 146 58 146 80"), line("M80 10C80 30 124 22 124 44", true), line("M124 44C124 62 102 58 102 80", true),
    dot(36, 44, 4), dot(16, 80, 4), dot(56, 80, 4), dot(146, 80, 4), dot(80, 10, 5, true), dot(124, 44, 5, true), dot(102, 80, 5, true));
}
