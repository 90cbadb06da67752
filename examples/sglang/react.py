"""ReAct: thoughts and actions by the model, observations by the program, in a loop."""

import re

import stemma as sgl

SYSTEM = """\
Answer the question with the help of two tools.
calculator[expression] computes, for example calculator[12*7].
lookup[subject] finds a fact, for example lookup[capital of France].
Write a Thought, then an Action, and wait for the Observation. When you know the result, write the Answer.
Example:
Question: What is 12 times 7?
Thought: I need to multiply 12 by 7.
Action: calculator[12*7]
Observation: 84
Thought: I know the answer.
Answer: 84"""  # noqa: E501
FACTS = {"population of Velmora": "48200", "population of Tarnby": "31750"}
MAX_STEPS = 6


def act(tool, argument):
    if tool == "lookup":
        return FACTS.get(argument, "not found")
    found = re.fullmatch(r"(\d+) ?([-+*]) ?(\d+)", argument)
    if found is None:
        return "error"
    left, right = int(found[1]), int(found[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[found[2]])


@sgl.function
def react(s, question):
    s += sgl.system(SYSTEM)
    s += sgl.user(question)
    s += sgl.assistant_begin()
    for step in range(MAX_STEPS):
        s += sgl.gen(f"step_{step}", stop="\nObservation:", max_tokens=96, temperature=0)
        written = s[f"step_{step}"]
        action = re.search(r"Action: (\w+)\[(.*)\]$", written)
        if action is None:
            break
        with s.pause(expected_s=0.01, label=action[1]):
            observation = act(*action.groups())
        s += f"\nObservation: {observation}\n"
    s += sgl.assistant_end()
    s["num_steps"] = step + 1
    s["answer"] = written.partition("Answer: ")[2]


def main():
    for question in ("What is 48 * 17?", "How many more people live in Velmora than in Tarnby?"):
        state = react.run(question)
        print(f"{question} -> {state['answer']} (in {state['num_steps']} steps)")


if __name__ == "__main__":
    main()
