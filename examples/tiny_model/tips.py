"""Samples of listing tips on a topic and expanding one of them.

A topic is a fixed one or made of a form and a thing ("visiting Velmora"). The first `n` tips of a
topic are the list of `n`; what a tip is expanded to is a function of the tip. Held out are the
names and, whole, the first messages ("List 4 tips on cooking pizza.").
"""

from collections.abc import Callable
from dataclasses import dataclass

from samples import Sample
from world import World, is_held_out, with_article

Tip = tuple[str, str]  # in a few words, and explained


@dataclass(frozen=True)
class Family:
    """Topics of one form; `{x}` is the thing and `{a}` the thing with its article."""

    topic: str
    thing: Callable[[World], str]
    tips: tuple[Tip, ...]


FIXED: dict[str, tuple[Tip, ...]] = {
    "sleeping better": (
        ("Go to bed at the same time", "A fixed time helps your body to know when to rest."),
        ("Keep the room dark", "Light tells your brain that it is day, so close the curtains."),
        ("Drink no coffee in the evening", "Coffee keeps you awake for many hours."),
    ),
    "learning a language": (
        ("Learn ten words a day", "Small steps add up to thousands of words in a year."),
        ("Listen to songs", "Songs train your ear and you remember whole phrases."),
        ("Talk to people", "Speaking shows you which words you still need."),
    ),
    "saving money": (
        ("Write down what you spend", "Numbers on paper show you where the money goes."),
        ("Cook at home", "A meal from your own kitchen costs much less than a restaurant."),
        ("Wait a day before you buy", "Many wishes are gone after one night."),
    ),
    "staying healthy": (
        ("Walk every day", "Half an hour outside keeps your heart strong."),
        ("Eat more vegetables", "They are full of vitamins and have few calories."),
        ("Drink enough water", "Your body needs about two liters a day."),
    ),
    "writing good code": (
        ("Use clear names", "A good name saves the reader a comment."),
        ("Write short functions", "A short function does one thing and is easy to test."),
        ("Test what you write", "Tests find mistakes before your users do."),
    ),
    "travelling": (
        ("Pack light", "A small bag is easy to carry and quick to find."),
        ("Book early", "Tickets are cheaper some weeks before the trip."),
        ("Learn a few local words", "People are friendly to guests who greet them."),
    ),
    "working from home": (
        ("Set fixed hours", "A clear end of the day keeps work and life apart."),
        ("Take breaks", "Five minutes away from the screen bring new energy."),
        ("Use a good chair", "Your back will thank you after a long day."),
    ),
    "gardening": (
        ("Water in the morning", "Less water is lost before the sun is high."),
        ("Loosen the soil", "Roots grow better when air can reach them."),
        ("Plant what fits the place", "Some flowers need sun and some need shade."),
    ),
    "giving a talk": (
        ("Know your first sentence", "A sure start calms you for all that follows."),
        ("Look at the people", "A talk is for the listeners, not for the screen."),
        ("Speak slowly", "A short pause gives everyone time to think."),
    ),
    "taking photos": (
        ("Look for good light", "Soft light in the morning makes every picture better."),
        ("Get closer", "A picture of one thing says more than a picture of ten."),
        ("Hold the camera still", "A calm hand or a wall keeps the picture sharp."),
    ),
}  # fmt: skip
FAMILIES = (
    Family("visiting {x}", World.city, (
        ("Book a room in {x} early", "The rooms in {x} are cheaper some weeks before the trip."),
        ("Walk through {x} on foot", "You see more of {x} than from a bus."),
        ("Try the food of {x}", "A small restaurant shows you how people in {x} live."),
        ("Take a map of {x} with you", "A map helps you to find the way back to your hotel."),
        ("Ask the people of {x}", "Those who live in {x} know the best places."))),
    Family("cooking {x}", lambda world: world.pick("foods"), (
        ("Buy fresh food for the {x}", "Good {x} begins at the market."),
        ("Read the recipe first", "Then nothing is missing when you cook the {x}."),
        ("Taste the {x} often", "A little salt at the right time makes the {x} better."),
        ("Take your time", "Good {x} can not be made in a hurry."),
        ("Share the {x} with friends", "Every meal tastes better together."))),
    Family("learning {x}", lambda world: world.pick("hobbies"), (
        ("Find a teacher for {x}", "A teacher sees mistakes that you do not see."),
        ("Practise {x} every week", "Many short hours bring you further than one long day."),
        ("Watch others at {x}", "You learn {x} with your eyes, too."),
        ("Start {x} with easy things", "Small steps keep {x} a pleasure."),
        ("Write down your progress", "It shows you how far you have come with {x}."))),
    Family("buying {a}", World.item, (
        ("Compare prices", "The same {x} often costs less in another shop."),
        ("Look at the {x} closely", "A good {x} has no scratches and nothing loose."),
        ("Ask for a discount", "Many shops sell {a} for less if you ask."),
        ("Keep the bill for the {x}", "Without the bill you can not bring {a} back."),
        ("Read what others say", "People who have {a} know what is wrong with it."))),
    Family("keeping {a}", lambda world: world.pick("pets"), (
        ("Give the {x} enough room", "A small place makes every {x} unhappy."),
        ("Feed the {x} on time", "Fixed hours are good for {a}."),
        ("Visit a vet with the {x}", "A vet sees early when {a} is ill."),
        ("Play with the {x}", "A bored {x} gets into trouble."),
        ("Keep the home of the {x} clean", "Fresh water and a clean place keep {a} healthy."))),
    Family("working as {a}", lambda world: world.pick("jobs"), (
        ("Learn from another {x}", "An old {x} knows what no book tells you."),
        ("Keep your tools in order", "A good {x} finds everything in the dark."),
        ("Ask when you are not sure", "A question costs {a} less than a mistake."),
        ("Plan your day", "A plan gives {a} time for what matters."),
        ("Take breaks", "A tired {x} works slowly."))),
    Family("writing to {x}", World.first_name, (
        ("Begin with a greeting", "A friendly word makes {x} read on."),
        ("Say what you want from {x}", "Then {x} knows at once what to do."),
        ("Keep it short", "A long letter stays on the desk of {x}."),
        ("Read it again", "A mistake is easy to see before {x} sees it."),
        ("Thank {x} at the end", "Then {x} will be glad to answer."))),
    Family("planning {a}", lambda world: world.pick("events"), (
        ("Choose a date for the {x}", "With a date, the guests of the {x} can plan, too."),
        ("Write a list of guests", "It tells you how large the {x} will be."),
        ("Find a place for the {x}", "A good place is half of {a}."),
        ("Ask friends for help", "Nobody can do {a} alone."),
        ("Think about the weather", "Rain can end {a} that has no roof."))),
)  # fmt: skip
COUNT_WORDS = {2: "two", 3: "three", 4: "four", 5: "five"}
LIST = (
    "Give me {n} tips for {t}.", "Give me {n} tips for {t}.", "List {n} short tips for {t}.",
    "Name {n} tips for {t}.", "What are {n} tips for {t}?", "{n} tips for {t}, please.",
    "Give me {n} tips on {t}.", "List {n} tips on {t}.", "I need {n} tips for {t}.",
)  # fmt: skip
EXPLAIN = (
    "Explain tip {i}.", "Explain tip {i}.", "Tell me more about tip {i}.", "Why tip {i}?",
    "Say more about tip {i}.", "What do you mean by tip {i}?", "Explain tip number {i}.",
)  # fmt: skip
EXPAND = (
    "Expand tip {i} into a paragraph.", "Expand tip {i}.", "Write a paragraph about tip {i}.",
    "Now, expand tip {i} into a paragraph.",
)  # fmt: skip
EXPLAIN_GIVEN = ("Explain this tip for {t}: {tip}.", "Topic: {t}\nTip: {tip}.\nExplain the tip.")
EXPAND_GIVEN = (
    "Expand this tip for {t} into a paragraph: {tip}.",
    "Topic: {t}\nTip: {tip}.\nExpand the tip into a paragraph.",
)


