// Calls that a model has made: which have no result yet, and what the page can carry out itself.

import { lineTo } from "../tree.js";
import { BUILT_IN } from "./built_in.js";

const MAX_ROUNDS = 8; // answers in a row that the page lets come of themselves; guess
const MAX_RESULT_CHARS = 20_000;

/** The calls of the last answer up to `id` that have no result there, in their order. */
export function pendingCalls(conversation, id) {
  const line = lineTo(conversation, id);
  const at = line.findLastIndex((node) => node.role !== "tool");
  const answer = line[at];
  if (answer?.role !== "assistant" || answer.state !== "done" || answer.finish === "length") return [];
  const answered = new Set(line.slice(at + 1).map((node) => node.callId));
  return (answer.toolCalls ?? []).filter((call) => !answered.has(call.id));
}

/** The result of a call of a built-in tool that the conversation offers; null: the reader must say. */
export function carryOut(conversation, id, call) {
  const tool = BUILT_IN.find(({ name }) => name === call.name);
  if (!tool || !conversation.tools.names.includes(call.name) || roundsOf(conversation, id) > MAX_ROUNDS) return null;
  try {
    const given = JSON.parse(call.text || "{}");
    if (typeof given !== "object" || given === null) throw new Error("the arguments must be an object");
    return tool.run(given).slice(0, MAX_RESULT_CHARS);
  } catch (error) {
    return `Error: ${error.message}`;
  }
}

/** Answers since the reader last wrote. */
function roundsOf(conversation, id) {
  const line = lineTo(conversation, id);
  return line.slice(line.findLastIndex((node) => node.role === "user") + 1).filter((node) => node.role === "assistant").length;
}

/** A line of the tree as the messages of a request. Calls go with their results, or not at all: a
    server refuses calls that nobody has answered. */
export function messagesOf(line, contentOf) {
  return line.flatMap((node, at) => {
    if (node.role === "user") return [{ role: "user", content: contentOf(node) }];
    if (node.role !== "assistant") return []; // results come with their calls
    const end = line.findIndex((later, i) => i > at && later.role !== "tool");
    const results = new Map(line.slice(at + 1, end < 0 ? undefined : end).map(({ callId, text }) => [callId, text]));
    const calls = (node.toolCalls ?? []).filter(({ id }) => results.has(id));
    if (!calls.length) return node.text ? [{ role: "assistant", content: node.text }] : [];
    const made = calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text || "{}" } }));
    return [{ role: "assistant", content: node.text || null, tool_calls: made },
      ...calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: results.get(id) }))];
  });
}
