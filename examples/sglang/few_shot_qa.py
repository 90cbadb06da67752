"""Few-shot questions over a batch: the examples are one shared prefix."""

import stemma as sgl

EXAMPLES = (
    ("lamp; desk; chair", '["lamp","desk","chair"]'),
    ("Ada Moor; 12; pilot", '["Ada Moor",12,"pilot"]'),
)
QUESTIONS = ("book; cup; bag", "nurse; Omar Haddad", "7; bread; 149.50; chess")


@sgl.function
def few_shot_qa(s, question):
    for text, answer in EXAMPLES:
        s += sgl.user(f"As a JSON list: {text}")
        s += sgl.assistant(answer)
    s += sgl.user(f"As a JSON list: {question}")
    s += sgl.assistant(sgl.gen("answer", stop="\n", temperature=0, max_tokens=32))


def main():
    states = few_shot_qa.run_batch(
        [{"question": question} for question in QUESTIONS], progress_bar=True
    )
    for question, state in zip(QUESTIONS, states):
        meta = state.get_meta_info("answer")
        cached = f"({meta['cached_tokens']} of {meta['prompt_tokens']} tokens cached)"
        print(question, "->", state["answer"], cached)


if __name__ == "__main__":
    main()
