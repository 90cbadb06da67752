// Texts on the tree, where there is room for them: of the nodes that most go through first.

const CHAR = 6.62; // pixels of a character
const MIN_CHARS = 8; // unless the text is shorter, or many go through the node
const MAX_CHARS = 34;
const HEAVY = 8;
const SQUARE = 6; // pixels

/** Paints them; `focus`: the ids of nodes that stand out, null: all do. */
export function paintLabels(tree, focus) {
  const { context: c, palette, model, width, height, insets } = tree;
  c.font = `11px ${palette.mono}`;
  c.textBaseline = "alphabetic";
  c.strokeStyle = palette.paper; // around each, so that it is read over lines
  c.lineWidth = 3.5;
  const room = new Room(width, height);
  for (const node of tree.layout.byWeight) {
    const parent = model.nodes.get(node.parent);
    if (!parent || (focus && !focus.has(node.id))) continue;
    const a = tree.at(parent);
    const b = tree.at(node);
    if (b.y < insets.top - 20 || b.y > height - insets.bottom + 12 || a.x > width || b.x < 0) continue;
    const isLeaf = !node.children.length;
    const from = isLeaf ? b.x + 9 : a.x + Math.min(26, (b.x - a.x) * 0.55) + 2;
    const numChars = Math.min(MAX_CHARS, Math.floor(((isLeaf ? width - 10 : b.x - 5) - from) / CHAR));
    const whole = oneLine(node.text || (model.roots[node.root] === null ? "(another key's)" : "…"));
    if (numChars < Math.min(whole.length, node.numLeaves > HEAVY ? 4 : MIN_CHARS)) continue;
    const text = clip(whole, numChars) + (node.hidden ? `  +${node.hidden} more` : "");
    const y = isLeaf ? b.y + 3.5 : b.y - 5;
    if (!room.take(from, y - 9, text.length * CHAR, 10)) continue;
    c.strokeText(text, from, y);
    c.fillStyle = node.locks ? palette.ink : palette.soft;
    c.fillText(text, from, y);
  }
}

/** Which parts of the canvas have a text already, in squares. */
class Room {
  constructor(width, height) {
    this.columns = Math.ceil(width / SQUARE);
    this.rows = Math.ceil(height / SQUARE);
    this.squares = new Uint8Array(this.columns * this.rows);
  }

  /** Whether a rectangle was free; it is not any more. */
  take(x, y, width, height) {
    const [left, right] = [Math.max(0, Math.floor(x / SQUARE)), Math.min(this.columns, Math.ceil((x + width) / SQUARE))];
    const [top, bottom] = [Math.max(0, Math.floor(y / SQUARE)), Math.min(this.rows, Math.floor((y + height) / SQUARE) + 1)];
    for (let row = top; row < bottom; row++)
      for (let at = row * this.columns + left; at < row * this.columns + right; at++) if (this.squares[at]) return false;
    for (let row = top; row < bottom; row++) this.squares.fill(1, row * this.columns + left, row * this.columns + right);
    return true;
  }
}

const oneLine = (text) => text.replace(/\s+/g, " ").trim();

const clip = (text, numChars) => (text.length <= numChars ? text : `${text.slice(0, numChars - 1)}…`);
