"""A chat of several turns, streamed. Run: python examples/chat.py"""

import stemma as st

MESSAGES = ["Hi, my name is Nora.", "I live in Bergen.", "What is my name?", "Where do I live?"]


@st.function
def chat(s: st.ProgramState, messages: list[str]) -> None:
    s += st.system("You are a friendly assistant.")
    for number, message in enumerate(messages):
        s += st.user(message)
        s += st.assistant(st.gen(f"reply{number}", max_tokens=64, temperature=0))


if __name__ == "__main__":
    state = chat.stream(MESSAGES)
    for number, message in enumerate(MESSAGES):
        print("you:  ", message)
        print("model: ", end="")
        for piece in state.text_iter(f"reply{number}"):
            print(piece, end="", flush=True)
        print()
