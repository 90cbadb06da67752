// Which tools a conversation offers to the model: built-in ones by name, others as JSON.

import { BUILT_IN } from "./built_in.js";

const MAX_CHARS = 100_000; // of the JSON; guess
const MAX_TOOLS = 64; // guess
const NAME = /^[\w-]{1,64}$/; // as OpenAI has it

/** Something to begin with: a tool that the reader answers for. */
export const EXAMPLE = JSON.stringify([{
  name: "get_weather",
  description: "The weather in a city now.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false },
}], null, 2);

/** No tools. `isRequired`: the model must call one before it answers a message. */
export const noTools = () => ({ names: [], text: "", isRequired: false });

/** The tools of a request, in OpenAI's form; those whose JSON is wrong are left out. */
export function toolsOf({ names, text }) {
  const built = BUILT_IN.filter(({ name }) => names.includes(name));
  const { tools } = readTools(text);
  return [...built, ...tools].map(({ name, description, parameters }) => ({ type: "function", function: { name, description, parameters } }));
}

/** What is wrong with a conversation's tools, or "". */
export function problemOfTools({ names, text }) {
  const { tools, problem } = readTools(text);
  if (problem) return problem;
  const all = [...names, ...tools.map(({ name }) => name)];
  const twice = all.find((name, at) => all.indexOf(name) < at);
  return twice === undefined ? "" : `there are two tools named ${twice}`;
}

/** {tools, problem} of a text: a list or one tool, each {name, description, parameters} or what
    OpenAI wraps around it. */
export function readTools(text) {
  if (!text.trim()) return { tools: [], problem: "" };
  try {
    if (text.length > MAX_CHARS) throw new Error(`more than ${MAX_CHARS} characters`);
    const given = JSON.parse(text);
    const list = Array.isArray(given) ? given : [given];
    if (list.length > MAX_TOOLS) throw new Error(`more than ${MAX_TOOLS} tools`);
    return { tools: list.map(readTool), problem: "" };
  } catch (error) {
    return { tools: [], problem: error instanceof SyntaxError ? `no JSON: ${error.message}` : error.message };
  }
}

function readTool(given, at) {
  const { name, description = "", parameters = { type: "object", properties: {} } } = given?.function ?? given ?? {};
  const where = `tool ${at + 1}`;
  if (typeof name !== "string" || !NAME.test(name)) throw new Error(`${where} needs a name of letters, digits, _ and -, at most 64`);
  if (typeof description !== "string") throw new Error(`${where}: description must be a text`);
  if (typeof parameters !== "object" || parameters === null || Array.isArray(parameters)) throw new Error(`${where}: parameters must be a JSON Schema`);
  return { name, description, parameters };
}
