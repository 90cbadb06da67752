// The tools of a conversation: built-in ones to tick, others as JSON.

import { h } from "../../dom.js";
import { BUILT_IN } from "./built_in.js";
import { EXAMPLE, problemOfTools, readTools } from "./toolset.js";

/** The fields for `tools`, which they change; `onChange()` after each. */
export function toolForm(tools, onChange) {
  const state = h("p", { class: "tools-state" });
  const changed = () => {
    const problem = problemOfTools(tools);
    const own = readTools(tools.text).tools.map(({ name }) => name).join(", ");
    state.dataset.state = problem ? "bad" : "good";
    state.textContent = problem ? `Not sent: ${problem}` : own ? `Offered: ${own}. What they give back, you write.` : "A list of {name, description, parameters}. What they give back, you write.";
    onChange();
  };
  const area = h("textarea", { rows: "8", spellcheck: "false", class: "own-tools", "aria-label": "Tools of your own, as JSON", placeholder: '[{"name": …}]', ".value": tools.text,
    on: { input: () => { tools.text = area.value; changed(); } } });
  const example = h("button", { type: "button", class: "quiet small-text", text: "Example", on: { click: () => { area.value = tools.text = EXAMPLE; changed(); } } });
  const required = h("input", { type: "checkbox", ".checked": tools.isRequired, on: { change: () => { tools.isRequired = required.checked; changed(); } } });
  changed();
  return [
    h("section", {}, h("h2", { text: "Carried out here" }), ...BUILT_IN.map((tool) => tick(tool, tools, changed)),
      h("p", { class: "hint", text: "Your browser computes the result and sends it back to the model." })),
    h("section", {}, h("div", { class: "schema-head" }, h("h2", { text: "Your own" }), example), area, state),
    h("section", {}, h("h2", { text: "When" }), h("label", { class: "switch" }, required, "A call must come first"),
      h("p", { class: "hint", text: "Else the model decides. Small models rarely call by themselves; the server can make them. An answer as JSON leaves no room for a call of the model's own choice." })),
  ];
}

function tick(tool, tools, changed) {
  const box = h("input", { type: "checkbox", name: tool.name, "aria-label": tool.name, ".checked": tools.names.includes(tool.name),
    on: { change: () => { tools.names = BUILT_IN.map(({ name }) => name).filter((name) => (name === tool.name ? box.checked : tools.names.includes(name))); changed(); } } });
  return h("label", { class: "switch tool-row" }, box, h("span", {}, h("code", { text: tool.name }), h("small", { text: tool.description })));
}
