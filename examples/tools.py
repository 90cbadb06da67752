"""The model calls Python functions by its own choice. Run: python examples/tools.py"""

import stemma as st


@st.tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return {"Lisbon": "sunny, 24 degrees", "Oslo": "snowy, -3 degrees"}.get(city, "not found")


@st.tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@st.function
def assistant(s: st.ProgramState, question: str) -> None:
    s += st.user(question)
    s["reply"] = st.tool_loop([get_weather, multiply], max_turns=3, temperature=0)(s)


if __name__ == "__main__":
    for question in ("What is the weather in Oslo?", "What is 48 times 17?", "Hello!"):
        state = assistant.run(question)
        print(question)
        for message in state.messages()[1:]:
            for call in message.get("tool_calls") or ():
                print(f"  calls {call['function']['name']} {call['function']['arguments']}")
            if message["role"] == "tool":
                print(f"  gets  {message['content']}")
        print(f"  -> {state['reply']}")
