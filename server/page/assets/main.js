// The shell: which view is shown, the theme, the state of the engine.

import { addressParts } from "./address.js";
import { api } from "./api.js";
import { h, icon, put, showDialog } from "./dom.js";
import { engine } from "./engine.js";
import { theme } from "./theme.js";

const VIEWS = {
  chat: { title: "Chat", load: () => import("./chat/view.js") },
  watch: { title: "Watch", load: () => import("./watch/view.js") },
};
const SHORTCUTS = [
  [["Enter"], "send"], [["Shift", "Enter"], "a new line"], [["Ctrl", "K"], "a new conversation"],
  [["Esc"], "stop the answer"], [["/"], "to the message field"], [["↑", "↓"], "from message to message"],
  [["←", "→"], "between the branches of a message"], [["?"], "this list"],
];

const root = document.getElementById("view");
let shown = { name: null, unmount: () => {} };
let routing = Promise.resolve();

/** Shows what the address names, once the view asked for before is there: its end would be missed. */
function route() {
  routing = routing.then(show, show);
}

async function show() {
  const [name] = addressParts();
  const view = VIEWS[name] ?? VIEWS.chat;
  const key = VIEWS[name] ? name : "chat";
  if (shown.name === key) return;
  shown.unmount();
  shown = { name: key, unmount: () => {} };
  document.title = `${view.title} · Stemma`;
  for (const link of document.querySelectorAll(".views a")) {
    if (link.dataset.view === key) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  put(root);
  try {
    const module = await view.load();
    shown.unmount = (await module.mount(root, { api, theme, engine })) ?? (() => {});
  } catch (error) {
    console.warn(error);
    put(root, h("div", { class: "notice" }, h("h1", { text: `${view.title} could not be loaded` }),
      h("p", { text: String(error.message) }),
      h("button", { type: "button", text: "Reload", on: { click: () => location.reload() } })));
  }
}

function showEngine() {
  const line = document.querySelector(".engine");
  line.dataset.state = engine.state;
  line.querySelector(".engine-model").textContent = engine.model ?? "";
  line.querySelector(".engine-state").textContent =
    { loading: "connecting", ready: "ready", down: engine.model ? "engine restarting" : "no engine yet" }[engine.state];
}

function showTheme() {
  const button = document.getElementById("theme-button");
  const choice = theme.choice();
  put(button, icon({ auto: "auto", light: "sun", dark: "moon" }[choice]));
  button.title = `Theme: ${choice === "auto" ? "as the system" : choice}`;
  button.setAttribute("aria-label", button.title);
}

function showShortcuts() {
  if (document.querySelector("dialog")) return;
  const keys = (names) => names.flatMap((name, i) => [...(i ? [" "] : []), h("kbd", { text: name })]);
  showDialog("Keyboard shortcuts", h("form", { method: "dialog" },
    h("h2", { text: "Keyboard" }),
    h("dl", { class: "shortcuts" }, ...SHORTCUTS.flatMap(([names, what]) => [h("dt", {}, ...keys(names)), h("dd", { text: what })])),
    h("div", { class: "dialog-row" }, h("button", { class: "primary", text: "Close" }))));
}

document.getElementById("theme-button").addEventListener("click", () => { theme.next(); showTheme(); });
document.getElementById("shortcuts-button").addEventListener("click", showShortcuts);
document.addEventListener("keydown", (event) => {
  if (event.key === "?" && !event.target.closest("input, textarea, select")) showShortcuts();
});
addEventListener("hashchange", route);
engine.onChange(showEngine);
showTheme();
showEngine();
route();
engine.check();
