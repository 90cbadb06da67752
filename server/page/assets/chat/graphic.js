// The stemma of a conversation, drawn: the oldest message on top, each branch a line down, the path
// that is shown lit. Rings say how much of an answer's prompt was found in the cache.

import { s } from "../dom.js";
import { ROOT, childTable, pathOf } from "./tree.js";

const STEP_X = 34;
const STEP_Y = 38;
const MARGIN = 26;
const RADIUS = 7;
const ROUND = 2 * Math.PI * RADIUS;

/** Draws `conversation` into `svg`; `onPick(node)` when a node is chosen. */
export function drawTree(svg, conversation, onPick) {
  const table = childTable(conversation);
  const places = layout(table);
  const lit = new Set(pathOf(conversation, table).map((node) => node.id));
  const last = pathOf(conversation, table).at(-1)?.id;
  const xs = [...places.values()].map((place) => place.x);
  const ys = [...places.values()].map((place) => place.y);
  const width = Math.max(...xs, 0) * STEP_X + 2 * MARGIN;
  const height = Math.max(...ys, 0) * STEP_Y + 2 * MARGIN;
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height })) svg.setAttribute(name, value);
  const at = (id) => ({ x: MARGIN + places.get(id).x * STEP_X, y: MARGIN + places.get(id).y * STEP_Y });
  const nodes = Object.values(conversation.nodes);
  const edges = nodes.filter((node) => node.parent !== ROOT)
    .sort((a, b) => lit.has(a.id) - lit.has(b.id)) // lit lines lie above
    .map((node) => s("path", { class: lit.has(node.id) ? "edge lit" : "edge", d: curve(at(node.parent), at(node.id)) }));
  const focused = svg.contains(document.activeElement) ? document.activeElement.dataset.id : null;
  const marks = nodes.map((node) => mark(node, at(node.id), lit.has(node.id), node.id === last, onPick));
  svg.replaceChildren(...edges, ...marks);
  if (focused) svg.querySelector(`[data-id="${focused}"]`)?.focus();
  return { current: at.call(null, last ?? nodes[0]?.id ?? ROOT) };
}

/** Rows by depth; leaves side by side, a parent above the middle of its children. */
function layout(table) {
  const places = new Map([[ROOT, { x: 0, y: 0 }]]);
  let numLeaves = 0;
  const stack = (table.get(ROOT) ?? []).toReversed().map((node) => ({ node, y: 0, isLeft: false }));
  while (stack.length) {
    const visit = stack.pop();
    const children = table.get(visit.node.id) ?? [];
    if (!children.length) places.set(visit.node.id, { x: numLeaves++, y: visit.y });
    else if (visit.isLeft) {
      const ends = [children[0], children.at(-1)].map((child) => places.get(child.id).x);
      places.set(visit.node.id, { x: (ends[0] + ends[1]) / 2, y: visit.y });
    } else {
      stack.push({ ...visit, isLeft: true });
      for (const child of children.toReversed()) stack.push({ node: child, y: visit.y + 1, isLeft: false });
    }
  }
  return places;
}

function curve(from, to) {
  if (from.x === to.x) return `M${from.x} ${from.y}V${to.y}`;
  const bend = from.y + STEP_Y * 0.55;
  return `M${from.x} ${from.y}C${from.x} ${bend} ${to.x} ${bend} ${to.x} ${to.y}`;
}

function mark(node, { x, y }, isLit, isLast, onPick) {
  const label = describe(node);
  const pick = (event) => {
    if (event.type === "keydown" && event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    onPick(node);
  };
  const state = node.role === "assistant" ? node.state : node.role;
  return s("g", { class: `node ${state}${isLit ? " lit" : ""}${isLast ? " last" : ""}`, transform: `translate(${x} ${y})`, tabindex: "0",
    role: "button", "aria-label": label, "aria-pressed": String(isLit), "data-id": node.id, on: { click: pick, keydown: pick } },
    s("title", {}, label), s("circle", { class: "reach", r: 15 }), isLast ? s("circle", { class: "halo", r: 12 }) : null,
    ...(node.role === "assistant" ? ring(node) : [s("rect", { x: -4.5, y: -4.5, width: 9, height: 9, rx: 1.5, transform: node.role === "user" ? "rotate(45)" : null })]));
}

function ring(node) {
  const body = s("circle", { class: "body", r: RADIUS });
  if (!node.usage) return [body];
  const share = node.usage.prompt ? node.usage.cached / node.usage.prompt : 0;
  const reused = s("circle", { class: "reused", r: RADIUS, "stroke-dasharray": `${share * ROUND} ${ROUND}`, transform: "rotate(-90)" });
  return [body, s("g", { class: "ring" }, s("circle", { class: "computed", r: RADIUS }), reused), s("circle", { class: "core", r: 2.6 })];
}

function describe(node) {
  const text = node.text.trim().replace(/\s+/g, " ");
  const said = `${{ user: "You", assistant: "Answer", tool: `Result of ${node.name}` }[node.role]}: ${text.length > 90 ? `${text.slice(0, 90)}…` : text || "…"}`;
  return node.usage ? `${said} (${node.usage.cached} of ${node.usage.prompt} prompt tokens reused)` : said;
}
