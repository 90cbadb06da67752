// Colours of the drawings, taken from the page's custom properties.

const NUM_HEATS = 10;
const COLD_S = 600; // older looks the same

/** The colours of the theme that is shown now. */
export function readPalette() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["paper", "panel", "raised", "sunken", "ink", "soft", "faint", "line", "accent", "reused", "computed", "made",
    "forced", "host", "disk", "pinned", "bad"];
  const palette = Object.fromEntries(names.map((name) => [name, get(name)]));
  palette.strong = get("line-strong");
  palette.mono = get("mono");
  palette.sans = get("sans");
  palette.role = { System: palette.made, User: palette.ink, Model: palette.accent, Tool: palette.forced };
  palette.heats = Array.from({ length: NUM_HEATS }, (_, i) => heat(palette, i / (NUM_HEATS - 1)));
  return palette;
}

/** Which of `palette.heats` an age in seconds has: 0 is the hottest. Logarithmic. */
export function heatOf(ageS) {
  const part = Math.log1p(Math.min(ageS, COLD_S)) / Math.log1p(COLD_S);
  return Math.min(NUM_HEATS - 1, Math.floor(part * NUM_HEATS));
}

/** Embers: what was just used glows, then turns to ash. */
function heat({ computed, strong }, part) {
  return mix(computed, strong, part ** 0.8);
}

/** Between two colours "#rrggbb". */
export function mix(from, to, part) {
  const channels = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  const [a, b] = [channels(from), channels(to)];
  return `rgb(${a.map((value, i) => Math.round(value + (b[i] - value) * part)).join(" ")})`;
}
