// Beside the conversation: its stemma with what was reused, its tools, or its settings.

import { h, iconButton, put, s } from "../dom.js";
import { drawTree } from "./graphic.js";
import { samplingForm } from "./sampling.js";
import { problemOfSchema } from "./schema_check.js";
import { SCHEMAS } from "./starters.js";
import { toolForm } from "./tools/form.js";
import { pathOf, sumOf } from "./tree.js";

const count = new Intl.NumberFormat("en");
const TABS = { tree: "Tree", tools: "Tools", settings: "Settings" };

/** `actions`: {pick(node), change(conversation), changed(), close()}. */
export class Panel {
  constructor(sampling, actions) {
    this.sampling = sampling;
    this.actions = actions;
    this.conversation = null;
    this.tab = "tree";
    this.svg = s("svg", { class: "stemma", role: "group", "aria-label": "The tree of this conversation" });
    this.sums = h("div", { class: "sums" });
    this.scroll = h("div", { class: "stemma-scroll" }, this.svg);
    this.tree = h("div", { class: "panel-tree", role: "tabpanel" }, this.sums, this.scroll, legend());
    this.tools = h("div", { class: "panel-settings panel-tools", role: "tabpanel" });
    this.settings = h("div", { class: "panel-settings", role: "tabpanel" });
    this.tabs = h("div", { class: "tabs", role: "tablist" }, ...Object.entries(TABS).map(([name, label]) =>
      h("button", { type: "button", role: "tab", class: "quiet", "data-tab": name, text: label, on: { click: () => this.open(name), keydown: (event) => this.move(event) } })));
    this.element = h("aside", { class: "panel", id: "panel", "aria-label": "Tree, tools and settings" },
      h("div", { class: "panel-head" }, this.tabs, iconButton("close", "Close", () => actions.close(), { class: "quiet icon-button panel-close" })),
      this.tree, this.tools, this.settings);
    for (const [name, label] of Object.entries(TABS)) this[name].setAttribute("aria-label", label);
    this.open("tree");
  }

  open(tab) {
    this.tab = tab;
    for (const button of this.tabs.children) {
      button.setAttribute("aria-selected", String(button.dataset.tab === tab));
      button.tabIndex = button.dataset.tab === tab ? 0 : -1;
    }
    for (const name of Object.keys(TABS)) this[name].hidden = name !== tab;
    if (this.conversation) this.show(this.conversation);
  }

  move(event) {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    event.preventDefault();
    const names = Object.keys(TABS);
    this.open(names[(names.indexOf(this.tab) + (event.key === "ArrowRight" ? 1 : names.length - 1)) % names.length]);
    this.tabs.querySelector('[aria-selected="true"]').focus();
  }

  /** Shows `conversation`; settings are rebuilt only for another one. `maxModelLen`: tokens, or null. */
  show(conversation, maxModelLen = this.maxModelLen) {
    this.maxModelLen = maxModelLen;
    const isOther = conversation !== this.conversation;
    this.conversation = conversation;
    if (isOther || !this.settings.firstChild) this.buildSettings();
    this.showSums();
    if (this.tree.hidden) return;
    const { current } = drawTree(this.svg, conversation, (node) => this.actions.pick(node));
    this.svg.classList.toggle("empty", !Object.keys(conversation.nodes).length);
    const room = this.scroll.getBoundingClientRect();
    if (current.y > this.scroll.scrollTop + room.height - 30 || current.y < this.scroll.scrollTop) this.scroll.scrollTop = current.y - room.height / 2;
    if (current.x > this.scroll.scrollLeft + room.width - 20 || current.x < this.scroll.scrollLeft) this.scroll.scrollLeft = current.x - room.width / 2;
  }

