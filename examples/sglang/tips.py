"""Fork and join: tips in one go, then details on each in parallel branches."""

import stemma as sgl


@sgl.function
def expand_tips(s, topic, num_tips):
    s += sgl.user(f"Give me 3 tips for {topic}.")
    s += sgl.assistant(sgl.gen("tips", max_tokens=64, temperature=0))

    forks = s.fork(num_tips)
    forks += lambda i: sgl.user(f"Explain tip {i + 1}.")
    forks += sgl.assistant(sgl.gen("detail", max_tokens=48, temperature=0))
    forks.join()

    s += sgl.user("Now all details together.")
    with s.assistant():
        for number, detail in enumerate(s["detail"], 1):
            s += f"{number}. {detail}\n"


def main():
    state = expand_tips.run("sleeping better", 3)
    print(state["tips"])
    print(state.messages()[-1]["content"])


if __name__ == "__main__":
    main()
