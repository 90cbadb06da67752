"""A ReAct agent with two tools: the model thinks, Python acts. Run: python examples/agent.py"""

import ast
import operator
import re

import stemma as st

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
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def calculate(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](calculate(node.left), calculate(node.right))
    return int(ast.literal_eval(node))


def use_tool(tool: str, argument: str) -> str:
    if tool == "lookup":
        return FACTS.get(argument, "not found")
    try:
        return str(calculate(ast.parse(argument, mode="eval").body))
    except (SyntaxError, ValueError, KeyError):
        return "error"


@st.function
def agent(s: st.ProgramState, question: str) -> None:
    s += st.system(SYSTEM) + st.user(question) + st.assistant_begin()
    for number in range(6):
        s += st.gen(f"step{number}", stop="\nObservation:", temperature=0)
        step = s[f"step{number}"]  # waits; everything before it travelled as one message
        action = re.search(r"Action: (\w+)\[(.*)\]$", step)
        if action is None:
            break
        s += f"\nObservation: {use_tool(*action.groups())}\n"
    s["answer"] = step.partition("Answer: ")[2]


if __name__ == "__main__":
    for question in ("What is 48 * 17?", "How many more people live in Velmora than in Tarnby?"):
        state = agent.run(question)
        print(question, "->", state["answer"])
        meta = state.get_meta_info("step0")
        print(
            f"  first call: {meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens cached"
        )
