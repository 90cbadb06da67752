"""Output of a given form: by a regex, by a JSON Schema of a pydantic model, by dtypes."""

import json

from pydantic import BaseModel

import stemma as sgl

TEXT = "Ada Moor is 34 years old and lives in Lisbon."
PERSON_REGEX = r'\{"name":"[\w ]{1,24}","age":[0-9]{1,3},"city":"[\w ]{1,24}"\}'


class Person(BaseModel):
    name: str
    age: int
    city: str


@sgl.function
def by_regex(s, text):
    s += sgl.user(f"Text: {text}\nExtract name, age, city as JSON.")
    s += sgl.assistant(sgl.gen("json_output", max_tokens=64, regex=PERSON_REGEX, temperature=0))


@sgl.function
def by_schema(s, text):
    s += sgl.user(f"Text: {text}\nExtract name, age, city as JSON.")
    s += sgl.assistant(sgl.gen("json_output", max_tokens=64, json_schema=Person, temperature=0))


@sgl.function
def by_fields(s, text):
    """The program writes what is known, the model only the values."""
    s += sgl.user(f"Text: {text}\nExtract name, age, city as JSON.")
    with s.assistant():
        with s.var_scope("json_output"):
            s += '{"name":"' + sgl.gen("name", max_tokens=16, stop='"', temperature=0)
            s += '","age":' + sgl.gen_int("age", max_tokens=8, temperature=0)
            s += ',"city":"' + sgl.gen("city", max_tokens=16, stop='"', temperature=0) + '"}'


def main():
    for program in (by_regex, by_schema, by_fields):
        print(f"{program.__name__}:", json.loads(program.run(TEXT)["json_output"]))


if __name__ == "__main__":
    main()
