// A conversation as a tree: every message is a node, an edit or a second answer is a sibling, and
// the path that is shown follows the chosen child of each node. Plain data, as it is stored.

export const ROOT = "root";
export const MAX_NODES = 2000;
const MAX_TEXT = 1_000_000; // characters of one message that an import may bring
const TITLE_CHARS = 56;

/** An empty conversation; `schema`: the form that answers must have, where `on`. */
export function newConversation() {
  const now = Date.now();
  return { version: 1, id: crypto.randomUUID?.() ?? `c${now}-${Math.random().toString(36).slice(2)}`, title: "", isTitled: false,
    system: "", schema: { on: false, text: "" }, createdMs: now, updatedMs: now, numNodes: 0, nodes: {}, chosen: {} };
}

/** Adds a message below `parent` (ROOT or an id) and chooses it. */
export function addNode(conversation, parent, role, fields = {}) {
  if (Object.keys(conversation.nodes).length >= MAX_NODES)
    throw new Error(`a conversation holds at most ${MAX_NODES} messages; begin a new one`);
  const id = `n${++conversation.numNodes}`;
  const node = { id, parent, role, text: "", state: "done", createdMs: Date.now(), ...fields };
  conversation.nodes[id] = node;
  choose(conversation, id);
  if (!conversation.isTitled && role === "user" && !conversation.title) conversation.title = titleOf(node.text);
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

/** A conversation from an export, checked and cut to the known fields. Raises Error. */
export function readConversation(given) {
  const bad = (what) => new Error(`this is no exported conversation: ${what}`);
  if (given?.version !== 1 || typeof given.nodes !== "object" || given.nodes === null) throw bad("no nodes of version 1");
  const conversation = newConversation();
  const ids = new Map([[ROOT, ROOT]]);
  const nodes = Object.values(given.nodes);
  if (nodes.length > MAX_NODES) throw bad(`more than ${MAX_NODES} messages`);
  for (const node of nodes) {
    if (!ids.has(node?.parent)) throw bad("a message comes before its parent");
    if (!["user", "assistant"].includes(node.role) || typeof node.text !== "string") throw bad("a message without role or text");
    if (node.text.length > MAX_TEXT) throw bad("a message is too long");
    ids.set(node.id, addNode(conversation, ids.get(node.parent), node.role, readFields(node)).id);
  }
  for (const [parent, id] of Object.entries(given.chosen ?? {}))
    if (ids.has(parent) && ids.has(id)) conversation.chosen[ids.get(parent)] = ids.get(id);
  if (typeof given.title === "string") conversation.title = given.title.slice(0, 200);
  conversation.isTitled = given.isTitled === true;
  if (typeof given.system === "string") conversation.system = given.system;
  if (typeof given.schema?.text === "string") conversation.schema = { on: given.schema.on === true, text: given.schema.text };
  return conversation;
}

/** A first line as a title. */
export function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1).trimEnd()}…` : line;
}

function readFields(node) {
  const fields = { text: node.text, state: ["done", "stopped", "failed"].includes(node.state) ? node.state : "stopped" };
  for (const name of ["reasoning", "error", "failure", "finish", "schemaText", "model"]) if (typeof node[name] === "string") fields[name] = node[name];
  for (const name of ["createdMs", "firstMs", "tokensPerS"]) if (Number.isFinite(node[name])) fields[name] = node[name];
  const { prompt, cached, completion } = node.usage ?? {};
  if ([prompt, cached, completion].every((count) => Number.isInteger(count) && count >= 0)) fields.usage = { prompt, cached, completion };
  if (Array.isArray(node.toolCalls))
    fields.toolCalls = node.toolCalls.map((call) => ({ name: String(call?.name ?? ""), text: String(call?.text ?? "") }));
  return fields;
}
