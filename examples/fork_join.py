"""Three questions to one text in parallel branches, joined; the text's KV is computed once.

Run: python examples/fork_join.py
"""

import stemma as st

TEXT = "Clara Voss is 41 years old. She works as a pilot. She lives in Geneva and likes chess."


@st.function
def ask_three(s: st.ProgramState, text: str) -> None:
    s += st.user(f"Text: {text}\nExtract the person as JSON.")
    s += st.assistant(st.gen("whole", max_tokens=96, temperature=0))
    forks = s.fork(3)
    fields = ["name, age", "job, city", "name, hobby"]
    forks += lambda i: st.user(f"Now extract {fields[i]} as JSON.")
    forks += st.assistant(st.gen("part", max_tokens=64, temperature=0))
    forks.join()  # state["part"] is now a list


if __name__ == "__main__":
    state = ask_three.run(TEXT)
    print("whole:", state["whole"])
    for part, meta in zip(state["part"], state.get_meta_info("part"), strict=True):
        print("part: ", part, f"({meta['cached_tokens']} of {meta['prompt_tokens']} cached)")
