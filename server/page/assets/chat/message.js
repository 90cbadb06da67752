// One message of a conversation: its text, what it cost, the branches beside it, what can be done.

import { h, iconButton, put } from "../dom.js";
import { copyButton } from "./copy.js";
import { shownAttachment } from "./attachments.js";
import { JsonView } from "./json_view.js";
import { showMarkdown } from "./markdown.js";
import { CallCards } from "./tools/card.js";

const FINISHES = { length: "cut by max tokens", abort: "ended by the server", content_filter: "filtered" };
const FAILURES = { away: "The engine is away", busy: "The server is busy", refused: "The server refused this. Edit your message, which goes along with the next one", broken: "The answer broke off" };
const count = new Intl.NumberFormat("en");

/** `actions`: {edit(node, text), again(node), retry(node), pick(node), isBusy(), giveResult(call, text)}. */
export class MessageView {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.body = h("div", { class: node.role === "assistant" ? "text prose" : "text plain" });
    this.reasoning = h("details", { class: "reasoning", hidden: true }, h("summary"), h("div", { class: "prose" }));
    this.calls = new CallCards(actions.giveResult);
    this.pendingIds = new Set(); // of calls that wait for the reader
    this.foot = h("footer", { class: "message-foot" });
    this.problem = h("div", { class: "failure", role: "alert", hidden: true });
    this.branches = h("div", { class: "branches", role: "group", "aria-label": "Branches" });
    this.same = h("span", { class: "same", title: "A higher temperature may part them" });
    this.json = null;
    this.element = h("article", { class: `message ${node.role}`, tabindex: "-1", "data-id": node.id,
      "aria-label": nameOf(node) },
      h("span", { class: "knot", "aria-hidden": "true" }),
      h("header", { class: "message-head" }, h("span", { class: "who", text: node.model ?? nameOf(node) }), this.branches, this.same, this.tools()),
      ...(node.role === "assistant" ? [this.reasoning, this.body, this.calls.element, this.problem, this.foot]
        : [...(node.attachments ?? []).map(shownAttachment), this.body]));
  }

  tools() {
    const { node, actions } = this;
    const change = node.role === "assistant"
      ? iconButton("again", "Answer again: begins a branch", () => actions.again(node), { "data-tool": "again" })
      : iconButton("edit", "Edit: begins a branch", () => this.beginEdit(), { "data-tool": "edit" });
    return h("div", { class: "message-tools" }, copyButton(() => node.text, "Copy the text"), change);
  }

  /** Shows the node as it is now, one of `siblings`; `pendingIds`: calls that wait for the reader. */
  show(siblings, pendingIds) {
    this.pendingIds = pendingIds;
    this.element.dataset.state = this.node.state;
    this.element.setAttribute("aria-busy", String(this.node.state === "writing"));
    this.showText();
    this.showBranches(siblings);
    if (this.node.role === "assistant") this.showEnd(siblings);
  }

  /** Only what changes while the answer is written. */
  showText() {
    const { node } = this;
    if (node.role !== "assistant") {
      if (!this.editor) this.body.textContent = node.text;
      return;
    }
    if (node.model) this.element.querySelector(".who").textContent = node.model;
    if (node.schemaText !== undefined) this.showJson();
    else showMarkdown(this.body, node.text);
    this.body.dataset.waits = String(node.state === "writing" && !node.text && !node.toolCalls);
    this.showReasoning();
    this.calls.show(node.toolCalls ?? [], node.state === "writing", this.pendingIds);
  }

  showJson() {
    if (!this.json) {
      this.json = new JsonView(this.node.schemaText);
      put(this.body, this.json.element);
    }
    this.json.show(this.node);
  }

  showReasoning() {
    const { reasoning, text, state } = this.node;
    this.reasoning.hidden = !reasoning;
    if (!reasoning) return;
    this.reasoning.firstChild.textContent = state === "writing" && !text ? "Thinking…" : "Thoughts";
    showMarkdown(this.reasoning.lastChild, reasoning);
  }

  showBranches(siblings) {
    const at = siblings.indexOf(this.node);
    this.branches.hidden = siblings.length < 2;
    if (siblings.length < 2) return put(this.branches);
    const to = (index) => () => this.actions.pick(siblings[index]);
    put(this.branches,
      iconButton("left", "Previous branch", to(at - 1), { disabled: at === 0 }),
      h("span", { class: "num", "aria-label": `branch ${at + 1} of ${siblings.length}`, text: `${at + 1}/${siblings.length}` }),
      iconButton("right", "Next branch", to(at + 1), { disabled: at === siblings.length - 1 }));
  }

  showEnd(siblings) {
    const { node } = this;
    const twin = siblings.slice(0, siblings.indexOf(node)).findIndex((other) => other.text === node.text);
    this.problem.hidden = node.state !== "failed";
    if (node.state === "failed") {
      put(this.problem, h("p", {}, h("strong", { text: FAILURES[node.failure] ?? FAILURES.broken }), h("span", { text: node.error })),
        h("button", { type: "button", text: "Retry", on: { click: () => this.actions.retry(node) } }));
    }
    put(this.foot, ...costOf(node));
    this.same.textContent = twin >= 0 && node.state === "done" ? `the same words as branch ${twin + 1}` : "";
  }

  /** The text becomes a field; sending it begins a branch. */
  beginEdit() {
    if (this.editor || this.actions.isBusy()) return;
    const area = h("textarea", { "aria-label": "Edit the message", ".value": this.node.text, rows: String(Math.min(12, this.node.text.split("\n").length + 1)) });
    const end = () => {
      this.editor = null;
      this.body.textContent = this.node.text;
      this.element.focus();
    };
    const send = () => {
      const text = area.value.trim();
      if (!text && this.node.role === "user" && !this.node.attachments) return area.focus();
      end();
      this.actions.edit(this.node, text);
    };
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); end(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
    });
    this.editor = h("div", { class: "editor" }, area,
      h("p", { class: "hint", text: "Sent as a new branch; the text above it is reused. The old one stays." }),
      h("div", { class: "dialog-row" }, h("button", { type: "button", class: "quiet", text: "Cancel", on: { click: end } }),
        h("button", { type: "button", class: "primary", text: "Send as a branch", on: { click: send } })));
    put(this.body, this.editor);
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

