"""Judge a review in several dimensions at once, then sum it up as a grade and as JSON.

The dimensions are branches of one prompt, which is computed once.
"""

import json

import stemma as sgl

REVIEWS = ("The soup from Porto is wonderful.", "The hotel in Bergen was terrible.")
DIMENSIONS = {
    "sentiment": ("Is this positive or negative?", ["positive", "negative"]),
    "topic": (
        "What is the topic: sports, food, travel, music?",
        ["sports", "food", "travel", "music"],
    ),
}


@sgl.function
def judge(s, review):
    s += sgl.user_begin() + f"Text: {review}\n"

    forks = s.fork(len(DIMENSIONS))
    for fork, (question, answers) in zip(forks, DIMENSIONS.values()):
        fork += question + sgl.user_end()
        fork += sgl.assistant(sgl.select("verdict", answers))
    verdicts = [fork["verdict"] for fork in forks]

    s["verdicts"] = dict(zip(DIMENSIONS, verdicts))
    s += "Sum it up as JSON." + sgl.user_end()
    with s.assistant(), s.var_scope("output"):
        s += f'{{"topic":"{verdicts[1]}","sentiment":"{verdicts[0]}","grade":"'
        s += sgl.gen("grade", regex="[ABCD]", temperature=0) + '"}'


def main():
    states = judge.run_batch([{"review": review} for review in REVIEWS], num_threads=2)
    for review, state in zip(REVIEWS, states):
        print(review, state["verdicts"], json.loads(state["output"]))


if __name__ == "__main__":
    main()
