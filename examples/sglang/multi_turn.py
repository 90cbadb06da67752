"""A chat of several turns, and the same chat with the roles' words written out."""

import stemma as sgl

QUESTIONS = ("Hi, my name is Nora.", "I live in Bergen.", "What is my name?", "Where do I live?")


@sgl.function
def multi_turn(s, questions):
    s += sgl.system("You are a friendly assistant.")
    for number, question in enumerate(questions):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen(f"answer_{number}", max_tokens=64, temperature=0))


@sgl.function
def multi_turn_by_blocks(s, questions):
    with s.system():
        s += "You are a friendly assistant."
    for number, question in enumerate(questions):
        s += sgl.user_begin() + question + sgl.user_end()
        with s.assistant():
            s += sgl.gen(f"answer_{number}", max_tokens=64, temperature=0)


def main():
    state = multi_turn.run(QUESTIONS)
    for message in state.messages():
        print(f"{message['role']:>10}: {message['content']}")
    same = multi_turn_by_blocks.run(QUESTIONS)
    print("the same by blocks:", same.messages() == state.messages())


if __name__ == "__main__":
    main()