/** What an answer cost: where its prompt's tokens came from, what was written, how fast. */
function costOf(node) {
  const end = node.state === "stopped" ? "stopped; counts come only with an answer's end" : FINISHES[node.finish];
  const notes = [end, ...(node.warnings ?? [])].filter(Boolean).map((note) => h("span", { class: "note", text: note }));
  if (!node.usage) return notes;
  const { prompt, cached, completion } = node.usage;
  const shares = [["reused", cached], ["computed", prompt - cached], ["made", completion]];
  const bar = h("span", { class: "cost-bar", "aria-hidden": "true" }, ...shares.filter(([, tokens]) => tokens > 0).map(([kind, tokens]) => {
    const piece = h("i", { class: kind });
    piece.style.flexGrow = tokens;
    return piece;
  }));
  const tokens = (kind, number, text) => h("span", { class: `cost ${kind}` }, h("b", { class: "num", text: count.format(number) }), ` ${text}`);
  const times = [
    node.firstMs !== undefined && `first after ${time(node.firstMs)}`,
    node.tokensPerS !== undefined && `${count.format(Math.round(node.tokensPerS))} tok/s`,
  ].filter(Boolean);
  return [bar, tokens("reused", cached, "reused"), tokens("computed", prompt - cached, "computed"), tokens("made", completion, "written"),
    ...(times.length ? [h("span", { class: "times num", title: "measured in this browser", text: times.join(" · ") })] : []), ...notes];
}

const nameOf = ({ role, name }) => ({ user: "You", assistant: "Answer", tool: `Result of ${name}` })[role];

const time = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);
