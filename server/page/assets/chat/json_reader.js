// JSON read character by character while it is written (RFC 8259): at any moment it is known whether
// the text so far is complete, can still become JSON, or cannot any more, and where it went wrong.

const SPACE = " \t\n\r";
const WORDS = ["true", "false", "null"];
const NUMBER = { // state -> [characters, next state]...
  minus: [["0", "zero"], ["123456789", "int"]],
  zero: [[".", "dot"], ["eE", "e"]],
  int: [["0123456789", "int"], [".", "dot"], ["eE", "e"]],
  dot: [["0123456789", "frac"]],
  frac: [["0123456789", "frac"], ["eE", "e"]],
  e: [["+-", "sign"], ["0123456789", "exp"]],
  sign: [["0123456789", "exp"]],
  exp: [["0123456789", "exp"]],
};
const NUMBER_ENDS = ["zero", "int", "frac", "exp"];

export class JsonReader {
  constructor() {
    this.text = "";
    this.tokens = []; // {kind: "key" | "string" | "number" | "word" | "mark", text}
    this.invalidAt = -1; // the first character that no JSON has here
    this.stack = []; // "{" and "["
    this.expected = "value"; // or "item" (value or ]), "member" (key or }), "key", "colon", "more", "end"
    this.lexing = null; // {kind, text, state} of a token that is being read
  }

  /** "empty", "prefix", "complete" or "invalid". */
  get state() {
    if (this.invalidAt >= 0) return "invalid";
    if (this.expected === "end" && !this.lexing) return "complete";
    if (!this.stack.length && this.lexing?.kind === "number" && NUMBER_ENDS.includes(this.lexing.state)) return "complete";
    return this.tokens.length || this.lexing ? "prefix" : "empty";
  }

  /** Reads on: `text` is all there is so far, and begins with what was read before. */
  read(text) {
    for (let at = this.text.length; at < text.length && this.invalidAt < 0; at++)
      if (!this.step(text[at])) this.invalidAt = at;
    this.text = text;
    return this;
  }

  step(c) {
    if (this.lexing) {
      const outcome = this.lex(c);
      if (outcome !== "before") return outcome;
    }
    if (SPACE.includes(c)) return true;
    if (c === "]" || c === "}") return this.close(c);
    if (c === ",") return this.comma();
    if (c === ":") return this.expected === "colon" && this.mark(c, "value");
    if (c === '"') return this.openString();
    if (this.expected !== "value" && this.expected !== "item") return false;
    if (c === "{" || c === "[") {
      this.stack.push(c);
      return this.mark(c, c === "{" ? "member" : "item");
    }
    const number = c === "-" ? "minus" : c === "0" ? "zero" : "123456789".includes(c) ? "int" : null;
    if (number) return this.begin("number", c, number);
    return WORDS.some((word) => word[0] === c) && this.begin("word", c, null);
  }

  /** Goes on with a token: true, false, or "before" where it ended before `c`. */
  lex(c) {
    const token = this.lexing;
    if (token.kind === "number") {
      const next = NUMBER[token.state].find(([characters]) => characters.includes(c));
      if (next) { token.text += c; token.state = next[1]; return true; }
      return NUMBER_ENDS.includes(token.state) && this.finish() && "before";
    }
    token.text += c;
    if (token.kind === "word") {
      if (WORDS.includes(token.text)) return this.finish();
      return WORDS.some((word) => word.startsWith(token.text));
    }
    return this.lexString(token, c);
  }

  lexString(token, c) {
    if (token.state === "plain") {
      if (c === '"') return this.finish();
      if (c === "\\") token.state = "escape";
      return c >= " ";
    }
    if (token.state === "escape") {
      token.state = c === "u" ? 4 : "plain";
      return '"\\/bfnrtu'.includes(c);
    }
    token.state = token.state === 1 ? "plain" : token.state - 1; // hexadecimal digits that are missing
    return /[0-9a-fA-F]/.test(c);
  }

  openString() {
    if (["key", "member"].includes(this.expected)) return this.begin("key", '"', "plain");
    return ["value", "item"].includes(this.expected) && this.begin("string", '"', "plain");
  }

  begin(kind, text, state) {
    this.lexing = { kind, text, state };
    return true;
  }

  finish() {
    const { kind, text } = this.lexing;
    this.tokens.push({ kind, text });
    this.lexing = null;
    this.expected = kind === "key" ? "colon" : this.stack.length ? "more" : "end";
    return true;
  }

  comma() {
    return this.expected === "more" && this.mark(",", this.stack.at(-1) === "{" ? "key" : "value");
  }

  close(c) {
    const open = c === "]" ? "[" : "{";
    const isAllowed = this.stack.at(-1) === open && ["more", open === "[" ? "item" : "member"].includes(this.expected);
    if (!isAllowed) return false;
    this.stack.pop();
    return this.mark(c, this.stack.length ? "more" : "end");
  }

  mark(text, expected) {
    this.tokens.push({ kind: "mark", text });
    this.expected = expected;
    return true;
  }
}
