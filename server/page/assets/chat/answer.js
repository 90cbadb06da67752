// One answer, as it is written: the request, what its stream says, and the times seen here.

import { ApiError } from "../api.js";
import { contentOf } from "./attachments.js";
import { messagesOf } from "./tools/calls.js";
import { toolsOf } from "./tools/toolset.js";
import { lineTo } from "./tree.js";

const MAX_CALLS = 256; // of one answer, as the server has it
const MIN_SPAN_MS = 20; // below it a speed says how the network packs, not how the engine writes

/** Fills `node`, an assistant's message whose parent line is the prompt. `sampling`: fields of the
    request; `onChange()` after each change. Never raises: the node says how it ended. */
export async function writeAnswer({ api, conversation, node, sampling, signal, onChange }) {
  Object.assign(node, { text: "", state: "writing", createdMs: Date.now() });
  for (const name of ["reasoning", "toolCalls", "error", "failure", "finish", "usage", "firstMs", "tokensPerS"]) delete node[name];
  const clock = new Clock();
  try {
    const body = requestOf(conversation, node, sampling);
    onChange();
    for await (const { data } of api.events("/v1/chat/completions", { body, signal })) {
      if (data === "[DONE]") { finish(node, clock); return; }
      take(node, JSON.parse(data), clock);
      onChange();
    }
    throw new ApiError("the answer broke off before its end");
  } catch (error) {
    node.state = error.name === "AbortError" ? "stopped" : "failed";
    if (node.state === "failed") Object.assign(node, { error: error.message, failure: failureOf(error) });
  } finally {
    onChange();
  }
}

/** Whose fault it was: "away" (no engine), "busy" (limits), "refused" (the request) or "broken". */
function failureOf(error) {
  if (error.isOutage) return "away";
  if (error.status === 429) return "busy";
  return error.status >= 400 && error.status < 500 ? "refused" : "broken";
}

/** The body of the request for `node`. */
export function requestOf(conversation, node, sampling) {
  const messages = messagesOf(lineTo(conversation, node.parent), contentOf);
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const body = { messages, ...sampling, stream: true, stream_options: { include_usage: true } };
  if (conversation.model) body.model = conversation.model;
  const tools = toolsOf(conversation.tools);
  if (tools.length) Object.assign(body, { tools, tool_choice: node.mustCall ? "required" : "auto" });
  if (node.schemaText !== undefined)
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(node.schemaText), strict: true } };
  return body;
}

/** Times of a stream, from when the request was sent. */
class Clock {
  constructor() {
    this.startMs = performance.now();
    this.firstMs = null;
    this.lastMs = null;
  }

  tick() {
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
  }
}

function take(node, chunk, clock) {
  if (chunk.error) throw new ApiError(chunk.error.message ?? "the server failed", { status: 500, kind: chunk.error.type });
  if (chunk.model) node.model = chunk.model;
  if (chunk.usage) {
    node.usage = { prompt: chunk.usage.prompt_tokens, completion: chunk.usage.completion_tokens,
      cached: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0 };
  }
  const choice = chunk.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta ?? {};
  if (content || reasoning || calls) clock.tick();
  if (content) node.text += content;
  if (reasoning) node.reasoning = (node.reasoning ?? "") + reasoning;
  for (const call of calls ?? []) takeCall(node, call);
  if (choice.finish_reason) node.finish = choice.finish_reason;
  if (choice.warnings) node.warnings = choice.warnings.map(String);
}

function takeCall(node, { index = 0, id, function: called = {} }) {
  if (index >= MAX_CALLS) return;
  node.toolCalls ??= [];
  while (node.toolCalls.length <= index) node.toolCalls.push({ id: `call_${node.id}_${node.toolCalls.length}`, name: "", text: "" });
  if (id) node.toolCalls[index].id = id;
  node.toolCalls[index].name += called.name ?? "";
  node.toolCalls[index].text += called.arguments ?? "";
}

function finish(node, clock) {
  node.state = "done";
  if (clock.firstMs === null) return;
  node.firstMs = clock.firstMs - clock.startMs;
  const spanMs = clock.lastMs - clock.firstMs;
  if (node.usage?.completion > 1 && spanMs >= MIN_SPAN_MS) node.tokensPerS = (1000 * (node.usage.completion - 1)) / spanMs;
}
