// Light, dark, or as the system says. Stored by the browser; set before the first paint.

const KEY = "stemma.theme";
const CHOICES = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();
let choice = read();

export const theme = {
  /** "light" or "dark", what is shown now. */
  current: () => (choice === "auto" ? (system.matches ? "dark" : "light") : choice),
  /** "auto", "light" or "dark", what was asked for. */
  choice: () => choice,
  /** On to the next choice. */
  next() {
    choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
    try { localStorage.setItem(KEY, choice); } catch { /* not kept, but shown */ }
    apply();
  },
  /** `listener("light" | "dark")` after each change; returns how to stop it. */
  onChange(listener) {
    listeners.add(listener);
    return () => listeners.delete(listener);
  },
};

function read() {
  try {
    const stored = localStorage.getItem(KEY);
    return CHOICES.includes(stored) ? stored : "auto";
  } catch { return "auto"; }
}

function apply() {
  document.documentElement.dataset.theme = theme.current();
  for (const listener of listeners) listener(theme.current());
}

system.addEventListener("change", apply);
apply();
