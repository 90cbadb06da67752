// Copying to the clipboard, also where the page is not in a secure context.

import { h, icon, put } from "../dom.js";

/** A button that copies `text()` and says so for a moment. */
export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "quiet icon-button small", "aria-label": label, title: label }, icon("copy"));
  button.addEventListener("click", async () => {
    const isCopied = await copy(text());
    put(button, icon(isCopied ? "check" : "close"));
    button.title = isCopied ? "Copied" : "The browser did not allow it";
    setTimeout(() => { put(button, icon("copy")); button.title = label; }, 1400);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { class: "unseen", ".value": text, readonly: true });
    document.body.append(area);
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    return isCopied;
  }
}
