// Elements by code. Text is always set as text: nothing on this page goes through innerHTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element: `props` are attributes, but `class`, `text`, `on` ({event: handler}), `data` and
    properties that start with "." (".value"). Children: nodes, strings; null is left out. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function s(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

/** An icon of the set below. */
export function icon(name) {
  return s("svg", { class: "glyph", viewBox: "0 0 20 20", "aria-hidden": "true" }, s("path", { d: ICONS[name] }));
}

/** A button with an icon and a name for screen readers and as a tip. */
export function iconButton(name, label, onClick, extra = {}) {
  const props = { type: "button", class: "quiet icon-button", "aria-label": label, title: label, on: { click: onClick }, ...extra };
  return h("button", props, icon(name));
}

/** Replaces all children. */
export function put(parent, ...children) {
  parent.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
  return parent;
}

/** Loads a stylesheet of /assets once; resolves when it applies. */
export function useStyle(path) {
  const href = `/assets/${path}`;
  const known = document.querySelector(`link[rel="stylesheet"][href="${href}"]`);
  if (known) return Promise.resolve();
  return new Promise((resolve, reject) => {
    const link = h("link", { rel: "stylesheet", href, on: { load: resolve, error: reject } });
    document.head.append(link);
  });
}

/** Shows a modal dialog with these children; resolves with its return value when closed. */
export function showDialog(label, ...children) {
  const dialog = h("dialog", { "aria-label": label }, ...children);
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue);
    });
  });
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name === "on") for (const [event, handler] of Object.entries(value)) element.addEventListener(event, handler);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name.startsWith(".")) element[name.slice(1)] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const ICONS = {
  plus: "M10 4v12M4 10h12",
  menu: "M3 6h14M3 10h14M3 14h9",
  close: "M5 5l10 10M15 5 5 15",
  copy: "M7.5 7.5V5A1.5 1.5 0 0 1 9 3.5h6A1.5 1.5 0 0 1 16.5 5v6a1.5 1.5 0 0 1-1.5 1.5h-2.5M5 7.5h6A1.5 1.5 0 0 1 12.5 9v6a1.5 1.5 0 0 1-1.5 1.5H5A1.5 1.5 0 0 1 3.5 15V9A1.5 1.5 0 0 1 5 7.5z",
  check: "M4 10.5l4 4 8-9",
  edit: "M12.5 4.5l3 3L7 16l-3.5.5L4 13z",
  again: "M16 10a6 6 0 1 1-1.8-4.3M16 3v3.2h-3.2",
  left: "M12 5l-5 5 5 5",
  right: "M8 5l5 5-5 5",
  down: "M5 8l5 5 5-5",
  more: "M5 10h.01M10 10h.01M15 10h.01",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M6 6h8v8H6z",
  tree: "M10 3v4M10 7l-5 4v5M10 7l5 4v5M10 7v9",
  sliders: "M4 6h7M15 6h1M4 14h1M9 14h7M13 4v4M7 12v4",
  braces: "M7.5 3.5C5.5 3.5 6.5 9 4 10c2.5 1 1.5 6.5 3.5 6.5M12.5 3.5c2 0 1 5.5 3.5 6.5-2.5 1-1.5 6.5-3.5 6.5",
  clip: "M14.5 9.5l-5 5a3.2 3.2 0 0 1-4.5-4.5l6-6a2.1 2.1 0 0 1 3 3l-6 6a1 1 0 0 1-1.5-1.5l5-5",
  file: "M6 3.5h5l4 4v9H6zM11 3.5v4h4",
  save: "M10 3.5v9M6.5 9l3.5 3.5L13.5 9M4 16h12",
  search: "M9 4a5 5 0 1 1 0 10A5 5 0 0 1 9 4zM12.7 12.7L16.5 16.5",
  wrench: "M16 6.2a3.7 3.7 0 0 1-5 4.4l-5 5a1.4 1.4 0 0 1-2-2l5-5a3.7 3.7 0 0 1 4.4-5L11 5.9l.7 2.4 2.4.7z",
  trash: "M4 6h12M8 6V4h4v2M6 6l.7 10h6.6L14 6",
  sun: "M10 6.5a3.5 3.5 0 1 1 0 7 3.5 3.5 0 0 1 0-7zM10 2v1.5M10 16.5V18M2 10h1.5M16.5 10H18M4.3 4.3l1.1 1.1M14.6 14.6l1.1 1.1M15.7 4.3l-1.1 1.1M5.4 14.6l-1.1 1.1",
  moon: "M16 11.8A6.5 6.5 0 0 1 8.2 4a6.5 6.5 0 1 0 7.8 7.8z",
  auto: "M10 3.5a6.5 6.5 0 1 1 0 13 6.5 6.5 0 0 1 0-13zM10 3.5v13M12.5 4.2v11.6M15 6v8",
};
