"""Tree of thought: propose steps in branches, rate them, keep the best, and go deeper.

After Yao et al. 2023 (arXiv 2305.10601), as a search over forks: each level's branches go on from
their parents' text, which is computed once.
"""

import stemma as sgl

NUM_BRANCHES = 3
NUM_KEPT = 2
DEPTH = 2
CITY = "(Rome|Oslo|Lisbon|Prague|Vienna|Bergen|Porto)"


def propose(s, level):
    s += sgl.user(f"Day {level + 1}: where to?")
    s += sgl.assistant("We go to " + sgl.gen(f"step_{level}", regex=CITY, temperature=1.5) + ".")
    return s


def rate(s, level):
    s += sgl.user("How good is that plan so far, from 1 to 9?")
    s += sgl.assistant(sgl.gen_int(f"rating_{level}", max_tokens=1, temperature=0.7))
    return s


def expand(parents, level):
    """Children of all parents, all under way at once before any is looked at."""
    children = [child for parent in parents for child in parent.fork(NUM_BRANCHES)]
    for child in children:
        propose(child, level)
        rate(child, level)
    return sorted(children, key=lambda child: -int(child[f"rating_{level}"]))[:NUM_KEPT]


@sgl.function
def tree_of_thought(s, question):
    s += sgl.system("You plan step by step.")
    s += sgl.user(question)
    s += sgl.assistant("Let us think.")
    leaves = [s]
    for level in range(DEPTH):
        leaves = expand(leaves, level)
    s["paths"] = [[leaf[f"step_{level}"] for level in range(DEPTH)] for leaf in leaves]
    best = leaves[0]
    best += sgl.user("Do you want to go there? Answer yes or no.")
    best += sgl.assistant(sgl.select("result", ["yes", "no"]))
    s["result"] = best["result"]


def main():
    state = tree_of_thought.run("Plan two days of travel.", seed=3)
    for path in state["paths"]:
        print(" then ".join(path))
    print("Do we want to go?", state["result"])


if __name__ == "__main__":
    main()
