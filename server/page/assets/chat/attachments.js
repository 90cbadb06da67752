// Text files that go with a message: read in the browser, sent as part of the message's text.

import { h, icon, iconButton, put } from "../dom.js";

export const MAX_FILES = 10; // guess
const MAX_FILE_BYTES = 500_000; // guess: more than most contexts hold
const ACCEPT = "text/*,.md,.csv,.tsv,.json,.jsonl,.yaml,.yml,.toml,.ini,.xml,.html,.css,.js,.ts,.py,.rs,.go,.c,.h,.cpp,.java,.sh,.sql,.log,.tex";

/** The text of a message, its files before what is said of them: questions about one file share it
    as their prefix. */
export function contentOf({ text, attachments = [] }) {
  return [...attachments.map(fenced), text].filter(Boolean).join("\n\n");
}

function fenced({ name, text }) {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `File ${name}:\n${fence}\n${text.trimEnd()}\n${fence}`;
}

/** The files of the message that is being written. */
export class Attachments {
  /** `say(text)`: why a file was not taken. */
  constructor(say) {
    this.say = say;
    this.items = []; // {name, text}
    this.input = h("input", { type: "file", multiple: true, accept: ACCEPT, class: "unseen attach-input", tabindex: "-1", "aria-hidden": "true",
      on: { change: () => { this.add([...this.input.files]); this.input.value = ""; } } });
    this.element = h("ul", { class: "attachments", "aria-label": "Attached files", hidden: true });
  }

  async add(files) {
    for (const file of files) {
      if (this.items.length >= MAX_FILES) { this.say(`A message takes at most ${MAX_FILES} files.`); break; }
      try {
        this.items.push({ name: file.name.slice(0, 200), text: await textOf(file) });
      } catch (error) {
        this.say(`${file.name} was not attached: ${error.message}.`);
      }
    }
    this.show();
  }

  /** The files; none are left. */
  take() {
    const taken = this.items;
    this.items = [];
    this.show();
    return taken;
  }

  show() {
    this.element.hidden = !this.items.length;
    put(this.element, ...this.items.map((item) => h("li", { class: "attachment" }, icon("file"), h("span", { class: "name", text: item.name }),
      h("small", { text: size(item.text) }), iconButton("close", `Remove ${item.name}`, () => this.remove(item), { class: "quiet icon-button tiny" }))));
  }

  remove(item) {
    this.items = this.items.filter((other) => other !== item);
    this.show();
  }
}

/** A file of a message that was sent: its name; its text when asked for. */
export function shownAttachment({ name, text }) {
  return h("details", { class: "attachment" }, h("summary", {}, icon("file"), h("span", { class: "name", text: name }), h("small", { text: size(text) })),
    h("pre", { tabindex: "0", role: "group", "aria-label": `Text of ${name}` }, h("code", { text })));
}

async function textOf(file) {
  if (file.size > MAX_FILE_BYTES) throw new Error(`it is larger than ${MAX_FILE_BYTES / 1000} kB`);
  const bytes = await file.arrayBuffer();
  let text = "\0";
  try { text = new TextDecoder("utf-8", { fatal: true }).decode(bytes); } catch { /* not UTF-8 */ }
  if (text.includes("\0")) throw new Error("it is no text (UTF-8)");
  return text;
}

function size(text) {
  return text.length < 1000 ? `${text.length} characters` : `${(text.length / 1000).toFixed(1)} k characters`;
}
