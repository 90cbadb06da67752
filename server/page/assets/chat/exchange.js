// Conversations as files: what an export holds, and what is read back from one.

import { noTools } from "./tools/toolset.js";
import { MAX_NODES, ROOT, addNode, newConversation } from "./tree.js";

const FORMAT = "stemma-conversations";
const MAX_TEXT = 1_000_000; // characters of one message that an import may bring
const MAX_ITEMS = 256; // calls or files of one message
const ROLES = ["user", "assistant", "tool"];

/** The text of a file with these conversations, those that have messages. */
export function exported(conversations) {
  const kept = conversations.filter((item) => Object.keys(item.nodes).length);
  return JSON.stringify({ format: FORMAT, version: 1, conversations: kept }, null, 1);
}

/** The conversations of an export, or the one of a list of OpenAI's messages. Raises Error. */
export function readExport(text) {
  const given = JSON.parse(text);
  if (given?.format === FORMAT && Array.isArray(given.conversations)) return given.conversations.map(readConversation);
  const messages = Array.isArray(given) ? given : given?.messages;
  if (Array.isArray(messages)) return [readMessages(messages)];
  throw new Error("this is neither an export of Stemma's page nor a list of messages");
}

/** A line of messages as chat completions take them. */
function readMessages(messages) {
  const nodes = [];
  const system = [];
  const names = {}; // of tools, by the id of a call
  for (const { role, content, tool_calls: calls = [], tool_call_id: callId } of messages.map((message) => message ?? {})) {
    const text = typeof content === "string" ? content : (content ?? []).map((part) => part?.text ?? "").join("");
    if (role === "system" || role === "developer") { system.push(text); continue; }
    const toolCalls = calls.map((call) => ({ id: call.id, name: call.function?.name, text: call.function?.arguments }));
    for (const { id, name } of toolCalls) names[id] = name;
    nodes.push({ id: nodes.length, parent: nodes.length ? nodes.length - 1 : ROOT, role, text, state: "done",
      ...(calls.length && { toolCalls }), ...(role === "tool" && { callId, name: names[callId] ?? "a tool" }) });
  }
  return readConversation({ version: 1, nodes, system: system.join("\n\n") });
}

/** A conversation, checked and cut to the known fields. Raises Error. */
function readConversation(given) {
  const bad = (what) => new Error(`this is no exported conversation: ${what}`);
  if (given?.version !== 1 || typeof given.nodes !== "object" || given.nodes === null) throw bad("no nodes of version 1");
  const conversation = newConversation();
  const ids = new Map([[ROOT, ROOT]]);
  const nodes = Object.values(given.nodes);
  if (nodes.length > MAX_NODES) throw bad(`more than ${MAX_NODES} messages`);
  for (const node of nodes) {
    if (!ids.has(node?.parent)) throw bad("a message comes before its parent");
    if (!ROLES.includes(node.role) || typeof node.text !== "string") throw bad("a message without role or text");
    if (node.text.length > MAX_TEXT) throw bad("a message is too long");
    ids.set(node.id, addNode(conversation, ids.get(node.parent), node.role, readFields(node)).id);
  }
  for (const [parent, id] of Object.entries(given.chosen ?? {}))
    if (ids.has(parent) && ids.has(id)) conversation.chosen[ids.get(parent)] = ids.get(id);
  if (typeof given.title === "string") conversation.title = given.title.slice(0, 200);
  conversation.isTitled = given.isTitled === true;
  for (const name of ["system", "model"]) if (typeof given[name] === "string") conversation[name] = given[name];
  if (typeof given.schema?.text === "string") conversation.schema = { on: given.schema.on === true, text: given.schema.text };
  conversation.tools = readTools(given.tools);
  return conversation;
}

function readTools({ names, text, isRequired } = {}) {
  const none = noTools();
  return { names: Array.isArray(names) ? names.filter((name) => typeof name === "string") : none.names,
    text: typeof text === "string" ? text : none.text, isRequired: isRequired === true };
}

function readFields(node) {
  const fields = { text: node.text, state: ["done", "stopped", "failed"].includes(node.state) ? node.state : "stopped" };
  for (const name of ["reasoning", "error", "failure", "finish", "schemaText", "model", "callId", "name"]) if (typeof node[name] === "string") fields[name] = node[name];
  for (const name of ["createdMs", "firstMs", "tokensPerS"]) if (Number.isFinite(node[name])) fields[name] = node[name];
  const { prompt, cached, completion } = node.usage ?? {};
  if ([prompt, cached, completion].every((count) => Number.isInteger(count) && count >= 0)) fields.usage = { prompt, cached, completion };
  if (node.mustCall === true) fields.mustCall = true;
  if (Array.isArray(node.toolCalls)) fields.toolCalls = node.toolCalls.slice(0, MAX_ITEMS).map((call, at) => texts(call, { id: `call_${at}`, name: "", text: "" }));
  if (Array.isArray(node.attachments)) fields.attachments = node.attachments.slice(0, MAX_ITEMS).map((file) => texts(file, { name: "", text: "" }));
  return fields;
}

/** The fields of `defaults` as texts, from `given` where it has them. */
function texts(given, defaults) {
  return Object.fromEntries(Object.entries(defaults).map(([name, text]) => [name, String(given?.[name] ?? text).slice(0, MAX_TEXT)]));
}
