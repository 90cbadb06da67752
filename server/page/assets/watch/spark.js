// A line of the last minute under a number.

import { s } from "../dom.js";

const WIDTH = 120;
const HEIGHT = 26;

/** An SVG; `show(values, most)` draws them, the newest at the right; null is a gap. */
export function spark() {
  const line = s("path", { class: "spark-line" });
  const area = s("path", { class: "spark-area" });
  const element = s("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, area, line);
  return {
    element,
    show(values, most = Math.max(1, ...values.filter((value) => value !== null))) {
      const step = WIDTH / Math.max(1, 239);
      const points = values.map((value, i) => [WIDTH - (values.length - 1 - i) * step, HEIGHT - 1.5 - ((value ?? 0) / most) * (HEIGHT - 4)]);
      const path = points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
      line.setAttribute("d", path);
      area.setAttribute("d", points.length ? `${path}L${WIDTH} ${HEIGHT}L${points[0][0].toFixed(1)} ${HEIGHT}Z` : "");
    },
  };
}
