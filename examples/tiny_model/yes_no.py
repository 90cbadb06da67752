"""Samples of yes/no questions about a text that tells several facts of several people or events.

A wrong value is often one that the text tells of somebody else, so that finding it in the text is
not enough.
"""

from collections.abc import Callable
from dataclasses import dataclass

from samples import Sample
from world import World, with_article

CHOICES = ["yes", "no"]


@dataclass(frozen=True)
class Relation:
    """A kind of fact: how a text tells it, how it is asked for, and what its values are."""

    told: tuple[str, ...]
    asked: tuple[str, ...]
    who: str
    value: Callable[[World], str]


PERSON = {
    "city": Relation(
        ("{n} lives in {v}.", "{n} comes from {v}.", "{n} moved to {v}.", "In {v} lives {n}.",
         "{n} has a flat in {v}."),
        ("Does {n} live in {v}?", "Is {v} where {n} lives?", "Does {n} live in the city of {v}?"),
        "Who lives in {v}?",
        World.city),
    "job": Relation(
        ("{n} is {v}.", "{n} works as {v}.", "{n} has a job as {v}."),
        ("Is {n} {v}?", "Does {n} work as {v}?"),
        "Who works as {v}?",
        lambda world: with_article(world.lower("jobs"))),
    "age": Relation(
        ("{n} is {v} years old.", "{n} turned {v} last week.", "{n} is {v}."),
        ("Is {n} {v} years old?", "Is {v} the age of {n}?", "Is {n} {v}?"),
        "Who is {v} years old?",
        lambda world: str(world.rng.randint(5, 99))),
    "hobby": Relation(
        ("{n} likes {v}.", "{n} loves {v}.", "The hobby of {n} is {v}.", "{n} enjoys {v}."),
        ("Does {n} like {v}?", "Does {n} enjoy {v}?", "Is {v} the hobby of {n}?"),
        "Who likes {v}?",
        lambda world: world.lower("hobbies")),
    "company": Relation(
        ("{n} works for {v}.", "{n} works at {v}.", "The employer of {n} is {v}."),
        ("Does {n} work for {v}?", "Does {n} work at {v}?", "Is {n} with {v}?"),
        "Who works for {v}?",
        World.company),
    "pet": Relation(
        ("{n} has {v}.", "{n} owns {v}.", "{n} bought {v}."),
        ("Does {n} have {v}?", "Does {n} own {v}?"),
        "Who has {v}?",
        lambda world: with_article(world.lower("pets"))),
    "food": Relation(
        ("{n} likes to eat {v}.", "{n} loves to eat {v}.", "The favourite food of {n} is {v}."),
        ("Does {n} like to eat {v}?", "Is {v} the favourite food of {n}?"),
        "Who likes to eat {v}?",
        lambda world: world.lower("foods")),
    "item": Relation(
        ("{n} ordered {v}.", "{n} has ordered {v}.", "{n} would like to buy {v}."),
        ("Did {n} order {v}?", "Does {n} want to buy {v}?"),
        "Who ordered {v}?",
        lambda world: with_article(world.item())),
}  # fmt: skip
EVENT = {
    "city": Relation(
        ("{n} takes place in {v}.", "{n} will be in {v}.", "{n} is held in {v}."),
        ("Does {n} take place in {v}?", "Is {n} in {v}?"),
        "What takes place in {v}?",
        World.city),
    "day": Relation(
        ("{n} is on {v}.", "{n} takes place on {v}."),
        ("Is {n} on {v}?", "Does {n} take place on {v}?"),
        "What is on {v}?",
        World.date),
    "time": Relation(
        ("{n} starts at {v}.", "{n} begins at {v}."),
        ("Does {n} start at {v}?", "Does {n} begin at {v}?"),
        "What starts at {v}?",
        World.time),
    "host": Relation(
        ("{n} is organized by {v}.", "The host of {n} is {v}.", "{v} hosts {n}."),
        ("Is {n} organized by {v}?", "Is {v} the host of {n}?", "Does {v} host {n}?"),
        "What does {v} host?",
        World.first_name),
}  # fmt: skip


Fact = tuple[str, str]
"""Whom it is about, and its kind."""


