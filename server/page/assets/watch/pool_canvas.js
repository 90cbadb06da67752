// The KV pool, page by page: what is free, what is kept and how warm it is, what is in use.

import { heatOf, mix, readPalette } from "./palette.js";

const CELL = 5;
const GAP = 1;
export const FREE = 0;
export const OUTPUT = -1; // of requests that run, not in the tree yet
export const UNSHOWN = -2;

export class PoolCanvas {
  constructor(canvas, model, onHover) {
    Object.assign(this, { canvas, model, onHover, context: canvas.getContext("2d"), owners: [], lit: null });
    this.palette = readPalette();
    this.listeners = new AbortController();
    const options = { signal: this.listeners.signal };
    canvas.addEventListener("pointermove", (event) => this.#hover(this.#cellAt(event.offsetX, event.offsetY), event), options);
    canvas.addEventListener("pointerleave", () => this.#hover(-1), options);
    this.observer = new ResizeObserver(() => this.update());
    this.observer.observe(canvas.parentElement);
  }

  close() {
    this.listeners.abort();
    this.observer.disconnect();
  }

  recolour() {
    this.palette = readPalette();
    this.update();
  }

  light(ids) {
    this.lit = ids;
    this.update();
  }

  update() {
    const { pool } = this.model;
    if (!pool) return;
    if (this.version !== this.model.poolVersion) {
      this.version = this.model.poolVersion;
      this.owners = pool.cells.flatMap(([owner, count]) => Array(count).fill(owner));
    }
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    this.columns = Math.max(1, Math.floor((width + GAP) / (CELL + GAP)));
    const rows = Math.ceil(this.owners.length / this.columns);
    const scale = Math.min(devicePixelRatio || 1, 2);
    const height = rows * (CELL + GAP);
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    this.#paint(scale, width, height);
  }

  #paint(scale, width, height) {
    const { context: c, columns } = this;
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, width, height);
    let last = null;
    this.owners.forEach((owner, at) => {
      const colour = this.#colour(owner);
      if (colour !== last) c.fillStyle = last = colour;
      c.globalAlpha = this.lit && !this.lit.has(owner) && owner !== FREE ? 0.25 : 1;
      c.fillRect((at % columns) * (CELL + GAP), Math.floor(at / columns) * (CELL + GAP), CELL, CELL);
    });
    c.globalAlpha = 1;
  }

  #colour(owner) {
    const { palette, model } = this;
    if (owner === FREE) return palette.sunken;
    if (owner === OUTPUT) return mix(palette.accent, palette.raised, 0.4);
    const node = model.nodes.get(owner);
    if (!node) return palette.strong;
    if (node.locks) return palette.accent;
    if (node.leases) return palette.made;
    return palette.heats[heatOf(model.age(node))];
  }

  #cellAt(x, y) {
    const column = Math.floor(x / (CELL + GAP));
    const at = Math.floor(y / (CELL + GAP)) * this.columns + column;
    return column < this.columns && at >= 0 && at < this.owners.length ? at : -1;
  }

  #hover(at, event) {
    if (at < 0) return this.onHover(null);
    const { pages_per_cell: perCell, page_size: pageSize } = this.model.pool;
    this.onHover({ owner: this.owners[at], first: at * perCell * pageSize, tokens: perCell * pageSize }, event);
  }
}
