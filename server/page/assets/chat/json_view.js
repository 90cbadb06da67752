// An answer in JSON: highlighted and indented while it is written, with what is known of its validity.

import { h, put } from "../dom.js";
import { copyButton } from "./copy.js";
import { JsonReader } from "./json_reader.js";
import { checkAgainst } from "./schema_check.js";

const MAX_COLOURED = 20_000; // characters; more are shown as they are

export class JsonView {
  constructor(schemaText) {
    this.schema = JSON.parse(schemaText);
    this.reader = new JsonReader();
    this.status = h("span", { class: "validity" });
    this.code = h("code");
    this.problems = h("ul", { class: "json-problems" });
    this.element = h("figure", { class: "code json" },
      h("figcaption", {}, h("span", { text: "JSON" }), this.status, copyButton(() => this.reader.text, "Copy the JSON")),
      h("pre", { tabindex: "0" }, this.code), this.problems);
  }

  /** Shows `node`, whose text may have grown. */
  show(node) {
    if (!node.text.startsWith(this.reader.text)) this.reader = new JsonReader();
    this.reader.read(node.text);
    const isEnd = node.state !== "writing";
    const verdict = this.verdict(node, isEnd);
    this.status.dataset.state = verdict.state;
    this.status.textContent = verdict.text;
    put(this.problems, ...(verdict.problems ?? []).map(({ pointer, message }) => h("li", {}, h("code", { text: pointer }), ` ${message}`)));
    if (this.reader.state === "invalid" || node.text.length > MAX_COLOURED) this.code.textContent = node.text;
    else put(this.code, ...pretty(this.reader));
  }

  verdict(node, isEnd) {
    const { state, invalidAt } = this.reader;
    if (state === "invalid") return { state: "bad", text: `no JSON from character ${invalidAt + 1} on` };
    if (state !== "complete") {
      const ends = { writing: "valid so far", stopped: "stopped; valid as far as it goes", failed: "broken off; valid as far as it goes" };
      if (node.state in ends) return { state: "open", text: ends[node.state] };
      return { state: "bad", text: node.finish === "length" ? "cut by max tokens; valid as far as it goes" : "not complete" };
    }
    const { problems, unchecked } = checkAgainst(this.schema, JSON.parse(this.reader.text));
    if (problems.length && isEnd) return { state: "bad", text: "complete, but does not fit the schema", problems };
    if (problems.length) return { state: "open", text: "valid so far" }; // a number that may go on
    if (unchecked.length) return { state: "good", text: `complete; not checked here: ${unchecked.join(", ")}` };
    return { state: "good", text: "complete, fits the schema" };
  }
}

/** The tokens, one member or item a line. */
function pretty({ tokens, lexing }) {
  const parts = [];
  let depth = 0;
  const newline = () => parts.push(`\n${"  ".repeat(depth)}`);
  const all = lexing ? [...tokens, lexing] : tokens;
  all.forEach(({ kind, text }, index) => {
    const isEmpty = "[{".includes(all[index - 1]?.text);
    if (kind === "mark" && "]}".includes(text)) {
      depth--;
      if (!isEmpty) newline();
    } else if (isEmpty && index > 0) newline();
    parts.push(h("span", { class: `json-${kind}`, text: text === ":" ? ": " : text }));
    if (kind === "mark" && "[{".includes(text)) depth++;
    if (text === "," && kind === "mark") newline();
  });
  return parts;
}
