// Arithmetic out of a text, by recursive descent. Nothing of it is ever run as code.

const MAX_CHARS = 500;
const MAX_DEPTH = 50;
const TOKEN = /\s*(?:(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+(?:e[+-]?\d+)?)|([a-z_]\w*)|(\*\*|[-+*/%^(),×÷−]))/iy;
const SAME = { "×": "*", "÷": "/", "−": "-", "**": "^" };
const CONSTANTS = { pi: Math.PI, e: Math.E };
const FUNCTIONS = {
  sqrt: Math.sqrt, abs: Math.abs, round: Math.round, floor: Math.floor, ceil: Math.ceil, exp: Math.exp, ln: Math.log, log: Math.log10,
  sin: Math.sin, cos: Math.cos, tan: Math.tan, min: Math.min, max: Math.max,
};

/** The value of an expression such as "2 * (3 + sqrt(16))". Raises Error with what is wrong. */
export function calculate(text) {
  if (text.length > MAX_CHARS) throw new Error(`an expression has at most ${MAX_CHARS} characters`);
  const parser = new Parser(tokensOf(text));
  const value = parser.sum(0);
  if (parser.next) throw new Error(`"${parser.next}" was not expected`);
  if (!Number.isFinite(value)) throw new Error("the result is no finite number");
  return Number(value.toPrecision(15)); // 0.1 + 0.2 is 0.3
}

function tokensOf(text) {
  const tokens = [];
  TOKEN.lastIndex = 0;
  while (text.slice(TOKEN.lastIndex).trim()) {
    const at = TOKEN.lastIndex;
    const found = TOKEN.exec(text);
    if (!found) throw new Error(`"${text.slice(at).trim()[0]}" is no part of arithmetic`);
    tokens.push(SAME[found[3]] ?? found[0].trim().toLowerCase());
  }
  return tokens;
}

class Parser {
  constructor(tokens) {
    this.tokens = tokens;
    this.at = 0;
  }

  get next() {
    return this.tokens[this.at];
  }

  takes(token) {
    if (this.next !== token) return false;
    this.at++;
    return true;
  }

  sum(depth) {
    if (depth > MAX_DEPTH) throw new Error("too many parentheses");
    let value = this.product(depth);
    for (;;) {
      if (this.takes("+")) value += this.product(depth);
      else if (this.takes("-")) value -= this.product(depth);
      else return value;
    }
  }

  product(depth) {
    let value = this.signed(depth);
    for (;;) {
      if (this.takes("*")) value *= this.signed(depth);
      else if (this.takes("/")) value /= this.signed(depth);
      else if (this.takes("%")) value %= this.signed(depth);
      else return value;
    }
  }

  signed(depth) {
    if (this.takes("-")) return -this.signed(depth);
    if (this.takes("+")) return this.signed(depth);
    const base = this.atom(depth);
    return this.takes("^") ? base ** this.signed(depth) : base;
  }

  atom(depth) {
    const token = this.tokens[this.at++];
    if (token === undefined) throw new Error("the expression ends too early");
    if (token === "(") return this.closed(this.sum(depth + 1));
    if (/^[\d.]/.test(token)) return Number(token);
    if (Object.hasOwn(FUNCTIONS, token)) return FUNCTIONS[token](...this.given(token, depth));
    if (Object.hasOwn(CONSTANTS, token)) return CONSTANTS[token];
    throw new Error(`"${token}" is not known here; known are ${[...Object.keys(FUNCTIONS), ...Object.keys(CONSTANTS)].join(", ")}`);
  }

  given(name, depth) {
    if (!this.takes("(")) throw new Error(`"(" must follow ${name}`);
    const values = [this.sum(depth + 1)];
    while (this.takes(",")) values.push(this.sum(depth + 1));
    return this.closed(values);
  }

  closed(value) {
    if (!this.takes(")")) throw new Error('a ")" is missing');
    return value;
  }
}
