// Tools that the page itself carries out, in the browser, at once.

import { calculate } from "./calculator.js";

const object = (properties, required) => ({ type: "object", properties, required, additionalProperties: false });

/** Each {name, description, parameters, run(arguments)}; `run` gives a text or raises Error. */
export const BUILT_IN = [
  {
    name: "get_current_time",
    description: "The date and time now, in a time zone of the IANA database or the user's own.",
    parameters: object({ timezone: { type: "string", maxLength: 40, description: 'such as "Europe/Oslo"' } }, []),
    run: ({ timezone }) => timeIn(timezone || Intl.DateTimeFormat().resolvedOptions().timeZone),
  },
  {
    name: "calculate",
    description: "The value of an arithmetic expression with + - * / % ^, parentheses, sqrt, sin, log, min, max and the like.",
    parameters: object({ expression: { type: "string", maxLength: 200, description: 'such as "2 * (3 + 4)"' } }, ["expression"]),
    run: ({ expression }) => String(calculate(String(expression ?? ""))),
  },
  {
    name: "random_integer",
    description: "A random whole number from low to high, both included.",
    parameters: object({ low: { type: "integer" }, high: { type: "integer" } }, ["low", "high"]),
    run: ({ low, high }) => drawn(low, high),
  },
];

function timeIn(timeZone) {
  try {
    return new Intl.DateTimeFormat("en-GB", { dateStyle: "full", timeStyle: "long", timeZone }).format(new Date());
  } catch {
    throw new Error(`"${timeZone}" is no time zone`);
  }
}

function drawn(low, high) {
  if (!Number.isSafeInteger(low) || !Number.isSafeInteger(high) || low > high) throw new Error("low and high must be whole numbers, low at most high");
  return String(low + Math.floor(Math.random() * (high - low + 1)));
}
