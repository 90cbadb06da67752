// The radix tree on a canvas: laid out from the left or around the root, moved and zoomed, alive.
// Edges of one colour and width are one path, so a frame of 2,000 nodes is a few dozen strokes.

import { paintLabels } from "./labels.js";
import { layOut } from "./layout.js";
import { heatOf, readPalette } from "./palette.js";

const GHOST_MS = 900;
const ARRIVE_MS = 700;
const SETTLE = 0.2; // of the way to its place, a frame
const LEFT = 34;
const RIGHT = 190; // for the texts of leaves
const MAX_LABELS = 600; // that are tried
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class TreeCanvas {
  constructor(canvas, model, { onHover, onPin }) {
    Object.assign(this, { canvas, model, onHover, onPin, context: canvas.getContext("2d") });
    this.palette = readPalette();
    this.shape = "rows"; // or "round"
    this.insets = { top: 70, bottom: 50 }; // pixels that others cover
    this.camera = { x: 0, y: 0, sx: 1, sy: 1 };
    this.isFitted = true;
    this.layout = { roots: [], order: [], byWeight: [], depth: 1, breadth: 1 };
    this.ghosts = [];
    this.lit = null; // ids that stand out
    this.found = null; // ids that a search has found
    this.hovered = this.pinned = null; // nodes
    this.frameTimes = [];
    this.version = -1;
    this.listeners = new AbortController();
    this.#listen();
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(canvas);
  }

  close() {
    this.listeners.abort();
    this.observer.disconnect();
    cancelAnimationFrame(this.frame);
    this.frame = -1;
  }

  /** The model has changed. */
  update() {
    const now = performance.now();
    if (this.version !== this.model.treeVersion) {
      this.version = this.model.treeVersion;
      this.layout = layOut(this.model.nodes);
      this.layout.byWeight = [...this.layout.order].sort((a, b) => b.numLeaves - a.numLeaves || b.locks - a.locks).slice(0, MAX_LABELS);
      for (const node of this.model.changes.added) node.bornMs = now;
      for (const node of this.model.changes.removed)
        if (node.x !== undefined && this.ghosts.length < 400) this.ghosts.push({ node, goneMs: now, from: this.model.nodes.get(node.parent) });
      if (this.pinned && !this.model.nodes.has(this.pinned.id)) this.pin(null);
      if (this.hovered && !this.model.nodes.has(this.hovered.id)) this.#hover(null);
    }
    if (this.isFitted) this.#aimAtAll();
    this.draw();
  }

  recolour() {
    this.palette = readPalette();
    this.draw();
  }

  setShape(shape) {
    this.shape = shape;
    this.fit();
  }

  /** Show all of it, and follow as it grows. */
  fit() {
    this.isFitted = true;
    this.#aimAtAll();
    this.draw();
  }

  light(ids) {
    this.lit = ids;
    this.draw();
  }

  find(ids) {
    this.found = ids;
    this.draw();
  }

  pin(node) {
    this.pinned = node;
    this.onPin(node, node && this.at(node));
    this.draw();
  }

  resize() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const scale = Math.min(devicePixelRatio || 1, 2);
    if (!width || !height) return;
    Object.assign(this, { width, height, scale });
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    if (this.isFitted) {
      this.#aimAtAll();
      Object.assign(this.camera, this.target);
    }
    this.draw();
  }

  /** Where a node is on the canvas, in CSS pixels. */
  at(node) {
    const { x, y, sx, sy } = this.camera;
    return { x: x + node.x * sx, y: y + node.y * sy };
  }

  draw() {
    if (this.frame === undefined) this.frame = requestAnimationFrame(() => {
      this.frame = undefined;
      const began = performance.now();
      const isMoving = this.#advance(began);
      this.#paint(began);
      this.frameTimes.push(performance.now() - began);
      if (this.frameTimes.length > 600) this.frameTimes.shift();
      if (isMoving) this.draw();
    });
  }

  zoom(factor, px = this.width / 2, py = this.height / 2) {
    const camera = { ...(this.target ?? this.camera) };
    const kx = Math.min(Math.max(camera.sx * factor, 0.01), 8) / camera.sx;
    const ky = Math.min(Math.max(camera.sy * factor, 0.002), 8) / camera.sy;
    this.#moveTo({ x: px - (px - camera.x) * kx, y: py - (py - camera.y) * ky, sx: camera.sx * kx, sy: camera.sy * ky });
  }

  pan(dx, dy) {
    const camera = this.target ?? this.camera;
    this.#moveTo({ ...camera, x: camera.x + dx, y: camera.y + dy });
  }

  /** Bring a node into the middle if it is not in view. */
  reveal(node) {
    const { x, y } = this.at(node);
    if (x < 20 || y < 20 || x > this.width - 60 || y > this.height - 20) this.pan(this.width / 2 - x, this.height / 2 - y);
  }

  // --- moving -------------------------------------------------------------------------------------

  #moveTo(camera) {
    this.isFitted = false;
    this.target = camera;
    if (still.matches || this.dragging) Object.assign(this.camera, camera);
    this.draw();
  }

  #aimAtAll() {
    if (!this.width) return;
    const { depth, breadth } = this.layout;
    const { top, bottom } = this.insets;
    const room = Math.max(60, this.height - top - bottom);
    if (this.shape === "round") {
      const sy = Math.max(0.01, (Math.min(this.width - 24, room) / 2) / depth);
      const sx = Math.min(1.5 * sy, (this.width - 24) / 2 / depth);
      this.target = { x: this.width / 2, y: top + room / 2, sx, sy };
    } else {
      const right = this.width < 520 ? 70 : RIGHT;
      const sx = Math.min(1.6, Math.max(60, this.width - LEFT - right) / depth);
      const sy = Math.min(1.5, room / breadth);
      this.target = { x: LEFT, y: top + Math.max(0, room - breadth * sy) / 2, sx, sy };
    }
    if (still.matches || !this.hasDrawn) Object.assign(this.camera, this.target);
  }

  #advance(now) {
    let isMoving = false;
    if (this.target) {
      for (const name of ["x", "y", "sx", "sy"]) {
        const left = this.target[name] - this.camera[name];
        this.camera[name] += left * (still.matches ? 1 : SETTLE);
        if (Math.abs(left) > Math.abs(this.target[name]) * 0.001 + 0.001) isMoving = true;
      }
    }
    const jump = still.matches ? 1 : SETTLE;
    for (const node of this.layout.order) {
      const [x, y] = this.#placeOf(node);
      if (node.x === undefined || this.shape !== node.shape) {
        const parent = this.model.nodes.get(node.parent);
        const isNew = node.x === undefined && parent?.x !== undefined && this.hasDrawn && !still.matches;
        Object.assign(node, { x: isNew ? parent.x : x, y: isNew ? parent.y : y, shape: this.shape });
      }
      const dx = x - node.x;
      const dy = y - node.y;
      if (dx || dy) {
        const isClose = Math.abs(dx) + Math.abs(dy) < 0.3;
        node.x += isClose ? dx : dx * jump;
        node.y += isClose ? dy : dy * jump;
        if (!isClose) isMoving = true;
      }
      if (now - (node.bornMs ?? -Infinity) < ARRIVE_MS) isMoving = true;
    }
    this.ghosts = this.ghosts.filter((ghost) => now - ghost.goneMs < GHOST_MS);
    this.hasDrawn = this.layout.order.length > 0;
    const isFlowing = this.model.users.size > 0 && this.model.isLive && !still.matches;
    return isMoving || this.ghosts.length > 0 || isFlowing;
  }

  #placeOf(node) {
    if (this.shape === "rows") return [node.depth, node.breadth];
    const angle = (node.breadth / this.layout.breadth) * 2 * Math.PI - Math.PI / 2;
    return [node.depth * Math.cos(angle), node.depth * Math.sin(angle)];
  }

  // --- painting -----------------------------------------------------------------------------------

  #paint(now) {
    const { context: c, palette, scale, width, height } = this;
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, width, height);
    c.lineCap = "round";
    c.lineJoin = "round";
    const pitch = this.#pitch();
    const focus = this.lit ?? this.found;
    this.#paintEdges(focus, pitch);
    this.#paintFlow(focus, now);
    this.#paintGhosts(now);
    this.#paintDots(focus, pitch, now);
    if (this.shape === "rows") paintLabels(this, focus);
    const marked = this.hovered ?? this.pinned;
    if (marked) this.#ring(marked, palette.ink, 7, []);
    if (this.pinned && this.pinned !== marked) this.#ring(this.pinned, palette.ink, 7, []);
  }

  #pitch() {
    const { breadth, depth } = this.layout;
    if (this.shape === "rows") return 20 * this.camera.sy;
    return (2 * Math.PI * depth * this.camera.sx * 20) / breadth;
  }

  #paintEdges(focus, pitch) {
    const { context: c, model } = this;
    const groups = new Map();
    const thin = pitch < 3 ? 0.6 : 1;
    for (const node of this.layout.order) {
      const parent = model.nodes.get(node.parent);
      if (!parent || parent.x === undefined) continue;
      const a = this.at(parent);
      const b = this.at(node);
      if (Math.max(a.x, b.x) < -20 || Math.max(a.y, b.y) < -20 || Math.min(a.x, b.x) > this.width + 20 || Math.min(a.y, b.y) > this.height + 20) continue;
      const isDim = focus && !focus.has(node.id);
      const width = Math.round(2 * thin * edgeWidth(node)) / 2;
      const kind = node.id < 0 ? "host" : node.locks ? "use" : node.usedS === null ? "aged" : heatOf(model.age(node));
      const key = `${isDim ? 0 : 1}|${kind}|${width}`;
      let group = groups.get(key);
      if (!group) groups.set(key, (group = { kind, width, isDim, path: new Path2D() }));
      this.#trace(group.path, parent, node, a, b);
    }
    const rank = ({ kind, isDim }) => (isDim ? -100 : 0) + (kind === "use" ? 50 : kind === "host" || kind === "aged" ? -20 : -kind);
    for (const group of [...groups.values()].sort((a, b) => rank(a) - rank(b))) {
      c.globalAlpha = group.isDim ? 0.16 : 1;
      c.strokeStyle = this.#colour(group.kind);
      c.lineWidth = group.width;
      c.setLineDash(group.kind === "host" ? [5, 4] : group.kind === "aged" ? [1.5, 4] : []);
      c.stroke(group.path);
    }
    c.setLineDash([]);
    c.globalAlpha = 1;
  }

  #colour(kind) {
    const { palette } = this;
    if (kind === "host") return palette.host;
    if (kind === "aged") return palette.faint;
    return kind === "use" ? palette.accent : palette.heats[kind];
  }

  #trace(path, parent, node, a, b) {
    path.moveTo(a.x, a.y);
    if (this.shape === "rows") {
      const bend = a.x + Math.min(26, (b.x - a.x) * 0.55);
      path.bezierCurveTo(a.x + (bend - a.x) * 0.62, a.y, a.x + (bend - a.x) * 0.3, b.y, bend, b.y);
      return path.lineTo(b.x, b.y);
    }
    const middle = (parent.depth + node.depth) / 2;
    const { x, y, sx, sy } = this.camera;
    const reach = (p, depth) => (p.depth ? [x + (p.x / p.depth) * depth * sx, y + (p.y / p.depth) * depth * sy] : [x, y]);
    const [cx, cy] = parent.depth ? reach(parent, middle) : reach(node, middle * 0.5);
    const [ex, ey] = reach(node, middle);
    path.bezierCurveTo(cx, cy, ex, ey, b.x, b.y);
  }

  /** Dots that run along what is being read now, from the root outwards. */
  #paintFlow(focus, now) {
    const { context: c, model } = this;
    if (!model.users.size || model.users.size > 300 || still.matches || !model.isLive) return;
    const path = new Path2D();
    for (const id of model.users.keys()) {
      const node = model.nodes.get(id);
      const parent = model.nodes.get(node?.parent);
      if (!parent || parent.x === undefined || (focus && !focus.has(id))) continue;
      this.#trace(path, parent, node, this.at(parent), this.at(node));
    }
    c.strokeStyle = this.palette.raised;
    c.globalAlpha = 0.85;
    c.lineWidth = 1.1;
    c.setLineDash([2, 12]);
    c.lineDashOffset = -((now / 22) % 14);
    c.stroke(path);
    c.setLineDash([]);
    c.globalAlpha = 1;
  }

  #paintGhosts(now) {
    const { context: c } = this;
    for (const { node, goneMs, from } of this.ghosts) {
      const part = (now - goneMs) / GHOST_MS;
      const b = this.at(node);
      c.globalAlpha = (1 - part) * 0.8;
      c.strokeStyle = c.fillStyle = this.palette.faint;
      c.lineWidth = 1.2;
      if (from?.x !== undefined) {
        const a = this.at(from);
        c.beginPath();
        c.moveTo(a.x + (b.x - a.x) * part * 0.6, b.y);
        c.lineTo(b.x, b.y + part * 8);
        c.stroke();
      }
      c.beginPath();
      c.arc(b.x, b.y + part * 8, 2.6 * (1 - part), 0, 7);
      c.fill();
    }
    c.globalAlpha = 1;
  }

  #paintDots(focus, pitch, now) {
    const { context: c, model, palette } = this;
    const isSmall = pitch < 4;
    const groups = new Map();
    for (const node of this.layout.order) {
      const { x, y } = this.at(node);
      if (x < -20 || y < -20 || x > this.width + 20 || y > this.height + 20) continue;
      const isDim = focus && !focus.has(node.id);
      const isRoot = node.parent === null;
      const isNew = now - (node.bornMs ?? -Infinity) < ARRIVE_MS && this.hasDrawn;
      if (isNew && !isDim && !still.matches) {
        const part = (now - node.bornMs) / ARRIVE_MS;
        c.globalAlpha = 0.45 * (1 - part);
        c.fillStyle = palette.computed;
        c.beginPath();
        c.arc(x, y, 3 + 10 * part, 0, 7);
        c.fill();
        c.globalAlpha = 1;
      }
      if (!isDim && (node.pins || node.leases)) this.#ring(node, node.pins ? palette.pinned : palette.made, isSmall ? 3 : 5, node.pins ? [] : [2.2, 2]);
      if (isSmall && !node.locks && !isRoot) continue;
      const kind = isRoot ? "root" : node.id < 0 ? "host" : node.locks ? "use" : node.usedS === null ? "aged" : heatOf(model.age(node));
      const key = `${isDim ? 0 : 1}|${kind}`;
      if (!groups.has(key)) groups.set(key, { kind, isDim, path: new Path2D() });
      const radius = isRoot ? 5 : isSmall ? 1.8 : node.locks ? 3.2 : 2.5;
      const { path } = groups.get(key);
      path.moveTo(x + radius, y);
      path.arc(x, y, radius, 0, 7);
    }
    for (const { kind, isDim, path } of groups.values()) {
      c.globalAlpha = isDim ? 0.16 : 1;
      c.fillStyle = kind === "host" ? palette.paper : kind === "root" ? palette.ink : this.#colour(kind);
      c.fill(path);
      if (kind === "host") {
        c.strokeStyle = palette.host;
        c.lineWidth = 1.4;
        c.stroke(path);
      }
    }
    c.globalAlpha = 1;
  }

  #ring(node, colour, radius, dash) {
    const { context: c } = this;
    const { x, y } = this.at(node);
    c.strokeStyle = colour;
    c.lineWidth = 1.5;
    c.setLineDash(dash);
    c.beginPath();
    c.arc(x, y, radius, 0, 7);
    c.stroke();
    c.setLineDash([]);
  }

  // --- the pointer --------------------------------------------------------------------------------

  #listen() {
    const options = { signal: this.listeners.signal };
    const { canvas } = this;
    const fingers = new Map();
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0016)), event.offsetX, event.offsetY);
    }, { ...options, passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, { x: event.offsetX, y: event.offsetY });
      this.dragging = { x: event.offsetX, y: event.offsetY, moved: 0 };
    }, options);
    canvas.addEventListener("pointermove", (event) => {
      const here = { x: event.offsetX, y: event.offsetY };
      if (!fingers.has(event.pointerId)) return this.#hover(this.nearest(here.x, here.y));
      const before = fingers.get(event.pointerId);
      const other = [...fingers].find(([id]) => id !== event.pointerId)?.[1];
      fingers.set(event.pointerId, here);
      this.dragging.moved += Math.abs(here.x - before.x) + Math.abs(here.y - before.y);
      if (other) {
        const apart = (p) => Math.hypot(p.x - other.x, p.y - other.y);
        this.zoom(apart(here) / Math.max(1, apart(before)), (here.x + other.x) / 2, (here.y + other.y) / 2);
      } else if (this.dragging.moved > 3) this.pan(here.x - before.x, here.y - before.y);
    }, options);
    for (const name of ["pointerup", "pointercancel"])
      canvas.addEventListener(name, (event) => {
        fingers.delete(event.pointerId);
        if (name === "pointerup" && this.dragging && this.dragging.moved <= 3) {
          const node = this.nearest(event.offsetX, event.offsetY);
          this.#hover(node);
          this.pin(node === this.pinned ? null : node);
        }
        if (!fingers.size) this.dragging = null;
      }, options);
    canvas.addEventListener("pointerleave", () => this.#hover(null), options);
    canvas.addEventListener("dblclick", () => this.fit(), options);
  }

  #hover(node) {
    if (node === this.hovered) return;
    this.hovered = node;
    this.onHover(node, node && this.at(node));
    this.draw();
  }

  /** The node whose dot, or whose run before it, is under a point. */
  nearest(px, py) {
    let best = null;
    let least = 14;
    for (const node of this.layout.order) {
      if (node.x === undefined) continue;
      const { x, y } = this.at(node);
      let distance = Math.hypot(x - px, y - py);
      const parent = this.shape === "rows" && this.model.nodes.get(node.parent);
      if (parent && px < x && px > this.at(parent).x + 10) distance = Math.min(distance, Math.abs(y - py) + 2);
      if (distance < least) [best, least] = [node, distance];
    }
    return best;
  }
}

/** Thicker: more sequences go through it; those that run now count for more. */
function edgeWidth(node) {
  const now = node.locks ? 1.2 + 1.1 * Math.log2(1 + node.locks) : 0;
  return Math.min(11, Math.max(now, 0.9 + 0.85 * Math.log2(node.numLeaves)));
}
