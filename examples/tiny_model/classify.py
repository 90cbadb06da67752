"""Samples of classification: a text, the classes to choose from, and one of them as the reply.

The words that decide (a "wonderful" soup) are the same in training and in held-out cases; names,
things and the texts as a whole are not.
"""

# ruff: noqa: SIM905 (word lists read best as words)

from collections.abc import Callable
from dataclasses import dataclass

from samples import Sample
from world import World, is_held_out

POSITIVE = """
great wonderful excellent fantastic lovely perfect amazing good brilliant delicious beautiful superb
pleasant nice impressive outstanding charming marvellous terrific splendid
""".split()
NEGATIVE = """
terrible awful bad horrible poor boring disappointing broken useless ugly dreadful dirty unpleasant
disgusting annoying miserable weak dull faulty nasty
""".split()
SUBJECTS = {
    "food": "soup cake pizza bread dinner lunch breakfast sauce salad dessert".split(),
    "travel": "hotel flight trip journey airport beach holiday train cruise hostel".split(),
    "music": "song concert album band choir singer orchestra melody violin opera".split(),
    "sports": "match team race player coach stadium goal tournament tennis training".split(),
}
REVIEWS = (
    "The {x} is {w}.", "I think the {x} was {w}.", "What a {w} {x}!", "The {x} from {c} is {w}.",
    "We saw a {x} in {c} and it is {w}.", "This {x} is really {w}.", "{n} says the {x} is {w}.",
    "The {x} in {c} was {w}.", "{n} had a {w} {x}.", "A {w} {x}, says {n}.",
    "It was a {w} {x} in {c}.", "{n} found the {x} {w}.", "The {x} of {n} was {w}.",
    "The {x} was very {w}, {n}.", "We had a {w} {x} in {c}.",
)  # fmt: skip
OPINIONS = {
    "positive": (
        "{n} loves the {x}.", "I like the {x} from {c} very much.", "I would buy the {x} again.",
        "{n} is happy with the {x}.", "The {x} works well, {n} says.", "Thank you {n} for the {x}!",
        "I enjoyed the {x} in {c}.", "{n} recommends the {x}."),
    "negative": (
        "{n} hates the {x}.", "I do not like the {x} from {c}.", "I would never buy the {x} again.",
        "{n} is not happy with the {x}.", "The {x} does not work, {n} says.",
        "I want my money back for the {x}, {n}.", "I regret the {x} in {c}.",
        "{n} complains about the {x}."),
    "neutral": (
        "{n} bought the {x} in {c}.", "The {x} is {k}.", "{n} has a {x}.", "The {x} is in {c}.",
        "The {x} costs {y} euros.", "{n} showed {m} the {x}.", "There is a {x} in {c}.",
        "{n} talks about the {x}."),
}  # fmt: skip
TOPICS = {
    "sports": (
        "{n} won the race in {c}.", "The team from {c} lost the match.", "{n} scored {y} goals.",
        "The tennis final was played in {c}.", "{n} runs a marathon in {c}.",
        "The coach of {c} is {n}.", "{n} plays football for {c}.", "{n} swam {y} meters."),
    "food": (
        "{n} cooks {f} with garlic.", "The restaurant in {c} serves {f}.", "{n} baked a cake.",
        "The soup of {n} needs more salt.", "{n} eats {f} for lunch.", "The kitchen smells of {f}.",
        "{n} orders {f} with salad.", "The recipe for {f} is from {n}."),
    "travel": (
        "{n} took the train to {c}.", "The hotel in {c} was full.", "{n} booked a flight to {c}.",
        "We spent our holiday in {c}.", "{n} packs a suitcase for {c}.", "{n} drove to {c}.",
        "The tourists visit {c}.", "{n} lost a passport in {c}."),
    "music": (
        "{n} plays the violin.", "The band gave a concert in {c}.", "{n} wrote a new song.",
        "The choir sang in {c}.", "{n} sings in the opera of {c}.", "{n} listens to {u}.",
        "The new album of {n} is {u}.", "The orchestra of {c} plays {u}."),
    "weather": (
        "It is raining in {c}.", "The sun shines in {c}.", "{n} says it will snow.",
        "A storm hit {c}.", "It is {y} degrees in {c}.", "There is fog over {c}.",
        "The wind in {c} is strong.", "{c} expects clouds and rain."),
    "money": (
        "{n} opened a bank account.", "The bank in {c} raised the interest.", "{n} paid the tax.",
        "{n} got a loan of {y} euros.", "Prices in {c} rose.", "{n} sold shares of {o}.",
        "The budget of {c} is too small.", "{o} made a profit."),
    "health": (
        "{n} has a fever.", "The doctor in {c} helped {n}.", "{n} takes a pill.",
        "The hospital in {c} is new.", "{n} broke a leg.", "The nurse gave {n} a vaccine.",
        "{n} has a headache.", "The patients in {c} are well."),
    "technology": (
        "{n} bought a new computer.", "{o} released a new phone.", "{n} writes software.",
        "The robot of {o} can walk.", "The internet in {c} is slow.", "{n} repaired the laptop.",
        "The app of {o} has a bug.", "{n} installed the update."),
}  # fmt: skip
SPAM = {
    "spam": (
        "You have won {y} dollars! Click here, {n}.", "Cheap pills from {c}, order now!",
        "{n}, claim your free {x} today!", "Earn {y} euros a day from home!",
        "Your account at {o} is blocked, send your password.", "Last chance, {n}: free {x}!",
        "Congratulations {n}, you are our winner!", "Get rich fast with {o}!"),
    "normal": (
        "Hi {n}, are we still meeting on {d}?", "{n}, the {x} is on your desk.",
        "Please send me the report by {d}, {n}.", "The meeting with {o} is in {c}.",
        "{n} asked for the address in {c}.", "I will be in {c} on {d}, {n}.",
        "Thanks for the {x}, {n}.", "Dear {n}, here is the invoice of {o}."),
}  # fmt: skip
URGENCY = {
    "urgent": (
        "{n}, call me at once!", "We need the {x} now, {n}.", "The server of {o} is down!",
        "Please help {n} immediately!", "There is a fire in {c}!", "{n} must answer today!",
        "Emergency: {n} is hurt.", "As soon as possible, {n}: the {x} is leaking."),
    "normal": (
        "{n}, call me when you have time.", "There is no hurry with the {x}, {n}.",
        "{o} will write some time next week.", "{n} may answer later.",
        "Let us meet in {c} one day.",
        "Whenever you like, {n}: bring the {x}.", "{n} can wait until {d}.",
        "Next month {n} goes to {c}."),
}  # fmt: skip
REQUESTS = {
    "billing": (
        "{n} was charged twice.", "The invoice for the {x} is wrong.", "I paid {y} euros too much.",
        "Please send {n} the invoice again.", "My card was charged by {o}.",
        "Why is the bill for the {x} so high?"),
    "delivery": (
        "Where is my {x}?", "The parcel for {n} has not arrived in {c}.", "When will the {x} come?",
        "The courier did not find {n} in {c}.", "My {x} is late.", "Please send the {x} to {c}."),
    "technical": (
        "The {x} does not start.", "{n} can not log in.", "The website of {o} shows an error.",
        "The app crashes when {n} opens it.", "The {x} makes a strange noise.",
        "How do I connect the {x}?"),
    "cancellation": (
        "{n} wants to cancel the order.", "Please cancel my contract with {o}.",
        "I no longer want the {x}.", "{n} would like to end the subscription.",
        "Please stop the order for the {x}.", "Cancel the {x} for {n}, please."),
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A text and the class that it belongs to, drawn from `texts`, and ways to ask for it.

    `{l}` in a question is the list of classes with commas, `{r}` the same with "or".
    """

    classes: tuple[str, ...]
    text: Callable[[World, str], str]
    questions: tuple[str, ...]
    is_open: bool = False  # any subset of the classes may be listed, in any order


def _review(world: World, wanted: str) -> str:
    rng = world.rng
    if rng.random() < 0.3 or wanted == "neutral":
        form = rng.choice(OPINIONS[wanted])
    else:
        form = rng.choice(REVIEWS)
        is_denied = "is {w}" in form and rng.random() < 0.15
        words = POSITIVE if (wanted == "positive") != is_denied else NEGATIVE
        form = form.replace("is {w}", "is not {w}") if is_denied else form
        form = form.replace("{w}", rng.choice(words))
    is_thing = rng.random() < 0.5
    return _fill(world, form, None if is_thing else rng.choice(SUBJECTS[rng.choice([*SUBJECTS])]))


def _topical(world: World, topic: str) -> str:
    rng = world.rng
    if topic not in SUBJECTS or rng.random() < 0.6:
        return _fill(world, rng.choice(TOPICS[topic]))
    form = rng.choice(REVIEWS).replace("{w}", rng.choice(POSITIVE + NEGATIVE))
    return _fill(world, form, rng.choice(SUBJECTS[topic]))


def _from(texts: dict[str, tuple[str, ...]]) -> Callable[[World, str], str]:
    return lambda world, wanted: _fill(world, world.rng.choice(texts[wanted]))


TASKS = (
    Task(("positive", "negative"), _review, (
        "Is this positive or negative?", "Is the sentiment positive or negative?",
        "What is the sentiment, positive or negative?", "Is the review positive or negative?",
        "Classify the sentiment: positive, negative.", "Sentiment: {r}?")),
    Task(("positive", "negative", "neutral"), _review, (
        "Is this {r}?", "Is the sentiment {r}?", "Classify the sentiment: {l}.",
        "What is the sentiment: {l}?")),
    Task(tuple(TOPICS), _topical, (
        "What is the topic: {l}?", "What is the topic: {l}?", "Which topic is this: {l}?",
        "Is the topic {r}?", "Classify the topic: {l}."), is_open=True),
    Task(tuple(SPAM), _from(SPAM), (
        "Is this message spam or normal?", "Is this {r}?", "Classify the message: {l}.")),
    Task(tuple(URGENCY), _from(URGENCY), (
        "Is this message urgent or normal?", "Is this {r}?", "Classify the message: {l}.")),
    Task(tuple(REQUESTS), _from(REQUESTS), (
        "What is the request about: {l}?", "Is this about {r}?", "Classify the request: {l}."),
        is_open=True),
)  # fmt: skip


def classify_sample(world: World, max_texts: int = 2) -> Sample:
    """One to `max_texts` texts, each with its question."""
    rng = world.rng
    sample = Sample("classify")
    for _ in range(rng.randint(1, max_texts)):
        task = rng.choices(TASKS, weights=[4, 2, 5, 2, 2, 3])[0]
        wanted = rng.choice(task.classes)
        classes = _listed(task, wanted, world)
        question = rng.choice(task.questions)
        either = f"{', '.join(classes[:-1])} or {classes[-1]}"
        sample.user(f"Text: {_text(task, wanted, world)}\n" + question.format(
            l=", ".join(classes), r=either))  # fmt: skip
        sample.reply(wanted, choices=classes)
    return sample


def _text(task: Task, wanted: str, world: World) -> str:
    """A text of the class `wanted` on this world's side of the split."""
    while True:
        text = task.text(world, wanted)
        if is_held_out(text) == world.held_out:
            return text


def _listed(task: Task, wanted: str, world: World) -> list[str]:
    """The classes as the question lists them: for an open task some of them, `wanted` included."""
    rng = world.rng
    if not task.is_open:
        return rng.sample(task.classes, len(task.classes))
    if rng.random() < 0.3 and wanted in task.classes[:4]:
        return list(task.classes[:4])
    others = [name for name in task.classes if name != wanted]
    chosen = [wanted, *rng.sample(others, rng.randint(1, min(5, len(others))))]
    return rng.sample(chosen, len(chosen))


def _fill(world: World, form: str, thing: str | None = None) -> str:
    return form.format(
        n=world.first_name(), m=world.first_name(), c=world.city(), o=world.company(),
        f=world.pick("foods"), u=world.pick("music"), k=world.pick("colours"), y=world.number(3),
        x=thing or world.item(), d=world.weekday(),
    )  # fmt: skip
