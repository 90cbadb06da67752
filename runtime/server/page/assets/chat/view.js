import { h, put } from "../dom.js";

/** The chat. */
export function mount(root) {
  put(root, h("div", { class: "notice" }, h("h1", { text: "Chat" })));
  return () => put(root);
}
