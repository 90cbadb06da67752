// The chat: conversations, the path through the open one, answers as they are written.

import { addressParts } from "../address.js";
import { h, iconButton, put, useStyle } from "../dom.js";
import { Archive } from "./archive.js";
import { Composer } from "./composer.js";
import { ModelPicker } from "./model_picker.js";
import { Panel } from "./panel.js";
import { Sampling } from "./sampling.js";
import { Sidebar } from "./sidebar.js";
import { SCHEMAS } from "./starters.js";
import { Thread } from "./thread.js";
import { toolsOf } from "./tools/toolset.js";
import { childrenOf, choose, pathOf } from "./tree.js";
import { Turns } from "./turns.js";

const isPanelBeside = matchMedia("(min-width: 1121px)"); // else it is a drawer, as chat.css has it
let opened = null; // the view, once there is one: answers go on being written while another is shown

/** The chat in `root`; returns how to leave it. */
export async function mount(root, { api, engine }) {
  await Promise.all(["chat/chat.css", "chat/composer.css"].map(useStyle));
  opened ??= ChatView.open(api, engine);
  const view = await opened;
  view.enter(root);
  return () => view.leave();
}

class ChatView {
  static async open(api, engine) {
    let view = null;
    const archive = await Archive.open((text) => view?.say(text));
    view = new ChatView(archive, api, engine);
    return view;
  }

  constructor(archive, api, engine) {
    Object.assign(this, { archive, api, engine });
    this.sampling = new Sampling();
    this.turns = new Turns({ archive, api, sampling: this.sampling }, {
      refused: (problem, tab) => { if (tab) this.openPanel(tab); this.say(problem); },
      began: (conversation, node) => this.showBeginning(conversation, node), grew: (conversation, node) => this.showSoon(node),
      ended: (conversation, node) => this.showEnd(conversation, node), changed: () => this.showAll(),
    });
    this.conversation = null;
    this.frame = 0;
    this.build();
    addEventListener("pagehide", () => archive.flushAll());
    engine.onChange(() => { this.showThread(); this.showComposer(); });
  }

  enter(root) {
    put(root, this.element);
    this.listen = new AbortController();
    addEventListener("hashchange", () => this.route(), { signal: this.listen.signal });
    document.addEventListener("keydown", (event) => this.onKey(event), { signal: this.listen.signal });
    this.route();
    if (matchMedia("(hover: hover)").matches) this.composer.focus();
  }

  leave() {
    this.listen.abort();
    this.archive.flushAll();
    this.element.remove();
  }

  build() {
    this.sidebar = new Sidebar(this.archive, {
      create: () => this.create(), say: (text) => { this.say(text); this.showSidebar(); },
      rename: (conversation, title) => { Object.assign(conversation, { title, isTitled: true }); this.archive.save(conversation); this.showAll(); },
      remove: (conversation) => this.remove(conversation),
    });
    this.panel = new Panel(this.sampling, {
      pick: (node) => this.pick(node, true), close: () => this.drawer("panel", false),
      change: (conversation) => this.archive.save(conversation), changed: () => this.showComposer(),
    });
    this.thread = new Thread({
      edit: (node, text) => this.edit(node, text), again: (node) => this.turns.answer(this.conversation, node.parent),
      retry: (node) => this.turns.write(this.conversation, node), pick: (node) => this.pick(node), isBusy: () => this.isWriting,
      start: (starter) => this.start(starter), giveResult: (call, text) => this.giveResult(call, text),
    });
    this.picker = new ModelPicker({
      choose: (name) => this.chooseModel(name), refresh: () => this.engine.check(),
    });
    this.composer = new Composer({
      send: (text, attachments) => this.turns.send(this.conversation, { text, attachments }), stop: () => this.stop(), say: (text) => this.say(text),
      openTools: () => this.openPanel("tools"), openSettings: () => this.openPanel("settings"),
      toggleSchema: () => this.toggleSchema(), chooseSchema: (name) => this.setSchema({ on: true, text: SCHEMAS[name] }),
    }, this.picker.element);
    this.title = h("h1", { class: "chat-title" });
    this.live = h("p", { class: "unseen", role: "status", "aria-live": "polite" });
    this.toast = h("p", { class: "toast", role: "alert", hidden: true });
    const head = h("div", { class: "chat-head" }, iconButton("menu", "Conversations", () => this.drawer("sidebar"), { class: "quiet icon-button open-sidebar" }),
      this.title, iconButton("tree", "Tree of this conversation", () => this.openPanel("tree"), { class: "quiet icon-button open-panel" }));
    const main = h("section", { class: "chat-main", "aria-label": "Conversation" }, head, this.thread.element, this.toast, this.composer.element, this.live);
    this.composer.takeDrops(main);
    this.element = h("div", { class: "chat" }, this.sidebar.element, main,
      this.panel.element, h("div", { class: "veil", on: { click: () => this.closeDrawers() } }));
  }

  get isWriting() {
    return this.turns.isWriting(this.conversation);
  }

  // --- which conversation is open ---------------------------------------------------------------

  route() {
    const [name, id, nodeId] = addressParts();
    if (name && name !== "chat") return;
    const wanted = this.archive.get(id) ?? (id ? null : this.conversation) ?? this.fresh();
    if (wanted.id !== id || nodeId) history.replaceState(null, "", `#/chat/${wanted.id}`);
    this.open(wanted);
    if (wanted.nodes[nodeId]) this.pick(wanted.nodes[nodeId], true);
  }

  /** An empty conversation: the one there is, or a new one. */
  fresh() {
    return this.archive.items.find((item) => !Object.keys(item.nodes).length) ?? this.archive.create();
  }

