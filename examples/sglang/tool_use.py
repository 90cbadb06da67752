"""Tools as Python's control flow: the model picks one and its arguments, the program calls it."""

import re

import stemma as sgl

FACTS = {"population of Velmora": 48200, "population of Tarnby": 31750}


@sgl.tool(expected_s=0.05)
def calculator(expression):
    found = re.fullmatch(r"(\d+)([-+*])(\d+)", expression)
    if found is None:
        return "error"
    left, operator, right = found.groups()
    numbers = int(left), int(right)
    return {"+": sum(numbers), "-": numbers[0] - numbers[1], "*": numbers[0] * numbers[1]}[operator]


@sgl.tool
def lookup(subject):
    return FACTS[subject]


@sgl.function
def tool_use(s, question):
    s += sgl.user(question)
    with s.assistant():
        s += "Thought:" + sgl.gen("thought", stop="\n", max_tokens=32, temperature=0) + "\n"
        # A space belongs to the token of the word behind it.
        s += "Action:" + sgl.select("tool", [" calculator", " lookup"]) + "["
        if s["tool"] == " calculator":
            s += sgl.gen("argument", stop="]", max_tokens=16, temperature=0)
            result = calculator(s, s["argument"])
        else:
            s += sgl.select("argument", list(FACTS))
            result = lookup(s, s["argument"])
        s += f"]\nObservation: {result}\n" + sgl.gen("end", max_tokens=32, temperature=0)
    s["result"] = result


def main():
    for question in ("What is 48 * 17?", "What is the population of Tarnby?"):
        state = tool_use.run(question)
        print(question, state.messages()[-1]["content"], sep="\n", end="\n\n")


if __name__ == "__main__":
    main()
