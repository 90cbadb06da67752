// The list of conversations: open, rename, delete, export, import.

import { h, icon, iconButton, put, showDialog } from "../dom.js";
import { exported } from "./exchange.js";
import { excerpt, findIn } from "./search.js";
import { MAX_CONVERSATIONS } from "./store.js";
import { sumOf } from "./tree.js";

/** `actions`: {open(id), create(), rename(conversation, title), remove(conversation), say(text)}. */
export class Sidebar {
  constructor(archive, actions) {
    this.archive = archive;
    this.actions = actions;
    this.list = h("ul", { class: "conversations" });
    this.file = h("input", { type: "file", accept: ".json,application/json", class: "unseen", tabindex: "-1", "aria-hidden": "true",
      on: { change: () => this.importFile() } });
    this.wanted = ""; // what is searched for, in lower case
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search the conversations",
      on: { input: () => { this.wanted = this.search.value.trim().toLowerCase(); this.showList(); } } });
    this.found = h("p", { class: "hint found", role: "status" });
    this.kept = h("p", { class: "hint" });
    this.element = h("aside", { class: "sidebar", "aria-label": "Conversations", id: "sidebar" },
      h("button", { type: "button", class: "new-chat", title: "New conversation (Ctrl K)", on: { click: () => actions.create() } }, icon("plus"), "New conversation"),
      h("div", { class: "search" }, icon("search"), this.search), this.found,
      h("nav", { "aria-label": "Conversations" }, this.list),
      h("div", { class: "sidebar-foot" },
        h("button", { type: "button", class: "quiet", text: "Export all", on: { click: () => save("stemma-conversations.json", exported(archive.items)) } }),
        h("button", { type: "button", class: "quiet", text: "Import", on: { click: () => this.file.click() } }), this.file, this.kept));
  }

  show(openId, runningIds) {
    this.kept.textContent = this.archive.store.isKept
      ? `Kept in this browser only, the last ${MAX_CONVERSATIONS}.` : "This browser keeps nothing: export what you need.";
    Object.assign(this, { openId, runningIds });
    this.showList();
  }

  showList() {
    const hits = this.archive.items.map((item) => [item, this.wanted && findIn(item, this.wanted)]).filter(([, hit]) => hit !== null);
    this.found.textContent = !this.wanted ? "" : hits.length ? `${hits.length} found` : "Nothing found.";
    put(this.list, ...hits.map(([item, hit]) => this.row(item, item.id === this.openId, this.runningIds.has(item.id), hit)));
  }

  row(conversation, isOpen, isRunning, hit) {
    const { answers, leaves } = sumOf(conversation);
    const about = answers ? `${answers} answer${answers > 1 ? "s" : ""}${leaves > 1 ? ` · ${leaves} branches` : ""}` : "empty";
    const link = h("a", { href: `#/chat/${conversation.id}${hit?.node ? `/${hit.node.id}` : ""}`, "aria-current": isOpen ? "page" : null },
      h("span", { class: "title", text: conversation.title || "New conversation" }),
      hit?.node ? excerpt(hit) : h("small", {}, isRunning ? h("i", { class: "live" }) : null, isRunning ? "writing…" : about));
    return h("li", { class: isOpen ? "open" : "" }, link,
      isOpen ? h("span", { class: "row-tools" },
        iconButton("edit", "Rename", () => this.rename(conversation)),
        iconButton("save", "Export this conversation", () => save(fileName(conversation), exported([conversation]))),
        iconButton("trash", "Delete", () => this.confirmRemoval(conversation))) : null);
  }

  async rename(conversation) {
    const input = h("input", { name: "title", maxlength: "200", ".value": conversation.title, autocomplete: "off" });
    const answer = await showDialog("Rename", dialogForm("Rename the conversation", [h("label", { class: "dialog-field" }, "Title", input)], "Rename"));
    if (answer === "ok" && input.value.trim()) this.actions.rename(conversation, input.value.trim());
  }

  async confirmRemoval(conversation) {
    const about = h("p", { text: `“${conversation.title || "New conversation"}” with all its branches will be gone.` });
    if ((await showDialog("Delete", dialogForm("Delete this conversation?", [about], "Delete"))) === "ok") this.actions.remove(conversation);
  }

  async importFile() {
    const [file] = this.file.files;
    this.file.value = "";
    if (!file) return;
    try {
      const number = await this.archive.import(file);
      this.actions.say(`${number} conversation${number === 1 ? "" : "s"} imported.`);
    } catch (error) {
      this.actions.say(`Not imported: ${error.message}.`);
    }
  }
}

function dialogForm(title, content, action) {
  const form = h("form", { method: "dialog" }, h("h2", { text: title }), ...content,
    h("div", { class: "dialog-row" },
      h("button", { type: "button", class: "quiet", text: "Cancel", on: { click: () => form.closest("dialog").close("") } }),
      h("button", { type: "submit", value: "ok", class: "primary", text: action })));
  return form;
}

const fileName = ({ title }) => `${title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation"}.json`;

/** Hands the text to the browser as a file to download. */
function save(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
