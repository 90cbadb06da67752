"""Several samples of one prompt, and the answer that most of them give: by forks, and by n."""

from collections import Counter

import stemma as sgl

TEXT = "Ada Moor ordered 3 lamps and 12 chairs. Omar Haddad bought 7 desks."


@sgl.function
def by_forks(s, text, num_samples):
    s += sgl.user(f"Text: {text}\nExtract customer, item, quantity as JSON.")
    forks = s.fork(num_samples)
    forks += sgl.assistant(sgl.gen("answer", max_tokens=48, temperature=1.0))
    forks += sgl.user("Now extract quantity as JSON.")
    forks += sgl.assistant(sgl.gen("quantity", regex=r'\{"quantity":[0-9]{1,3}\}', temperature=1.0))
    forks.join()
    s["votes"] = Counter(s["quantity"]).most_common()


@sgl.function
def by_n(s, text, num_samples):
    s += sgl.user(f"Text: {text}\nExtract quantity as JSON.")
    s += sgl.assistant(
        sgl.gen("quantity", n=num_samples, regex=r'\{"quantity":[0-9]{1,3}\}', temperature=1.0)
    )


def main():
    forked = by_forks.run(TEXT, 5, seed=1)
    for answer in forked["answer"]:
        print(answer)
    print("votes:", forked["votes"])
    print("by n: ", Counter(by_n.run(TEXT, 5, seed=1)["quantity"]).most_common())


if __name__ == "__main__":
    main()
