// What is under the pointer, in words.

import { h } from "../dom.js";
import { FREE, OUTPUT, UNSHOWN } from "./pool_canvas.js";
import { partsOf } from "./roles.js";

export const count = (number) => Math.round(number).toLocaleString("en");
const tokens = (number) => `${count(number)} token${Math.round(number) === 1 ? "" : "s"}`;

export function duration(seconds) {
  if (seconds < 1) return "less than a second";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

const ms = (value) => (value < 10 ? `${value.toFixed(1)} ms` : `${Math.round(value)} ms`);

/** Of a node of the tree: what it is, who uses it, what becomes of it. */
export function explainNode(node, model) {
  if (node.parent === null) {
    const name = model.roots[node.id];
    const where = name === null ? "Another key's prefixes" : name ? `The prefixes of namespace ${name}` : "Where all prefixes begin";
    return [h("h3", { text: where }), line("Each line to the right is a run of tokens; where it forks, several texts go on from the same prefix, whose KV is kept once for all of them.")];
  }
  const users = model.users.get(node.id) ?? [];
  const hidden = node.text === "" && model.roots[node.root] === null;
  return [
    hidden ? line("Another key's text: only its size is shown.") : h("p", { class: "tip-text" }, ...said(node, model)),
    facts([
      ["tokens", `${count(node.tokens)}, after ${count(node.start)} before them`],
      ["in use", users.length ? `${count(node.locks)} request${node.locks === 1 ? "" : "s"}: ${listed(users.map((user) => user.program ?? `#${user.id}`))}` : node.locks ? count(node.locks) : null],
      ["last use", node.locks ? "now" : node.id < 0 ? null : node.usedS === null ? null : `${duration(model.age(node))} ago`],
      ["matches", node.hits ? count(node.hits) : null],
      ["shared by", node.numLeaves > 1 ? `${count(node.numLeaves)} branches` : null],
      ["only", node.owner ? `program ${node.owner} has used it` : null],
    ]),
    ...status(node, model).map(line),
  ];
}

/** A node's text, who speaks set apart; what is longer than the engine tells ends in "…". */
function said(node, model) {
  const parts = partsOf(node.text, model.nodes.get(node.parent)?.text);
  const shown = parts.flatMap(({ role, text }, at) => [at ? "\n" : null, role ? h("b", { data: { role }, text: `${role}: ` }) : null, text]);
  return [...shown, node.tokens > 32 ? "…" : null].filter((one) => one !== null);
}

function status(node, model) {
  const said = [];
  if (node.id < 0) said.push("On the host only: it was evicted from the device, and is copied back when a request needs it.");
  else if (node.locks) said.push("Locked: requests that run read it, so nothing can evict it.");
  else if (node.pins) said.push("Pinned: kept on the device whatever comes, until the pin ends.");
  else if (node.leases) said.push("Leased: a program will come back to it, so it goes only after what nobody expects to use.");
  else if (node.usedS === null) said.push("Its program has ended and nobody else used it: the first to go.");
  else said.push("Cached: nobody uses it now; it is evicted once it is the one that was used longest ago.");
  for (const lease of model.leases.get(node.id) ?? [])
    said.push(`${lease.is_pin ? "Pin" : "Lease"} of ${tokens(lease.tokens)}${lease.is_pin || lease.due_s <= 0 ? "" : `, expected in ${duration(lease.due_s)}`}, ends in ${duration(Math.max(0, lease.ttl_s))} at the latest.`);
  if (node.id > 0 && node.onHost) said.push(`${count(node.onHost)} of its tokens are on the host too.`);
  if (node.hidden) said.push(`${count(node.hidden)} more branches go on from here; they are too many, or too old, to be shown.`);
  return said;
}

export function explainStep(step, model) {
  const { tokens: sums } = step;
  const parts = [
    ["prompts", sums.prefill, "computed"], ["read", sums.score, "computed for scores or embeddings"], ["decoded", sums.decode, step.num_accepted ? `${count(step.num_accepted)} of them guessed before` : "one a request"],
    ["forced", sums.forced, "given by a grammar, computed at once"], ["from cache", sums.cached, "not computed"],
  ].filter(([, number]) => number);
  const label = (id) => model.names.get(id)?.program ?? `#${id}`;
  const chunks = step.rows.slice(0, 4).map(([id, kind, number, cached, forced]) =>
    line(`${label(id)}: ${kind === "decode" ? `${forced} forced after one it decoded` : `${kind === "score" ? "reads" : "prompt"} ${number}${cached ? ` after ${count(cached)} from the cache` : ""}${forced ? `, ${forced} of them forced` : ""}`}`));
  return [
    h("h3", { text: `Step ${count(step.id)} · ${ms(step.ms)}` }),
    facts(parts.map(([name, number, how]) => [name, `${tokens(number)}, ${how}`])),
    ...chunks,
    step.rows.length > 4 ? line(`and ${step.rows.length - 4} more prompts`) : null,
    line(`${ms(step.plan_ms)} to plan${step.device_ms === null ? "" : `, ${ms(step.device_ms)} to compute`}; ${count(step.num_running)} running, ${count(step.num_waiting)} waiting.`),
    step.num_shared ? line(`${tokens(step.num_shared)} of KV read once for several rows.`) : null,
    step.num_drafted ? line(`${tokens(step.num_drafted)} guessed, ${count(step.num_accepted)} of them right.`) : null,
    step.evicted_tokens ? line(`${tokens(step.evicted_tokens)} evicted to make room.`) : null,
    step.num_preempted ? line(`${count(step.num_preempted)} requests preempted: pages ran out.`) : null,
  ].filter(Boolean);
}

export function explainCell({ owner, first, tokens: number }, model) {
  const where = number > 1 ? `Tokens ${count(first)} to ${count(first + number - 1)} of the pool` : `Token ${count(first)} of the pool`;
  if (owner === FREE) return [h("h3", { text: "Free" }), line(where)];
  if (owner === OUTPUT) return [h("h3", { text: "Output in the making" }), line("Held by a request that runs; it enters the tree when the request ends."), line(where)];
  const node = model.nodes.get(owner);
  if (owner === UNSHOWN || !node) return [h("h3", { text: "Cached" }), line("In a branch of the tree that is not shown."), line(where)];
  return [...explainNode(node, model), line(where)];
}

const WHY = {
  preempted: "it ran already and had to give its pages up; it comes back first",
  rows: "as many requests run as may at a time",
  gate: "the working set has no room for its program",
  prefix: "another request is computing the prefix that they share",
  pages: "its prompt does not fit into the pages that are free",
  turn: "others come first by the policy",
};

export const whyWaiting = (request) => WHY[request.why] ?? request.why;

export function explainRequest(request, model) {
  const label = request.program ?? `#${request.id}`;
  const isRunning = request.node !== undefined;
  return [
    h("h3", { text: `Request ${label}` }),
    facts([
      ["prompt", tokens(request.prompt)],
      ["from cache", isRunning ? tokens(request.cached) : null],
      ["output", isRunning && request.task === "generate" ? `${count(request.output)} of at most ${count(request.max_output)}${request.forced ? `, ${count(request.forced)} forced` : ""}` : null],
      ["tenant", request.tenant && !/^[0-9a-f]{32}$/.test(request.tenant) ? request.tenant : null],
      ["preempted", request.num_preemptions ? `${request.num_preemptions} times` : null],
      ["age", duration(request.age_s)],
    ]),
    isRunning ? (request.lacks_grammar ? line("Its grammar is still being compiled.") : null) : line(`It waits: ${whyWaiting(request)}.`),
    isRunning && model.nodes.has(request.node) ? line("Its path in the tree is lit.") : null,
  ].filter(Boolean);
}

const line = (text) => h("p", { text });

function listed(names) {
  const some = [...new Set(names)].slice(0, 4).join(", ");
  return names.length > 4 ? `${some} and ${names.length - 4} more` : some;
}

const facts = (pairs) =>
  h("dl", {}, ...pairs.filter(([, value]) => value !== null).flatMap(([name, value]) => [h("dt", { text: name }), h("dd", { text: value })]));
