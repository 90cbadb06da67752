"""One question over many documents: each is read in a branch of its own, then all together."""

import stemma as sgl

DOCUMENTS = (
    "Ada lives in Rome. Omar lives in Oslo.",
    "Nora lives in Bergen.",
    "Paul lives in Rome. Lena lives in Prague.",
    "Mira lives in Vienna.",
)


@sgl.function
def multi_document_qa(s, documents, name, city):
    s += sgl.system("Read the documents and answer.")
    forks = s.fork(len(documents))
    for fork, document in zip(forks, documents):
        fork += sgl.user(f"Text: {document}\nDoes {name} live in {city}? Answer yes or no.")
        fork += sgl.assistant(sgl.select("answer", ["yes", "no"]))
    forks.join()

    kept = [text for text, answer in zip(documents, s["answer"]) if answer == "yes"]
    s["kept"] = kept
    text = " ".join(kept or documents)
    s += sgl.user(f"Text: {text}\nDoes {name} live in {city}? Answer yes or no.")
    s += sgl.assistant(sgl.gen("final", choices=["yes", "no"]))


@sgl.function
def concatenated(s, documents):
    """Each document read in its branch; what the branches wrote becomes the parent's."""
    s += sgl.system("Read the documents.")
    forks = s.fork(len(documents))
    forks += lambda i: sgl.user(f"Text: {documents[i]}\nExtract name, city as JSON.")
    forks += sgl.assistant(sgl.gen("fact", max_tokens=32, temperature=0))
    forks.join("concate_and_append")
    s += sgl.user(f"Text: {documents[-1]}\nExtract city as JSON.")
    s += sgl.assistant(sgl.gen("last", max_tokens=32, temperature=0))


def main():
    for name, city in (("Ada", "Rome"), ("Nora", "Oslo")):
        state = multi_document_qa.run(DOCUMENTS, name, city)
        print(f"Does {name} live in {city}?", state["answer"], "->", state["final"])
    print(concatenated.run(DOCUMENTS).text())


if __name__ == "__main__":
    main()
