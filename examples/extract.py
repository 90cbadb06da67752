"""Many texts become JSON of a given schema, all in flight at once.

Run: python examples/extract.py
"""

import json

import stemma as st

NUMBERS = ("age", "quantity")
TEXTS = [
    {"fields": "name, age, city", "text": "Anna Berg is 34 years old. She lives in Lisbon."},
    {"fields": "customer, item, quantity", "text": "Paul Dorn ordered 3 lamps."},
    {"fields": "event, city, time", "text": "The Book Club meets in Porto at 18:30."},
]


@st.function
def extract(s: st.ProgramState, fields: str, text: str) -> None:
    names = fields.split(", ")
    schema = {
        "type": "object",
        "properties": {n: {"type": "integer" if n in NUMBERS else "string"} for n in names},
        "required": names,
        "additionalProperties": False,
    }
    s += st.user(f"Text: {text}\nExtract {fields} as JSON.")
    s += st.assistant(st.gen("json", max_tokens=96, temperature=0, json_schema=schema))


if __name__ == "__main__":
    for state in extract.run_batch(TEXTS, progress_bar=True):
        print(json.loads(state["json"]))