@dataclass(frozen=True)
class Story:
    """Facts about people or about events, each told by a sentence."""

    world: World
    relations: dict[str, Relation]
    facts: dict[Fact, str]
    sentences: dict[Fact, str]

    @classmethod
    def of(cls, world: World, relations: dict[str, Relation], facts: dict[Fact, str]) -> "Story":
        sentences = {}
        for (name, kind), value in facts.items():
            told = world.rng.choice(relations[kind].told)
            sentences[name, kind] = _capital(told.format(n=name, v=value))
        return cls(world, relations, facts, sentences)

    @classmethod
    def make(cls, world: World, max_facts: int) -> "Story":
        """One to four names, often with the same kinds of facts."""
        rng, relations = world.rng, _relations(world)
        names = _names(world, relations, rng.randint(1, 4))
        kinds = rng.sample(list(relations), rng.choice([1, 1, 2, 3]))
        pairs = [(name, kind) for name in names for kind in kinds]
        if rng.random() < 0.4:
            rng.shuffle(pairs)
        kept = pairs[: rng.randint(1, max_facts)]
        return cls.of(world, relations, {fact: relations[fact[1]].value(world) for fact in kept})

    @property
    def text(self) -> str:
        return " ".join(self.sentences.values())

    def pick(self) -> tuple[Fact, str]:
        """A fact to ask for, and the value: half of the time its own, else often one that is told
        of somebody else. Now and then nothing was told of the fact."""
        rng = self.world.rng
        name, kind = rng.choice(list(self.facts))
        value = self.facts[name, kind]
        if rng.random() < 0.08:
            kind = rng.choice(list(self.relations))
        told = [v for (other, its), v in self.facts.items() if its == kind and other != name]
        is_elsewhere = told and rng.random() < 0.6
        if (name, kind) not in self.facts or rng.random() < 0.5:
            value = rng.choice(told) if is_elsewhere else self.relations[kind].value(self.world)
        return (name, kind), value

    def question(self, fact: Fact, value: str) -> str:
        name, kind = fact
        asked = self.world.rng.choice(self.relations[kind].asked)
        return _capital(asked.format(n=name, v=value))

    def statement(self, fact: Fact) -> str:
        """In the same words whatever those of the text, which are harder to copy than a value."""
        if fact not in self.facts:
            return "The text does not say."
        name, kind = fact
        return _capital(self.relations[kind].told[0].format(n=name, v=self.facts[fact]))

    def answer(self, fact: Fact, value: str) -> str:
        return "yes" if self.facts.get(fact) == value else "no"

    def who(self) -> tuple[str, str]:
        """A question for all that have a value, mostly one that is told, and its answer."""
        (_, kind), value = self.world.rng.choice(list(self.facts.items()))
        if self.world.rng.random() < 0.25:
            value = self.relations[kind].value(self.world)
        names = [name for (name, its), v in self.facts.items() if its == kind and v == value]
        nobody = "nobody" if self.relations is PERSON else "nothing"
        return self.relations[kind].who.format(v=value), " and ".join(names) or nobody


def yes_no_sample(world: World) -> Sample:
    """A text, then one to three questions about it."""
    return _sample(world, max_facts=6, max_questions=3, who=0.0)


def yes_no_stated_sample(world: World) -> Sample:
    """The same questions, each answered behind the fact that decides.

    Two easy steps for a hard one: the model finds a name's fact, then compares two values.
    """
    sample, story = Sample("yes_no_stated"), Story.make(world, 6)
    for turn in range(world.rng.randint(1, 3)):
        fact, value = story.pick()
        question = f"{story.question(fact, value)} State the fact, then answer yes or no."
        sample.user(question if turn else f"Text: {story.text}\n{question}")
        sample.reasoned_reply(story.statement(fact), story.answer(fact, value), choices=CHOICES)
    return sample


def yes_no_short_sample(world: World) -> Sample:
    """One fact and mostly one question: for training only.

    Here a model finds out that all hangs on whether the value was told. From longer texts alone it
    did not in tens of thousands of questions, though a probe of its fourth layer knew.
    """
    return _sample(world, max_facts=1, max_questions=world.rng.choice([1, 1, 4]), who=0.0)


def yes_no_many_sample(world: World) -> Sample:
    """Many questions about a text, some of them like "Who lives in Rome?": for training only.

    To find whom a value belongs to teaches what yes or no alone hardly does: to look for it.
    """
    return _sample(world, max_facts=world.rng.choice([1, 2, 4, 6]), max_questions=8, who=0.25)


def yes_no_pairs_sample(world: World) -> Sample:
    """Two to four facts of one kind, and every name with every value: for training only.

    Each value was told, so whom it belongs to is all that decides.
    """
    rng, relations = world.rng, _relations(world)
    kind = rng.choice(list(relations))
    names = _names(world, relations, rng.choice([2, 2, 2, 3, 4]))
    story = Story.of(world, relations, {(n, kind): relations[kind].value(world) for n in names})
    pairs = [((name, kind), value) for name in names for value in story.facts.values()]
    rng.shuffle(pairs)
    sample = Sample("yes_no")
    for turn, (fact, value) in enumerate(pairs[:8]):
        _ask(sample, story, fact, value, is_first=not turn)
    return sample


def _sample(world: World, max_facts: int, max_questions: int, who: float) -> Sample:
    sample, story = Sample("yes_no"), Story.make(world, max_facts)
    for turn in range(world.rng.randint(1, max_questions)):
        if world.rng.random() < who:
            question, answer = story.who()
            sample.user(question if turn else f"Text: {story.text}\n{question}")
            sample.reply(answer)
        else:
            _ask(sample, story, *story.pick(), is_first=not turn)
    return sample


def _ask(sample: Sample, story: Story, fact: Fact, value: str, is_first: bool) -> None:
    question = story.question(fact, value)
    form = story.world.rng.choice(["{q} Answer yes or no."] * 4 + ["Yes or no: {q}"])
    question = form.format(q=question)
    sample.user(f"Text: {story.text}\n{question}" if is_first else question)
    sample.reply(story.answer(fact, value), choices=CHOICES)


def _relations(world: World) -> dict[str, Relation]:
    return PERSON if world.rng.random() < 0.75 else EVENT


def _names(world: World, relations: dict[str, Relation], num: int) -> list[str]:
    """At most `num` that differ."""
    make = world.first_name if relations is PERSON else lambda: f"the {world.event()}"
    return list(dict.fromkeys(make() for _ in range(num)))


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]