  showSums() {
    const sum = sumOf(this.conversation);
    if (!sum.answers) return void put(this.sums, h("p", { class: "hint", text: "Edits and second answers become branches. What they share is computed once; here you will see how much that is." }));
    const percent = sum.prompt ? Math.round((100 * sum.cached) / sum.prompt) : 0;
    const branches = sum.leaves === 1 ? "one line" : `${sum.leaves} branches`;
    put(this.sums,
      h("p", { class: "share" }, h("b", { class: "num", text: `${percent}%` }), " of the prompts reused"),
      h("p", { class: "hint", text: `${count.format(sum.cached)} of ${count.format(sum.prompt)} prompt tokens in ${sum.told} answer${sum.told === 1 ? "" : "s"}, ${branches}; ${count.format(sum.completion)} written.` }),
      this.context());
  }

  /** How much of the model's context the path takes, as its last answer told. */
  context() {
    const usage = pathOf(this.conversation).findLast((node) => node.usage)?.usage;
    if (!usage || !this.maxModelLen) return null;
    const used = usage.prompt + usage.completion;
    return h("label", { class: "context hint" }, h("meter", { min: 0, max: this.maxModelLen, high: 0.9 * this.maxModelLen, value: used }),
      `${count.format(used)} of ${count.format(this.maxModelLen)} tokens of context`);
  }

  buildSettings() {
    const { conversation, actions } = this;
    put(this.tools, ...toolForm(conversation.tools, () => { actions.change(conversation); actions.changed(); }));
    const system = h("textarea", { rows: "4", placeholder: "None", "aria-label": "System prompt", ".value": conversation.system,
      on: { input: () => { conversation.system = system.value; actions.change(conversation); } } });
    const reset = h("button", { type: "button", class: "quiet small-text", text: "Back to the model's defaults",
      on: { click: () => { this.sampling.clear(); this.buildSettings(); actions.changed(); } } });
    put(this.settings,
      h("section", {}, h("h2", { text: "System prompt" }), system, h("p", { class: "hint", text: "For this conversation. A change holds from the next message on." })),
      h("section", {}, h("h2", { text: "Answers as JSON" }), ...this.schemaFields()),
      h("section", {}, h("h2", { text: "Sampling" }), samplingForm(this.sampling, actions.changed), reset));
  }

  schemaFields() {
    const { conversation, actions } = this;
    const problem = h("p", { class: "schema-state" });
    const show = () => {
      const found = problemOfSchema(area.value);
      problem.dataset.state = found ? "bad" : "good";
      problem.textContent = found ? `Not sent: ${found}` : "A schema in JSON. What of it cannot be enforced, the server refuses.";
      problem.hidden = !conversation.schema.on && !area.value;
      actions.changed();
    };
    const area = h("textarea", { rows: "9", spellcheck: "false", class: "schema", "aria-label": "JSON Schema", placeholder: '{"type": "object", …}', ".value": conversation.schema.text,
      on: { input: () => { conversation.schema.text = area.value; actions.change(conversation); show(); } } });
    const toggle = h("input", { type: "checkbox", ".checked": conversation.schema.on,
      on: { change: () => { conversation.schema.on = toggle.checked; actions.change(conversation); show(); } } });
    const examples = h("select", { "aria-label": "Examples of schemas" }, h("option", { value: "", text: "Examples…" }),
      ...Object.keys(SCHEMAS).map((name) => h("option", { value: name, text: name })));
    examples.addEventListener("change", () => {
      if (!examples.value) return;
      area.value = conversation.schema.text = SCHEMAS[examples.value];
      toggle.checked = conversation.schema.on = true;
      examples.value = "";
      actions.change(conversation);
      show();
    });
    show();
    return [h("div", { class: "schema-head" }, h("label", { class: "switch" }, toggle, "Enforce this schema"), examples), area, problem];
  }
}

function legend() {
  const entry = (kind, text) => h("li", {}, h("i", { class: kind }), text);
  return h("ul", { class: "legend" }, entry("reused", "reused from the cache"), entry("computed", "computed"), entry("path", "the path you read"));
}
