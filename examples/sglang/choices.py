"""Choose among texts by their likelihood, with each of the three methods, and go on from there."""

import stemma as sgl

METHODS = {
    "token_length_normalized": sgl.token_length_normalized,
    "greedy_token_selection": sgl.greedy_token_selection,
    "unconditional_likelihood_normalized": sgl.unconditional_likelihood_normalized,
}


@sgl.function
def sentiment(s, text, choices_method):
    s += sgl.user(f"Text: {text}\nIs the sentiment positive or negative?")
    s += sgl.assistant(
        sgl.gen("sentiment", choices=["positive", "negative"], choices_method=choices_method)
    )


@sgl.function
def next_step(s, question):
    s += sgl.user(question)
    with s.assistant():
        s += "Thought: I need to " + sgl.select("operation", ["multiply", "add", "subtract"])
        preposition = {"multiply": "by", "add": "and", "subtract": "from"}[s["operation"]]
        s += sgl.gen("numbers", regex=f" [0-9]{{2}} {preposition} [0-9]{{2}}", temperature=0)
        s += "."


def main():
    for name, method in METHODS.items():
        state = sentiment.run("What a lovely lamp!", method)
        scores = state.get_meta_info("sentiment")["choice_logprobs"]
        print(f"{name}: {state['sentiment']}", [round(score, 2) for score in scores])
    print(next_step.run("What is 48 * 17?").messages()[-1]["content"])


if __name__ == "__main__":
    main()
