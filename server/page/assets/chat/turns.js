// What is written into conversations: messages, answers, results of tools. Knows nothing of elements.

import { writeAnswer } from "./answer.js";
import { problemOfSchema } from "./schema_check.js";
import { carryOut, pendingCalls } from "./tools/calls.js";
import { problemOfTools, toolsOf } from "./tools/toolset.js";
import { ROOT, addNode, pathOf } from "./tree.js";

export class Turns {
  /** `on`: {refused(problem, tab), began(conversation, node), grew(conversation, node),
      ended(conversation, node), changed(conversation)}. */
  constructor({ archive, api, sampling }, on) {
    Object.assign(this, { archive, api, sampling, on });
    this.running = new Map(); // conversation id -> {controller, node}
  }

  isWriting(conversation) {
    return this.running.has(conversation.id);
  }

  /** A message below `parent` (the end of the path), and its answer. Returns whether it was taken. */
  send(conversation, { text, attachments = [] }, parent = pathOf(conversation).at(-1)?.id ?? ROOT) {
    return this.add(conversation, parent, "user", { text, ...(attachments.length && { attachments }) });
  }

  /** What came of a call. The model goes on when all calls of its answer have a result. */
  giveResult(conversation, parent, call, text) {
    return this.add(conversation, parent, "tool", { text, callId: call.id, name: call.name });
  }

  add(conversation, parent, role, fields) {
    if (this.isRefused(conversation)) return false;
    try {
      this.goOn(conversation, addNode(conversation, parent, role, fields));
    } catch (error) {
      return this.on.refused(error.message), false;
    }
    return true;
  }

  /** After a message: its answer; after an answer or a result: the next result, or the next answer. */
  goOn(conversation, node) {
    const pending = pendingCalls(conversation, node.id);
    const [done] = pending.map((call) => ({ call, text: carryOut(conversation, node.id, call) })).filter(({ text }) => text !== null);
    if (done) this.giveResult(conversation, node.id, done.call, done.text);
    else if (!pending.length && node.role !== "assistant") this.answer(conversation, node.id);
    else if (node.role === "tool") this.archive.touch(conversation);
    this.on.changed(conversation);
  }

  /** One more answer below a message. */
  answer(conversation, parent) {
    if (this.isRefused(conversation)) return;
    const { schema, tools } = conversation;
    const mustCall = tools.isRequired && conversation.nodes[parent]?.role === "user" && toolsOf(tools).length > 0;
    const form = mustCall ? { mustCall } : schema.on ? { schemaText: schema.text } : {};
    this.write(conversation, addNode(conversation, parent, "assistant", form));
  }

  async write(conversation, node) {
    if (this.isWriting(conversation)) return;
    const controller = new AbortController();
    this.running.set(conversation.id, { controller, node });
    this.archive.touch(conversation);
    const onChange = () => { this.archive.save(conversation); this.on.grew(conversation, node); };
    const written = writeAnswer({ api: this.api, conversation, node, sampling: this.sampling.request, signal: controller.signal, onChange });
    this.on.began(conversation, node);
    await written;
    this.running.delete(conversation.id);
    this.archive.touch(conversation);
    this.on.ended(conversation, node);
    this.goOn(conversation, node);
  }

  stop(conversation) {
    this.running.get(conversation.id)?.controller.abort();
  }

  isRefused(conversation) {
    const [problem, tab] = this.problem(conversation);
    if (problem) this.on.refused(problem, tab);
    return Boolean(problem);
  }

  /** Why nothing can be sent now, and where to mend it. */
  problem(conversation) {
    if (this.isWriting(conversation)) return ["An answer is being written; stop it first (Esc)."];
    const { schema, tools } = conversation;
    const ofSchema = schema.on && problemOfSchema(schema.text);
    if (ofSchema) return [`The schema cannot be sent: ${ofSchema}`, "settings"];
    const ofTools = problemOfTools(tools);
    if (ofTools) return [`The tools cannot be sent: ${ofTools}`, "tools"];
    const [wrong] = this.sampling.wrong;
    return wrong ? [`${wrong[0]} must be ${wrong[1]}.`, "settings"] : [""];
  }
}
