// Where a message is written and sent, or an answer stopped.

import { h, icon, iconButton, put } from "../dom.js";
import { Attachments } from "./attachments.js";
import { SchemaRow } from "./schema_row.js";

const MAX_ROWS_PX = 220;

export class Composer {
  /** `actions`: {send(text, attachments) -> whether it was taken, stop(), say(text), openTools(),
      openSettings(), toggleSchema(), chooseSchema(name)}; `picker`: an element. */
  constructor(actions, picker) {
    this.actions = actions;
    this.isWriting = false;
    this.attachments = new Attachments(actions.say);
    this.schemaRow = new SchemaRow(actions);
    this.area = h("textarea", { rows: "1", placeholder: "Write a message", "aria-label": "Message", enterkeyhint: "send",
      on: { input: () => this.fit(), keydown: (event) => this.onKey(event), paste: (event) => this.onPaste(event) } });
    this.schema = chip("braces", "JSON", actions.toggleSchema);
    this.tools = chip("wrench", "Tools", actions.openTools);
    this.settings = chip("sliders", "Settings", actions.openSettings);
    this.button = h("button", { type: "submit", class: "primary send" });
    this.element = h("form", { class: "composer", on: { submit: (event) => { event.preventDefault(); this.submit(); } } },
      this.attachments.element, this.schemaRow.element, this.area,
      h("div", { class: "composer-row" },
        iconButton("clip", "Attach text files", () => this.attachments.input.click(), { class: "quiet icon-button attach" }), this.attachments.input,
        this.schema, this.tools, this.settings, h("span", { class: "composer-hint", text: "Enter sends · Shift Enter, a new line" }), picker, this.button));
    this.show({ isWriting: false, schema: { on: false }, numTools: 0, summary: "" });
  }

  show({ isWriting, schema, numTools, summary }) {
    this.schema.setAttribute("aria-pressed", String(schema.on));
    this.schema.title = schema.on ? "Answers are JSON that fits the schema; press for plain text" : "Ask for JSON that fits a schema";
    this.schemaRow.show(schema);
    this.tools.lastChild.textContent = numTools ? `${numTools} tool${numTools === 1 ? "" : "s"}` : "Tools";
    this.tools.classList.toggle("on", numTools > 0);
    this.settings.lastChild.textContent = summary || "Settings";
    this.settings.classList.toggle("on", summary !== "");
    if (isWriting === this.isWriting && this.button.firstChild) return;
    this.isWriting = isWriting;
    this.button.setAttribute("aria-label", isWriting ? "Stop the answer" : "Send");
    this.button.title = isWriting ? "Stop (Esc)" : "Send (Enter)";
    this.button.classList.toggle("stop", isWriting);
    put(this.button, icon(isWriting ? "stop" : "send"));
  }

  /** Lets files be dropped anywhere on `element`. */
  takeDrops(element) {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    element.addEventListener("dragover", (event) => { if (hasFiles(event)) { event.preventDefault(); element.classList.add("drop"); } });
    element.addEventListener("dragleave", (event) => { if (!element.contains(event.relatedTarget)) element.classList.remove("drop"); });
    element.addEventListener("drop", (event) => {
      element.classList.remove("drop");
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.attachments.add([...event.dataTransfer.files]);
    });
  }

  focus() {
    this.area.focus();
  }

  fit() {
    this.area.style.height = "auto";
    this.area.style.height = `${Math.min(MAX_ROWS_PX, this.area.scrollHeight)}px`;
  }

  onKey(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.isWriting) this.submit();
  }

  onPaste(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    this.attachments.add(files);
  }

  submit() {
    if (this.isWriting) return this.actions.stop();
    const text = this.area.value.trim();
    const { items } = this.attachments;
    if (!(text || items.length) || !this.actions.send(text, items)) return;
    this.attachments.take();
    this.area.value = "";
    this.fit();
  }
}

function chip(name, label, onClick) {
  return h("button", { type: "button", class: "chip", title: label, on: { click: onClick } }, icon(name), h("span", { text: label }));
}
