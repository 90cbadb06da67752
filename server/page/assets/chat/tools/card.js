// Calls as they are shown: the tool, its arguments, and a field for the result where the reader must
// give it.

import { h, icon, put } from "../../dom.js";

export class CallCards {
  /** `onResult(call, text)`: the reader has said what came of it. */
  constructor(onResult) {
    this.onResult = onResult;
    this.cards = []; // each stays its call's own, and with it what is typed there
    this.element = h("div", { class: "calls" });
  }

  /** `isWriting`: calls may still grow; `pendingIds`: of those that wait for the reader. */
  show(calls, isWriting, pendingIds) {
    this.cards.length = Math.min(this.cards.length, calls.length);
    calls.forEach((call, at) => {
      this.cards[at] ??= new CallCard(this.onResult);
      this.cards[at].show(call, isWriting, pendingIds.has(call.id));
    });
    if (this.cards.length !== this.element.children.length) put(this.element, ...this.cards.map((card) => card.element));
  }
}

class CallCard {
  constructor(onResult) {
    const send = (event) => {
      event.preventDefault();
      onResult(this.call, this.result.value);
    };
    const onKey = (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event); };
    this.name = h("b");
    this.state = h("span", { class: "call-state" });
    this.code = h("code");
    this.result = h("textarea", { rows: "2", placeholder: "What the tool gives back", on: { keydown: onKey } });
    this.form = h("form", { class: "call-form", hidden: true, on: { submit: send } },
      this.result, h("button", { type: "submit", class: "primary", text: "Send the result" }));
    this.element = h("figure", { class: "code call" }, h("figcaption", {}, icon("wrench"), this.name, this.state),
      h("pre", { tabindex: "0", role: "group", "aria-label": "Arguments" }, this.code), this.form);
  }

  show(call, isWriting, isPending) {
    this.call = call;
    this.name.textContent = call.name;
    this.code.textContent = pretty(call.text);
    this.result.setAttribute("aria-label", `Result of ${call.name}`);
    this.state.textContent = isWriting ? "is being written" : isPending ? "waits for you" : "called";
    this.element.dataset.state = isWriting ? "writing" : isPending ? "pending" : "called";
    this.form.hidden = !isPending;
  }
}

function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}
