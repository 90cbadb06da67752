// A conversation as a tree: every message is a node, an edit or a second answer is a sibling, and
// the path that is shown follows the chosen child of each node. Plain data, as it is stored.

import { noTools } from "./tools/toolset.js";

export const ROOT = "root";
export const MAX_NODES = 2000;
const TITLE_CHARS = 56;

/** An empty conversation; `schema`: the form that answers must have, where `on`; `model`: an adapter's
    name, or "" for the served model. */
export function newConversation() {
  const now = Date.now();
  return { version: 1, id: crypto.randomUUID?.() ?? `c${now}-${Math.random().toString(36).slice(2)}`, title: "", isTitled: false,
    system: "", model: "", schema: { on: false, text: "" }, tools: noTools(), createdMs: now, updatedMs: now, numNodes: 0, nodes: {}, chosen: {} };
}

/** Adds a message below `parent` (ROOT or an id) and chooses it. */
export function addNode(conversation, parent, role, fields = {}) {
  if (Object.keys(conversation.nodes).length >= MAX_NODES)
    throw new Error(`a conversation holds at most ${MAX_NODES} messages; begin a new one`);
  const id = `n${++conversation.numNodes}`;
  const node = { id, parent, role, text: "", state: "done", createdMs: Date.now(), ...fields };
  conversation.nodes[id] = node;
  choose(conversation, id);
  if (!conversation.isTitled && role === "user" && !conversation.title) conversation.title = titleOf(node.text || node.attachments?.[0].name || "");
  return node;
}

/** The children of `parent`, oldest first. */
export function childrenOf(conversation, parent) {
  return Object.values(conversation.nodes).filter((node) => node.parent === parent);
}

/** All children by parent, in one pass. */
export function childTable(conversation) {
  const table = new Map([[ROOT, []]]);
  for (const node of Object.values(conversation.nodes)) {
    if (!table.has(node.parent)) table.set(node.parent, []);
    table.get(node.parent).push(node);
  }
  return table;
}

/** The messages that are shown, first to last. */
export function pathOf(conversation, table = childTable(conversation)) {
  const path = [];
  let parent = ROOT;
  for (;;) {
    const children = table.get(parent) ?? [];
    if (!children.length) return path;
    const node = children.find((child) => child.id === conversation.chosen[parent]) ?? children.at(-1);
    path.push(node);
    parent = node.id;
  }
}

/** The messages from the first to `id`, both included. */
export function lineTo(conversation, id) {
  const line = [];
  for (let node = conversation.nodes[id]; node; node = conversation.nodes[node.parent]) line.unshift(node);
  return line;
}

/** Lets the path lead through `id`; below it, as it was chosen before. */
export function choose(conversation, id) {
  for (const node of lineTo(conversation, id)) conversation.chosen[node.parent] = node.id;
}

/** Tokens of all answers together, and how many answers tell theirs. */
export function sumOf(conversation) {
  const sum = { answers: 0, told: 0, prompt: 0, cached: 0, completion: 0, leaves: 0 };
  const table = childTable(conversation);
  for (const node of Object.values(conversation.nodes)) {
    if (!table.has(node.id)) sum.leaves++;
    if (node.role !== "assistant") continue;
    sum.answers++;
    if (!node.usage) continue;
    sum.told++;
    for (const name of ["prompt", "cached", "completion"]) sum[name] += node.usage[name];
  }
  return sum;
}

/** A first line as a title. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1).trimEnd()}…` : line;
}
