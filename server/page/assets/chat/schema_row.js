// Above the message field while answers are JSON: under which schema, and a way to it.

import { h, iconButton, put } from "../dom.js";
import { SCHEMAS } from "./starters.js";

export class SchemaRow {
  /** `actions`: {chooseSchema(name), toggleSchema(), openSettings()}. */
  constructor(actions) {
    this.select = h("select", { "aria-label": "Schema of the answers", on: { change: () => { if (this.select.value) actions.chooseSchema(this.select.value); } } });
    this.element = h("div", { class: "schema-row", hidden: true }, h("span", { text: "Answers as JSON:" }), this.select,
      h("button", { type: "button", class: "quiet small-text", text: "Edit", "aria-label": "Edit the schema", on: { click: () => actions.openSettings() } }),
      iconButton("close", "No JSON", () => actions.toggleSchema(), { class: "quiet icon-button tiny" }));
  }

  show({ on, text }) {
    this.element.hidden = !on;
    if (!on) return;
    const known = Object.keys(SCHEMAS).find((name) => SCHEMAS[name] === text);
    put(this.select, known ? null : h("option", { value: "", text: "my own schema" }), ...Object.keys(SCHEMAS).map((name) => h("option", { value: name, text: name })));
    this.select.value = known ?? "";
  }
}
