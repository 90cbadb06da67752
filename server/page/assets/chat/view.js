// The chat: conversations, the path through the open one, answers as they are written.

import { h, iconButton, put, useStyle } from "../dom.js";
import { writeAnswer } from "./answer.js";
import { Composer } from "./composer.js";
import { Archive } from "./archive.js";
import { Panel } from "./panel.js";
import { Sampling } from "./sampling.js";
import { problemOfSchema } from "./schema_check.js";
import { Sidebar } from "./sidebar.js";
import { SCHEMAS } from "./starters.js";
import { Thread } from "./thread.js";
import { ROOT, addNode, childrenOf, choose, pathOf } from "./tree.js";

let opened = null; // the view, once there is one: answers go on being written while another is shown

/** The chat in `root`; returns how to leave it. */
export async function mount(root, { api, engine }) {
  await useStyle("chat/chat.css");
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
    this.running = new Map(); // conversation id -> {controller, node}
    this.conversation = null;
    this.frame = 0;
    this.build();
    addEventListener("pagehide", () => archive.flushAll());
    engine.onChange(() => this.showThread());
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
      edit: (node, text) => this.send(text, node.parent), again: (node) => this.answer(node.parent),
      retry: (node) => this.write(node), pick: (node) => this.pick(node), isBusy: () => this.isWriting,
      start: (starter) => this.start(starter),
    });
    this.composer = new Composer({
      send: (text) => this.send(text), stop: () => this.stop(),
      toggleSchema: () => this.toggleSchema(), openSettings: () => this.openPanel("settings"),
    });
    this.title = h("h1", { class: "chat-title" });
    this.live = h("p", { class: "unseen", role: "status", "aria-live": "polite" });
    this.toast = h("p", { class: "toast", role: "alert", hidden: true });
    const head = h("div", { class: "chat-head" }, iconButton("menu", "Conversations", () => this.drawer("sidebar"), { class: "quiet icon-button open-sidebar" }),
      this.title, iconButton("tree", "Tree of this conversation", () => this.openPanel("tree"), { class: "quiet icon-button open-panel" }),
      iconButton("sliders", "Settings", () => this.openPanel("settings"), { class: "quiet icon-button open-panel" }));
    this.element = h("div", { class: "chat" }, this.sidebar.element,
      h("section", { class: "chat-main", "aria-label": "Conversation" }, head, this.thread.element, this.toast, this.composer.element, this.live),
      this.panel.element, h("div", { class: "veil", on: { click: () => this.closeDrawers() } }));
  }

  get isWriting() {
    return this.running.has(this.conversation.id);
  }

  // --- which conversation is open ---------------------------------------------------------------

  route() {
    const [name, id] = location.hash.slice(2).split("/");
    if (name && name !== "chat") return;
    const wanted = this.archive.get(id) ?? (id ? null : this.conversation) ?? this.fresh();
    if (wanted.id !== id) history.replaceState(null, "", `#/chat/${wanted.id}`);
    this.open(wanted);
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
    this.thread.toEnd();
  }

  create() {
    history.pushState(null, "", `#/chat/${this.fresh().id}`);
    this.route();
    this.composer.focus();
  }

  remove(conversation) {
    this.running.get(conversation.id)?.controller.abort();
    this.archive.remove(conversation);
    if (conversation !== this.conversation) return this.showSidebar();
    this.conversation = this.archive.items[0] ?? null;
    history.replaceState(null, "", "#/chat");
    this.route();
  }

  // --- what is written ----------------------------------------------------------------------------

  /** A message below `parent` (the end of the path), and its answer. Returns whether it was taken. */
  send(text, parent = pathOf(this.conversation).at(-1)?.id ?? ROOT) {
    const problem = this.problem();
    if (problem) return this.say(problem), false;
    try {
      const node = addNode(this.conversation, parent, "user", { text });
      this.answer(node.id);
    } catch (error) {
      return this.say(error.message), false;
    }
    return true;
  }

  /** One more answer below a message. */
  answer(parent) {
    const problem = this.problem();
    if (problem) return this.say(problem);
    const { schema } = this.conversation;
    this.write(addNode(this.conversation, parent, "assistant", schema.on ? { schemaText: schema.text } : {}));
  }

  /** Why nothing can be sent now, or "". */
  problem() {
    if (this.isWriting) return "An answer is being written; stop it first (Esc).";
    const { schema } = this.conversation;
    const found = schema.on && problemOfSchema(schema.text);
    if (found) { this.openPanel("settings"); return `The schema cannot be sent: ${found}`; }
    const [wrong] = this.sampling.wrong;
    if (wrong) { this.openPanel("settings"); return `${wrong[0]} must be ${wrong[1]}.`; }
    return "";
  }

  async write(node) {
    if (this.isWriting) return;
    const { conversation } = this;
    const controller = new AbortController();
    this.running.set(conversation.id, { controller, node });
    this.archive.touch(conversation);
    this.live.textContent = "Writing the answer.";
    const onChange = () => { this.archive.save(conversation); this.showSoon(node); };
    const written = writeAnswer({ api: this.api, conversation, node, sampling: this.sampling.request, signal: controller.signal, onChange });
    this.showAll();
    if (document.activeElement === document.body) this.thread.focus(node.id); // what had the focus has gone
    this.thread.toEnd();
    await written;
    this.running.delete(conversation.id);
    if (node.state === "failed" || this.engine.state !== "ready") this.engine.doubt();
    this.archive.touch(conversation);
    if (conversation === this.conversation) this.announce(node);
    this.showAll();
  }

  stop() {
    this.running.get(this.conversation.id)?.controller.abort();
  }

  start({ text, schema }) {
    if (schema) this.conversation.schema = { on: true, text: SCHEMAS[schema] };
    this.panel.conversation = null; // its settings have changed
    this.send(text);
  }

  pick(node, isFromTree = false) {
    choose(this.conversation, node.id);
    this.archive.save(this.conversation);
    this.showAll();
    this.thread.focus(node.id, isFromTree);
    if (isFromTree) this.closeDrawers();
  }

  toggleSchema() {
    const { schema } = this.conversation;
    schema.on = !schema.on;
    schema.text ||= SCHEMAS.Person;
    this.archive.save(this.conversation);
    this.panel.conversation = null;
    if (schema.on) this.openPanel("settings");
    this.showAll();
  }

  // --- what is shown ------------------------------------------------------------------------------

  showAll() {
    this.title.textContent = this.conversation.title || "New conversation";
    this.showThread();
    this.showSidebar();
    this.showComposer();
    this.panel.show(this.conversation);
  }

  showThread() {
    if (this.conversation) this.thread.show(this.conversation, this.engine);
  }

  showSidebar() {
    this.sidebar.show(this.conversation.id, this.running);
  }

  showComposer() {
    if (this.conversation)
      this.composer?.show({ isWriting: this.isWriting, schema: this.conversation.schema, summary: this.sampling.summary });
  }

  /** The text of an answer grows: once a frame is enough. */
  showSoon(node) {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.thread.grow(node);
    });
  }

  announce(node) {
    const ends = { done: `Answer: ${node.text.slice(0, 500)}`, stopped: "Stopped.", failed: `Failed: ${node.error}` };
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
