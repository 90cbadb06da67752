// Texts on the tree, where there is room for them: of the nodes that most go through first.

import { partsOf } from "./roles.js";

const CHAR = 6.62; // pixels of a character
const MIN_CHARS = 8; // unless the text is shorter, or many go through the node
const MAX_CHARS = 34;
const HEAVY = 8;
const SQUARE = 6; // pixels
const FEW = 40; // nodes: among more, texts beside their edges would only be noise

/** Paints them; `focus`: the ids of nodes that stand out, null: all do. */
export function paintLabels(tree, focus) {
  const { context: c, palette, model, width, height, insets } = tree;
  c.textBaseline = "alphabetic";
  c.strokeStyle = palette.paper; // around each, so that it is read over lines
  c.lineWidth = 3.5;
  const room = new Room(width, height);
  const isRoomy = tree.layout.order.length <= FEW;
  const leavesFirst = (a, b) => !b.children.length - !a.children.length; // they have one place only
  for (const node of isRoomy ? tree.layout.byWeight.toSorted(leavesFirst) : tree.layout.byWeight) {
    const parent = model.nodes.get(node.parent);
    if (!parent || (focus && !focus.has(node.id))) continue;
    const a = tree.at(parent);
    const b = tree.at(node);
    if (b.y < insets.top - 20 || b.y > height - insets.bottom + 12 || a.x > width || b.x < 0) continue;
    const words = wordsOf(node, parent, model);
    if (!words.length) continue; // special tokens alone
    const length = words.reduce((sum, { text }) => sum + text.length, 0);
    const place = placeOf(room, node, a, b, length, isRoomy);
    if (!place) continue;
    const numChars = paintWords(c, palette, clipped(words, place.numChars), place, node.locks ? palette.ink : palette.soft);
    room.take(place.x, place.y - 9, numChars * CHAR, 10);
  }
}

/** Where a label stands, and how long it may be: on its edge, or, in a tree that `isRoomy`, beyond it
    above or below the line, as far as nothing stands there. A leaf's goes on to the right. */
function placeOf(room, node, a, b, length, isRoomy) {
  const isLeaf = !node.children.length;
  const x = isLeaf ? b.x + 9 : a.x + Math.min(26, (b.x - a.x) * 0.55) + 2;
  const least = Math.min(length, node.numLeaves > HEAVY ? 4 : MIN_CHARS);
  const onEdge = isLeaf ? MAX_CHARS : Math.floor((b.x - 5 - x) / CHAR);
  const most = isRoomy ? MAX_CHARS : Math.min(MAX_CHARS, onEdge);
  const ys = isLeaf ? [b.y + 3.5] : isRoomy ? [b.y - 5, b.y + 16] : [b.y - 5];
  const places = ys.map((y) => ({ x, y, numChars: Math.floor(room.free(x, y - 9, 10, Math.min(most, length) * CHAR) / CHAR) }));
  const widest = places.reduce((best, place) => (place.numChars > best.numChars ? place : best));
  return widest.numChars >= least ? widest : null;
}

/** A node's text as words of one line, who speaks set apart. */
function wordsOf(node, parent, model) {
  if (!node.text) return [{ role: "", text: model.roots[node.root] === null ? "(another key's)" : "…" }];
  const words = partsOf(node.text, parent.text).flatMap(({ role, text }) => [
    ...(role ? [{ role, text: `${role}: ` }] : []), { role: "", text: `${oneLine(text)} ` }]);
  if (node.hidden) words.push({ role: "", text: `+${node.hidden} more` });
  return words;
}

function clipped(words, numChars) {
  const kept = [];
  for (const { role, text } of words) {
    if (numChars <= 0) break;
    kept.push({ role, text: text.trimEnd().length <= numChars ? text : `${text.slice(0, numChars - 1)}…` });
    numChars -= text.length;
  }
  return kept;
}

/** Returns how many characters they have. */
function paintWords(c, palette, words, { x, y }, colour) {
  let at = 0;
  for (const { role, text } of words) {
    c.font = `${role ? "600 " : ""}11px ${palette.mono}`;
    c.fillStyle = role ? palette.role[role] : colour;
    c.strokeText(text, x + at * CHAR, y);
    c.fillText(text, x + at * CHAR, y);
    at += text.length;
  }
  return at;
}

/** Which parts of the canvas have a text already, in squares. */
class Room {
  constructor(width, height) {
    this.columns = Math.ceil(width / SQUARE);
    this.rows = Math.ceil(height / SQUARE);
    this.squares = new Uint8Array(this.columns * this.rows);
  }

  /** How many pixels, at most `width`, are free from `x` on. */
  free(x, y, height, width) {
    const [top, bottom] = this.span(y, height);
    const last = Math.min(this.columns, Math.ceil((x + width) / SQUARE));
    for (let column = Math.max(0, Math.floor(x / SQUARE)); column < last; column++)
      for (let row = top; row < bottom; row++) if (this.squares[row * this.columns + column]) return column * SQUARE - x;
    return Math.min(width, this.columns * SQUARE - SQUARE - x);
  }

  take(x, y, width, height) {
    const [left, right] = [Math.max(0, Math.floor(x / SQUARE)), Math.min(this.columns, Math.ceil((x + width) / SQUARE))];
    const [top, bottom] = this.span(y, height);
    for (let row = top; row < bottom; row++) this.squares.fill(1, row * this.columns + left, row * this.columns + right);
  }

  span(y, height) {
    return [Math.max(0, Math.floor(y / SQUARE)), Math.min(this.rows, Math.floor((y + height) / SQUARE) + 1)];
  }
}

const oneLine = (text) => text.replace(/\s+/g, " ").trim();
