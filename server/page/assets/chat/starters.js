// What to begin with. The embedded model is small, and has its own list of what it can really do.

const object = (properties) => ({ type: "object", properties, required: Object.keys(properties), additionalProperties: false });
const list = (schema) => ({ type: "array", items: schema });
const text = { type: "string" };
const write = (schema) => JSON.stringify(schema, null, 2);

/** Schemas to take: name -> text. */
export const SCHEMAS = {
  Person: write(object({ name: text, age: { type: "integer", minimum: 0 }, city: text })),
  Order: write(object({ customer: text, item: text, price: { type: "number" } })),
  Event: write(object({ event: text, city: text, date: text })),
  "List of texts": write(list(text)),
  "Yes or no": write(object({ answer: { enum: ["yes", "no"] } })),
};

const TINY = {
  note: "stemma-tiny has 4.6 million parameters and came with the package. It remembers what you tell it about yourself and turns short texts into JSON, and calls simple tools; more it cannot.",
  starters: [
    { title: "Tell it who you are", text: "Hi, my name is Nora. I live in Bergen." },
    { title: "A text into JSON", text: "Text: Anna Berg is 34 years old. She lives in Lisbon.\nExtract name, age, city as JSON.", schema: "Person" },
    { title: "Three tips", text: "Give me 3 tips for travelling." },
    { title: "What it can do", text: "What can you do?" },
  ],
};
const ANY = {
  note: "Begin with a text of your own, or with one of these.",
  starters: [
    { title: "A definition", text: "What is a stemma in textual criticism? Answer in three sentences." },
    { title: "A text into JSON", text: "Anna Berg is 34 years old and lives in Lisbon. Give name, age and city.", schema: "Person" },
    { title: "A table", text: "Compare a list, a set and a dictionary in Python in a small table." },
    { title: "Two drafts", text: "Write a title for an article about family trees of manuscripts." },
  ],
};

/** {note, starters: [{title, text, schema?}]} for a model. */
export function startersFor(model) {
  return model === "stemma-tiny" ? TINY : ANY;
}
