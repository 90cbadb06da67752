// Where a message is written and sent, or an answer stopped.

import { h, icon, put } from "../dom.js";

const MAX_ROWS_PX = 220;

/** `actions`: {send(text) -> whether it was taken, stop(), toggleSchema(), openSettings()}. */
export class Composer {
  constructor(actions) {
    this.actions = actions;
    this.isWriting = false;
    this.area = h("textarea", { rows: "1", placeholder: "Write a message", "aria-label": "Message", enterkeyhint: "send",
      on: { input: () => this.fit(), keydown: (event) => this.onKey(event) } });
    this.schema = h("button", { type: "button", class: "chip", on: { click: actions.toggleSchema } }, icon("braces"), h("span", { text: "JSON" }));
    this.settings = h("button", { type: "button", class: "chip", title: "Settings", on: { click: actions.openSettings } }, icon("sliders"), h("span"));
    this.button = h("button", { type: "submit", class: "primary send" });
    this.element = h("form", { class: "composer", on: { submit: (event) => { event.preventDefault(); this.submit(); } } },
      this.area, h("div", { class: "composer-row" }, this.schema, this.settings, h("span", { class: "composer-hint", text: "Enter sends · Shift Enter, a new line" }), this.button));
    this.show({ isWriting: false, schema: { on: false }, summary: "" });
  }

  show({ isWriting, schema, summary }) {
    this.schema.setAttribute("aria-pressed", String(schema.on));
    this.schema.title = schema.on ? "Answers are JSON that fits the schema; press for plain text" : "Ask for JSON that fits a schema";
    this.settings.lastChild.textContent = summary || "Settings";
    if (isWriting === this.isWriting && this.button.firstChild) return;
    this.isWriting = isWriting;
    this.button.setAttribute("aria-label", isWriting ? "Stop the answer" : "Send");
    this.button.title = isWriting ? "Stop (Esc)" : "Send (Enter)";
    this.button.classList.toggle("stop", isWriting);
    put(this.button, icon(isWriting ? "stop" : "send"));
  }

  set(text) {
    this.area.value = text;
    this.fit();
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

  submit() {
    if (this.isWriting) return this.actions.stop();
    const text = this.area.value.trim();
    if (text && this.actions.send(text)) this.set("");
  }
}