  open(conversation) {
    this.conversation = conversation;
    this.closeDrawers();
    this.thread.reset();
    this.showAll();
    this.thread.toOpening();
  }

  create() {
    history.pushState(null, "", `#/chat/${this.fresh().id}`);
    this.route();
    this.composer.focus();
  }

  remove(conversation) {
    this.turns.stop(conversation);
    this.archive.remove(conversation);
    if (conversation !== this.conversation) return this.showSidebar();
    this.conversation = this.archive.items[0] ?? null;
    history.replaceState(null, "", "#/chat");
    this.route();
  }

  // --- what is written ----------------------------------------------------------------------------

  stop() {
    this.turns.stop(this.conversation);
  }

  start({ text, schema }) {
    if (schema) this.setSchema({ on: true, text: SCHEMAS[schema] });
    this.turns.send(this.conversation, { text });
  }

  /** Another text in place of a message begins a branch; its files, or the call it answers, stay. */
  edit(node, text) {
    if (node.role === "tool") this.turns.giveResult(this.conversation, node.parent, { id: node.callId, name: node.name }, text);
    else this.turns.send(this.conversation, { text, attachments: node.attachments }, node.parent);
  }

  giveResult(call, text) {
    this.turns.giveResult(this.conversation, pathOf(this.conversation).at(-1).id, call, text);
  }

  pick(node, isFromTree = false) {
    choose(this.conversation, node.id);
    this.archive.save(this.conversation);
    this.showAll();
    this.thread.focus(node.id, isFromTree);
    if (isFromTree) this.closeDrawers();
  }

  toggleSchema() {
    const { on, text } = this.conversation.schema;
    this.setSchema({ on: !on, text: text || SCHEMAS.Person });
    if (!on && isPanelBeside.matches) this.openPanel("settings");
  }

  setSchema(schema) {
    this.conversation.schema = schema;
    this.archive.save(this.conversation);
    this.panel.conversation = null; // its settings have changed
    this.showAll();
  }

  // --- what is shown ------------------------------------------------------------------------------

  showAll() {
    this.title.textContent = this.conversation.title || "New conversation";
    this.showThread();
    this.showSidebar();
    this.showComposer();
    this.panel.show(this.conversation, this.engine.maxModelLenOf(this.conversation.model));
  }

  chooseModel(name) {
    this.conversation.model = name;
    this.archive.save(this.conversation);
    this.panel.show(this.conversation, this.engine.maxModelLenOf(name));
  }

  showThread() {
    if (this.conversation) this.thread.show(this.conversation, this.engine);
  }

  showSidebar() {
    this.sidebar.show(this.conversation.id, this.turns.running);
  }

  showComposer() {
    if (!this.conversation) return;
    const { schema, tools, model } = this.conversation;
    this.composer?.show({ isWriting: this.isWriting, schema, numTools: toolsOf(tools).length, summary: this.sampling.summary });
    this.picker?.show(this.engine.models, model);
  }

  showBeginning(conversation, node) {
    this.showAll();
    if (conversation !== this.conversation) return;
    this.live.textContent = "Writing the answer.";
    if (document.activeElement === document.body) this.thread.focus(node.id); // what had the focus has gone
    this.thread.toEnd();
  }

  showEnd(conversation, node) {
    if (node.state === "failed" || this.engine.state !== "ready") this.engine.doubt();
    if (conversation === this.conversation) this.announce(node);
    this.showAll();
  }

  /** The text of an answer grows: once a frame is enough. */
  showSoon(node) {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.thread.grow(node);
    });
  }

  announce(node) {
    const calls = (node.toolCalls ?? []).map(({ name }) => ` Calls ${name}.`).join("");
    const ends = { done: `Answer: ${node.text.slice(0, 500)}${calls}`, stopped: "Stopped.", failed: `Failed: ${node.error}` };
    this.live.textContent = ends[node.state];
  }

  say(text) {
    this.toast.textContent = text;
    this.toast.hidden = false;
    clearTimeout(this.toastTimer);
    this.toastTimer = setTimeout(() => { this.toast.hidden = true; }, 6000);
  }

  // --- drawers and keys -----------------------------------------------------------------------------

  drawer(name, isOpen = !this.element.classList.contains(`with-${name}`)) {
    this.element.classList.toggle(`with-${name}`, isOpen);
    if (isOpen) this[name].element.querySelector("button, a")?.focus();
  }

  closeDrawers() {
    this.element.classList.remove("with-sidebar", "with-panel");
  }

  openPanel(tab) {
    this.panel.open(tab);
    this.drawer("panel", true);
  }

  onKey(event) {
    if (document.querySelector("dialog[open]")) return;
    const isTyping = event.target.closest?.("input, textarea, select");
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") { event.preventDefault(); this.create(); }
    else if (event.key === "Escape") { if (this.isWriting) this.stop(); else this.closeDrawers(); }
    else if (event.key === "/" && !isTyping) { event.preventDefault(); this.composer.focus(); }
    else if (event.key.startsWith("Arrow") && !isTyping && !event.altKey && !event.ctrlKey && !event.metaKey) this.walk(event);
  }

  /** Arrows on a message: up and down the path, left and right between branches. */
  walk(event) {
    const id = event.target.closest?.(".message")?.dataset.id;
    const node = id && this.conversation.nodes[id];
    if (!node) return;
    const isAcross = event.key === "ArrowLeft" || event.key === "ArrowRight";
    const row = isAcross ? childrenOf(this.conversation, node.parent) : pathOf(this.conversation);
    const next = row[row.indexOf(node) + (event.key === "ArrowLeft" || event.key === "ArrowUp" ? -1 : 1)];
    if (!next) return;
    event.preventDefault();
    if (isAcross) this.pick(next);
    else this.thread.focus(next.id);
  }
}
