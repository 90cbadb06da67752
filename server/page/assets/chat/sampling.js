// Sampling settings: which there are, within which ranges, kept by the browser. What is left empty is
// not sent, so that the model's own default holds.

import { h } from "../dom.js";

const KEY = "stemma.sampling";
const MAX_STOPS = 16; // guess: more than anybody types
export const FIELDS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, hint: "0 takes the likeliest token, always" },
  { name: "top_p", label: "Top p", min: 0.01, max: 1, step: 0.01, hint: "the likeliest tokens that together weigh this much" },
  { name: "top_k", label: "Top k", min: 1, max: 100000, step: 1, hint: "only this many of the likeliest tokens" },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01, hint: "only tokens this likely, of the likeliest one's weight" },
  { name: "max_tokens", label: "Max tokens", min: 1, max: 1000000, step: 1, hint: "the longest answer" },
  { name: "seed", label: "Seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, hint: "the same seed draws the same answer" },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1, hint: "against tokens for each time they were written" },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1, hint: "against tokens that were written" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 10, step: 0.05, hint: "divides the weight of tokens seen before" },
];

/** The settings in force: fields of a request. */
export class Sampling {
  constructor() {
    this.values = {}; // name -> number
    this.stop = []; // stop strings
    this.wrong = new Map(); // name -> what its input says that cannot be sent
    try { this.read(JSON.parse(localStorage.getItem(KEY) ?? "{}")); } catch { /* none are kept */ }
  }

  /** What a request carries. */
  get request() {
    return { ...this.values, ...(this.stop.length && { stop: this.stop }) };
  }

  /** The settings in words, for a line of text. */
  get summary() {
    const said = Object.entries(this.values).map(([name, value]) => `${name} ${value}`);
    if (this.stop.length) said.push(`${this.stop.length} stop`);
    return said.join(" · ");
  }

  /** Takes the text of an input; returns what is wrong with it, or "". */
  take(field, text) {
    const problem = text.trim() ? problemOf(field, Number(text)) : "";
    if (problem) this.wrong.set(field.name, problem);
    else this.wrong.delete(field.name);
    if (!text.trim()) delete this.values[field.name];
    else if (!problem) this.values[field.name] = Number(text);
    this.keep();
    return problem;
  }

  /** One stop string a line; "\n" stands for a line's end. */
  takeStops(text) {
    this.stop = text.split("\n").filter(Boolean).slice(0, MAX_STOPS).map((line) => line.replaceAll("\\n", "\n"));
    this.keep();
  }

  clear() {
    this.values = {};
    this.stop = [];
    this.wrong.clear();
    this.keep();
  }

  keep() {
    try { localStorage.setItem(KEY, JSON.stringify({ values: this.values, stop: this.stop })); } catch { /* for this visit only */ }
  }

  read({ values = {}, stop = [] }) {
    for (const field of FIELDS) {
      const value = values[field.name];
      if (typeof value === "number" && !problemOf(field, value)) this.values[field.name] = value;
    }
    this.stop = stop.filter((one) => typeof one === "string").slice(0, MAX_STOPS);
  }
}

/** The inputs; `onChange()` after each change. */
export function samplingForm(sampling, onChange) {
  const rows = FIELDS.map((field) => row(field, sampling, onChange));
  const stops = h("textarea", { rows: "2", spellcheck: "false", placeholder: "one a line; \\n for a line's end",
    ".value": sampling.stop.map((one) => one.replaceAll("\n", "\\n")).join("\n"),
    on: { input: (event) => { sampling.takeStops(event.target.value); onChange(); } } });
  return h("div", { class: "fields" }, ...rows,
    h("label", { class: "field wide" }, h("span", { text: "Stop strings" }), stops));
}

function problemOf({ min, max, step }, value) {
  if (!Number.isFinite(value) || value < min || value > max) return `between ${min} and ${max}`;
  return step === 1 && !Number.isInteger(value) ? "a whole number" : "";
}

function row(field, sampling, onChange) {
  const { name, label, min, max, step, hint } = field;
  const id = `sampling-${name}`;
  const problem = h("small", { class: "problem", id: `${id}-problem`, role: "alert" });
  const input = h("input", { id, inputmode: "decimal", autocomplete: "off", placeholder: "default", ".value": sampling.values[name] ?? "",
    "aria-describedby": `${id}-problem`, title: hint });
  const slider = step < 1 && max <= 2
    ? h("input", { type: "range", min, max, step, "aria-label": `${label}, slider`, tabindex: "-1", ".value": sampling.values[name] ?? restOf(name) }) : null;
  const take = (text) => {
    problem.textContent = sampling.take(field, text);
    input.setAttribute("aria-invalid", String(Boolean(problem.textContent)));
    if (slider) slider.dataset.set = String(name in sampling.values);
    onChange();
  };
  if (slider) slider.dataset.set = String(name in sampling.values);
  input.addEventListener("input", () => { if (slider) slider.value = input.value || restOf(name); take(input.value); });
  slider?.addEventListener("input", () => { input.value = slider.value; take(input.value); });
  return h("div", { class: "field" }, h("label", { for: id, title: hint, text: label }), slider, input, problem);
}

/** Where a slider rests while its setting is left to the model. */
function restOf(name) {
  return name === "top_p" || name === "temperature" ? 1 : 0;
}
