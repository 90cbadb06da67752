// The special tokens of chat templates, as words: who speaks, instead of "<|im_start|>user".

const NAMES = {
  system: "System", developer: "System", user: "User", human: "User", assistant: "Model", model: "Model", gpt: "Model", bot: "Model",
  tool: "Tool", function: "Tool", ipython: "Tool",
};
const ROLE = Object.keys(NAMES).join("|");
// ChatML, Llama 3, Gemma, gpt-oss; tokens named for the role (Phi, Zephyr, Stemma's own); Mistral.
const OPENING = /<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|start\|>/;
const MARKS = new RegExp([
  `(?:${OPENING.source})\\s*(${ROLE})(?:<\\|end_header_id\\|>|<\\|message\\|>)?\\n*`,
  `<\\|(${ROLE})(?:_start)?\\|>\\n*`,
  "(\\[/?INST\\])\\s*",
  `(?:${OPENING.source}|<\\|(?:im_end|eot_id|eom_id|end|endoftext|end_of_text|begin_of_text|begin|return|/(?:${ROLE}))\\|>|</?s>|<(?:bos|eos|pad|end_of_turn)>)\\n*`,
].join("|"), "gi");

/** A text of the tree as [{role, text}], role "" where it goes on from before. `before`: the text
    that it follows, whose last token may open a role. */
export function partsOf(text, before = "") {
  const opening = before.match(new RegExp(`(?:${OPENING.source})$`))?.[0] ?? "";
  const whole = opening + text;
  const parts = [{ role: "", text: "" }];
  let at = 0;
  for (const found of whole.matchAll(MARKS)) {
    parts.at(-1).text += whole.slice(at, found.index);
    at = found.index + found[0].length;
    const role = roleOf(found);
    if (role) parts.push({ role, text: "" });
  }
  parts.at(-1).text += whole.slice(at);
  return parts.filter((part) => part.role || part.text);
}

function roleOf([, opened, named, instruction]) {
  if (instruction) return instruction === "[INST]" ? "User" : "Model";
  return NAMES[(opened ?? named ?? "").toLowerCase()] ?? "";
}
