"""Many texts become JSON, all in flight at once. Run: python examples/extract.py"""

import json

import stemma as st

TEXTS = [
    {"fields": "name, age, city", "text": "Anna Berg is 34 years old. She lives in Lisbon."},
    {"fields": "customer, item, quantity", "text": "Paul Dorn ordered 3 lamps."},
    {"fields": "event, city, time", "text": "The Book Club meets in Porto at 18:30."},
]


@st.function
def extract(s: st.ProgramState, fields: str, text: str) -> None:
    s += st.user(f"Text: {text}\nExtract {fields} as JSON.")
    s += st.assistant(st.gen("json", max_tokens=96, temperature=0))


if __name__ == "__main__":
    for state in extract.run_batch(TEXTS, progress_bar=True):
        print(json.loads(state["json"]))
