// Finding conversations by what was said in them.

import { h } from "../dom.js";

const BEFORE = 24; // characters of an excerpt before what was found
const AFTER = 60;

/** Where `wanted`, in lower case, occurs in a conversation: {node, before, hit, after}, node null
    for its title; null: nowhere. The last message that has it comes first. */
export function findIn(conversation, wanted) {
  for (const node of Object.values(conversation.nodes).reverse())
    for (const text of [node.text, ...(node.attachments ?? []).flatMap((file) => [file.name, file.text])]) {
      const at = text.toLowerCase().indexOf(wanted);
      if (at >= 0) return { node, ...around(text, at, wanted.length) };
    }
  return conversation.title.toLowerCase().includes(wanted) ? { node: null, before: "", hit: "", after: "" } : null;
}

/** What was found, within its line. */
export function excerpt({ before, hit, after }) {
  return h("small", { class: "excerpt" }, before, h("mark", { text: hit }), after);
}

function around(text, at, length) {
  const plain = (part) => part.replace(/\s+/g, " ");
  const start = Math.max(0, at - BEFORE);
  return { before: (start ? "…" : "") + plain(text.slice(start, at)), hit: text.slice(at, at + length), after: plain(text.slice(at + length, at + length + AFTER)) };
}