def tips_sample(world: World) -> Sample:
    """A list of tips with some of them expanded, or one given tip that is expanded."""
    while True:
        sample = _given(world) if world.rng.random() < 0.2 else _listed(world)
        if is_held_out(sample.messages("user")[0]) == world.held_out:
            return sample


def _given(world: World) -> Sample:
    sample = Sample("tips")
    topic, tips = _topic(world)
    _expand(sample, world, world.rng.choice(tips), EXPLAIN_GIVEN, EXPAND_GIVEN, t=topic)
    return sample


def _listed(world: World) -> Sample:
    rng = world.rng
    sample = Sample("tips")
    topic, tips = _topic(world)
    n = rng.choice([3, 3, rng.randint(2, len(tips))])
    question = rng.choice(LIST).format(n=n if rng.random() < 0.7 else COUNT_WORDS[n], t=topic)
    sample.user(question[0].upper() + question[1:])
    sample.reply("\n".join(f"{i}. {tip}." for i, (tip, _) in enumerate(tips[:n], 1)))
    for i in rng.sample(range(n), rng.randint(0, n)):
        _expand(sample, world, tips[i], EXPLAIN, EXPAND, i=str(i + 1))
    return sample


def _expand(
    sample: Sample,
    world: World,
    tip: Tip,
    explain: tuple[str, ...],
    expand: tuple[str, ...],
    **words: str,
) -> None:
    """Ask for `tip` to be explained, or expanded, which is the tip itself and the explanation."""
    short, detail = tip
    is_expanded = world.rng.random() < 0.4
    form = world.rng.choice(expand if is_expanded else explain)
    sample.user(form.format(tip=short, **words))
    sample.reply(f"{short}. {detail}" if is_expanded else detail)


def _topic(world: World) -> tuple[str, list[Tip]]:
    if world.rng.random() < 0.3:
        topic = world.rng.choice(list(FIXED))
        return topic, list(FIXED[topic])
    family = world.rng.choice(FAMILIES)
    thing = family.thing(world)
    words = {"x": thing, "a": with_article(thing)}
    tips = [(tip.format(**words), detail.format(**words)) for tip, detail in family.tips]
    return family.topic.format(**words), tips
