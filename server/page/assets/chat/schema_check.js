// Whether a value fits a JSON Schema: the common keywords, and which of a schema's others were not
// looked at. The server's grammar enforces the schema; this only shows it.

const MAX_DEPTH = 64;
const MAX_PROBLEMS = 5;
const SILENT = new Set(["title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions",
  "deprecated", "readOnly", "writeOnly"]);

/** {problems: [{pointer, message}], unchecked: [keyword]}; at most a few problems. */
export function checkAgainst(schema, value) {
  const found = { root: schema, problems: [], unchecked: new Set() };
  check(schema, value, "", found, 0);
  return { problems: found.problems.slice(0, MAX_PROBLEMS), unchecked: [...found.unchecked].sort() };
}

/** What is wrong with the text of a schema, or null. */
export function problemOfSchema(text) {
  if (!text.trim()) return "empty: write a schema, or take an example";
  try {
    const schema = JSON.parse(text);
    if (typeof schema === "boolean" || (typeof schema === "object" && schema !== null && !Array.isArray(schema))) return null;
    return "a schema is an object (or true, false)";
  } catch (error) {
    return `no JSON: ${error.message.replace(/^JSON\.parse: /, "")}`;
  }
}

function check(schema, value, pointer, found, depth) {
  if (schema === true) return;
  if (schema === false) return report(found, pointer, "nothing is allowed here");
  if (depth > MAX_DEPTH) return void found.unchecked.add("$ref");
  for (const [keyword, given] of Object.entries(schema)) {
    if (SILENT.has(keyword)) continue;
    if (!Object.hasOwn(KEYWORDS, keyword)) found.unchecked.add(keyword);
    else KEYWORDS[keyword]({ given, schema, value, pointer, found, depth });
  }
}

function report(found, pointer, message) {
  found.problems.push({ pointer: pointer || "/", message });
}

/** How often the value fits of several schemas; unchecked keywords are passed on. */
function numFitting({ given, value, found, pointer, depth }) {
  return given.filter((schema) => fits(schema, value, pointer, found, depth)).length;
}

function fits(schema, value, pointer, found, depth) {
  const trial = { ...found, problems: [] };
  check(schema, value, pointer, trial, depth + 1);
  return trial.problems.length === 0;
}

function typeOf(value) {
  if (value === null) return "null";
  if (Array.isArray(value)) return "array";
  return typeof value;
}

const isType = (value, type) => typeOf(value) === type || (type === "integer" && Number.isInteger(value));
const isEqual = (a, b) => canonical(a) === canonical(b);
const canonical = (value) => JSON.stringify(value, (_, part) =>
  part !== null && typeof part === "object" && !Array.isArray(part) ? Object.fromEntries(Object.entries(part).sort(([a], [b]) => (a < b ? -1 : 1))) : part);
const isObject = (value) => typeOf(value) === "object";
const part = (pointer, name) => `${pointer}/${String(name).replaceAll("~", "~0").replaceAll("/", "~1")}`;

/** A keyword that holds where `applies(value)` is false or `holds(value, given)` is true. */
function rule(applies, holds, message) {
  return ({ given, value, pointer, found }) => {
    if (applies(value) && !holds(value, given)) report(found, pointer, message(given));
  };
}

const isNumber = (value) => typeof value === "number";
const isString = (value) => typeof value === "string";
const length = (text) => [...text].length;
const any = () => true;

const KEYWORDS = {
  type: rule(any, (v, types) => [types].flat().some((type) => isType(v, type)), (types) => `not ${[types].flat().join(" or ")}`),
  enum: rule(any, (v, allowed) => allowed.some((one) => isEqual(one, v)), () => "none of the allowed values"),
  const: rule(any, (v, one) => isEqual(v, one), (one) => `not ${JSON.stringify(one)}`),
  minimum: rule(isNumber, (v, m) => v >= m, (m) => `less than ${m}`),
  maximum: rule(isNumber, (v, m) => v <= m, (m) => `more than ${m}`),
  exclusiveMinimum: rule(isNumber, (v, m) => v > m, (m) => `not more than ${m}`),
  exclusiveMaximum: rule(isNumber, (v, m) => v < m, (m) => `not less than ${m}`),
  minLength: rule(isString, (v, m) => length(v) >= m, (m) => `shorter than ${m}`),
  maxLength: rule(isString, (v, m) => length(v) <= m, (m) => `longer than ${m}`),
  minItems: rule(Array.isArray, (v, m) => v.length >= m, (m) => `fewer than ${m} items`),
  maxItems: rule(Array.isArray, (v, m) => v.length <= m, (m) => `more than ${m} items`),
  uniqueItems: rule(Array.isArray, (v, on) => !on || new Set(v.map(canonical)).size === v.length, () => "items repeat"),
  minProperties: rule(isObject, (v, m) => Object.keys(v).length >= m, (m) => `fewer than ${m} properties`),
  maxProperties: rule(isObject, (v, m) => Object.keys(v).length <= m, (m) => `more than ${m} properties`),
  required({ given, value, pointer, found }) {
    if (isObject(value)) for (const name of given) if (!Object.hasOwn(value, name)) report(found, part(pointer, name), "is missing");
  },
  pattern({ given, value, pointer, found }) {
    if (!isString(value)) return;
    try {
      if (!new RegExp(given, "u").test(value)) report(found, pointer, `does not match ${given}`);
    } catch { found.unchecked.add("pattern"); }
  },
  properties({ given, value, pointer, found, depth }) {
    if (isObject(value)) for (const [name, schema] of Object.entries(given))
      if (Object.hasOwn(value, name)) check(schema, value[name], part(pointer, name), found, depth + 1);
  },
  additionalProperties({ given, schema, value, pointer, found, depth }) {
    if (!isObject(value)) return;
    if (schema.patternProperties) return void found.unchecked.add("patternProperties");
    for (const name of Object.keys(value))
      if (!Object.hasOwn(schema.properties ?? {}, name)) check(given, value[name], part(pointer, name), found, depth + 1);
  },
  items({ given, schema, value, pointer, found, depth }) {
    if (!Array.isArray(value)) return;
    if (Array.isArray(given)) return void found.unchecked.add("items");
    const first = schema.prefixItems?.length ?? 0;
    value.slice(first).forEach((item, index) => check(given, item, part(pointer, first + index), found, depth + 1));
  },
  prefixItems({ given, value, pointer, found, depth }) {
    if (Array.isArray(value)) given.forEach((schema, index) => {
      if (index < value.length) check(schema, value[index], part(pointer, index), found, depth + 1);
    });
  },
  allOf({ given, value, pointer, found, depth }) {
    for (const schema of given) check(schema, value, pointer, found, depth + 1);
  },
  anyOf(at) {
    if (numFitting(at) === 0) report(at.found, at.pointer, "fits none of anyOf");
  },
  oneOf(at) {
    const num = numFitting(at);
    if (num !== 1) report(at.found, at.pointer, `fits ${num} of oneOf`);
  },
  not({ given, value, pointer, found, depth }) {
    if (fits(given, value, pointer, found, depth)) report(found, pointer, "fits what it must not");
  },
  $ref({ given, value, pointer, found, depth }) {
    if (typeof given !== "string" || !given.startsWith("#")) return void found.unchecked.add("$ref");
    const names = decodeURIComponent(given.slice(1)).split("/").slice(1).map((name) => name.replaceAll("~1", "/").replaceAll("~0", "~"));
    const target = names.reduce((at, name) => at?.[name], found.root);
    if (target === undefined) found.unchecked.add("$ref");
    else check(target, value, pointer, found, depth + 1);
  },
};
