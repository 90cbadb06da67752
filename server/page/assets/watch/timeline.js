// The last steps of the engine, one column each: above the line what each computed, below it how
// long it took.

import { readPalette } from "./palette.js";

const COLUMN = 6;
export const KINDS = ["prefill", "score", "decode", "forced"];
const COLOURS = { prefill: "computed", score: "disk", decode: "made", forced: "forced" };

export class Timeline {
  constructor(canvas, model, onHover) {
    Object.assign(this, { canvas, model, onHover, context: canvas.getContext("2d"), hovered: -1 });
    this.palette = readPalette();
    this.listeners = new AbortController();
    const options = { signal: this.listeners.signal };
    canvas.addEventListener("pointermove", (event) => this.#hover(event), options);
    canvas.addEventListener("pointerleave", () => this.#hover(null), options);
    canvas.addEventListener("keydown", (event) => this.#key(event), options);
    canvas.addEventListener("blur", () => this.#hover(null), options);
    this.observer = new ResizeObserver(() => this.update());
    this.observer.observe(canvas);
  }

  close() {
    this.listeners.abort();
    this.observer.disconnect();
  }

  recolour() {
    this.palette = readPalette();
    this.update();
  }

  /** The steps that are shown, the newest last. */
  get shown() {
    return this.model.steps.slice(-Math.max(1, Math.floor((this.width - 46) / COLUMN)));
  }

  update() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (!width || !height) return;
    const scale = Math.min(devicePixelRatio || 1, 2);
    Object.assign(this, { width, height });
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
    }
    const { context: c, palette } = this;
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, width, height);
    const steps = this.shown;
    const base = Math.round(height * 0.68);
    const most = Math.max(8, ...steps.map(({ tokens }) => KINDS.reduce((sum, kind) => sum + tokens[kind], tokens.cached)));
    const slowest = Math.max(1, ...steps.map((step) => step.ms));
    const tall = (tokens) => (tokens / most) ** 0.42 * (base - 14);
    this.#axis(base, most, slowest, tall);
    steps.forEach((step, i) => {
      const x = this.#left(steps) + i * COLUMN;
      const isDim = this.hovered >= 0 && this.hovered !== i;
      c.globalAlpha = isDim ? 0.55 : 1;
      let sum = 0;
      for (const kind of KINDS) {
        if (!step.tokens[kind]) continue;
        const from = tall(sum);
        sum += step.tokens[kind];
        c.fillStyle = palette[COLOURS[kind]];
        c.fillRect(x, base - tall(sum), COLUMN - 1.5, tall(sum) - from);
      }
      if (step.tokens.cached) {
        const from = tall(sum);
        const to = tall(sum + step.tokens.cached);
        c.strokeStyle = palette.reused;
        c.lineWidth = 1;
        c.strokeRect(x + 0.5, base - to, COLUMN - 2.5, Math.max(2, to - from - 1));
      }
      c.fillStyle = step.num_preempted ? palette.bad : palette.faint;
      c.fillRect(x, base + 3, COLUMN - 1.5, Math.max(1, (step.ms / slowest) * (height - base - 6)));
    });
    c.globalAlpha = 1;
  }

  #left(steps) {
    return this.width - steps.length * COLUMN - 2;
  }

  #axis(base, most, slowest, tall) {
    const { context: c, palette, width, height } = this;
    c.font = `10px ${palette.mono}`;
    c.fillStyle = palette.soft;
    c.strokeStyle = palette.line;
    c.lineWidth = 1;
    c.textAlign = "left";
    c.beginPath();
    for (const tokens of [most, most / 8]) {
      const y = Math.round(base - tall(tokens)) + 0.5;
      c.moveTo(38, y);
      c.lineTo(width, y);
      c.fillText(String(Math.round(tokens)), 0, y + 3.5);
    }
    c.moveTo(38, base + 0.5);
    c.lineTo(width, base + 0.5);
    c.stroke();
    c.fillText("0", 0, base + 3.5);
    c.fillText(`${slowest < 10 ? slowest.toFixed(1) : Math.round(slowest)}ms`, 0, height - 4);
  }

  #hover(event) {
    this.#show(event ? Math.floor((event.offsetX - this.#left(this.shown)) / COLUMN) : -1);
  }

  /** From step to step; `Escape` and leaving end it. */
  #key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    if (event.key === "Escape") this.#show(-1);
    else if (event.key in moves) this.#show(this.hovered < 0 ? this.shown.length - 1 : this.hovered + moves[event.key]);
    else return;
    event.preventDefault();
  }

  #show(at) {
    const steps = this.shown;
    this.hovered = at >= 0 && at < steps.length ? at : -1;
    const place = { x: this.#left(steps) + (this.hovered + 0.5) * COLUMN, y: this.height / 3 };
    this.onHover(this.hovered < 0 ? null : steps[this.hovered], place);
    this.update();
  }
}
