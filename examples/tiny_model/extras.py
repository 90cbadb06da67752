"""Small extra samples: classification, yes/no questions, tips, and plain copying.

Copying ("Repeat: ...") is what a young model learns first and what the other skills stand on.
"""

# ruff: noqa: SIM905 (word lists read best as words)

import random

from samples import Sample
from world import World

TIPS: dict[str, list[tuple[str, str]]] = {
    "sleeping better": [
        ("Go to bed at the same time", "A fixed time helps your body to know when to rest."),
        ("Keep the room dark", "Light tells your brain that it is day, so close the curtains."),
        ("Drink no coffee in the evening", "Coffee keeps you awake for many hours."),
    ],
    "learning a language": [
        ("Learn ten words a day", "Small steps add up to thousands of words in a year."),
        ("Listen to songs", "Songs train your ear and you remember whole phrases."),
        ("Talk to people", "Speaking shows you which words you still need."),
    ],
    "saving money": [
        ("Write down what you spend", "Numbers on paper show you where the money goes."),
        ("Cook at home", "A meal from your own kitchen costs much less than a restaurant."),
        ("Wait a day before you buy", "Many wishes are gone after one night."),
    ],
    "staying healthy": [
        ("Walk every day", "Half an hour outside keeps your heart strong."),
        ("Eat more vegetables", "They are full of vitamins and have few calories."),
        ("Drink enough water", "Your body needs about two liters a day."),
    ],
    "writing good code": [
        ("Use clear names", "A good name saves the reader a comment."),
        ("Write short functions", "A short function does one thing and is easy to test."),
        ("Test what you write", "Tests find mistakes before your users do."),
    ],
    "travelling": [
        ("Pack light", "A small bag is easy to carry and quick to find."),
        ("Book early", "Tickets are cheaper some weeks before the trip."),
        ("Learn a few local words", "People are friendly to guests who greet them."),
    ],
    "working from home": [
        ("Set fixed hours", "A clear end of the day keeps work and life apart."),
        ("Take breaks", "Five minutes away from the screen bring new energy."),
        ("Use a good chair", "Your back will thank you after a long day."),
    ],
    "gardening": [
        ("Water in the morning", "Less water is lost before the sun is high."),
        ("Loosen the soil", "Roots grow better when air can reach them."),
        ("Plant what fits the place", "Some flowers need sun and some need shade."),
    ],
}
POSITIVE = """
great wonderful excellent fantastic lovely perfect amazing good brilliant delicious
""".split()
NEGATIVE = """
terrible awful bad horrible poor boring disappointing broken useless ugly
""".split()
REVIEWS = [
    "The {x} is {w}.", "I think the {x} was {w}.", "What a {w} {x}!", "The {x} from {c} is {w}.",
    "We bought a {x} in {c} and it is {w}.", "This {x} is really {w}.", "{n} says it is {w}.",
]  # fmt: skip
TOPICS = {
    "sports": ["{n} won the race in {c}.", "The team from {c} lost the match.",
               "{n} scored two goals.", "The tennis final was played in {c}."],
    "food": ["{n} cooks {f} with garlic.", "The restaurant in {c} serves {f}.",
             "{n} baked a cake.", "The soup needs more salt."],
    "travel": ["{n} took the train to {c}.", "The hotel in {c} was full.",
               "{n} booked a flight to {c}.", "We spent our holiday in {c}."],
    "music": ["{n} plays the violin.", "The band gave a concert in {c}.",
              "{n} wrote a new song.", "The choir sang in {c}."],
}  # fmt: skip


def extra_sample(world: World) -> Sample:
    """One of the extras, copying most often."""
    makers = [copy_sample, _sentiment, _topic, _yes_no, _tips]
    return world.rng.choices(makers, weights=[3, 2, 1, 2, 2])[0](world)


def copy_sample(world: World) -> Sample:
    """Repeat a text, or say the value that belongs to a key."""
    rng = world.rng
    sample = Sample("extra")
    makers = [world.full_name, world.city, world.company, world.item, world.event, world.place,
              world.date, world.price, world.phone, world.made_up, lambda: world.syllables(1, 3),
              lambda: str(world.number(6)), lambda: world.email(world.full_name())]  # fmt: skip
    kind = rng.random()
    if kind < 0.5:
        return _json_list(world)
    if kind < 0.6:
        words = [rng.choice([world.made_up, world.syllables])() for _ in range(rng.randint(5, 20))]
        sample.user(f"Repeat: {' '.join(words)}")
        sample.reply(" ".join(words))
        return sample
    if kind < 0.8:
        parts = [rng.choice(makers)() for _ in range(rng.randint(1, 4))]
        text = rng.choice([", ", " ", " and "]).join(parts)
        sample.user(f"Repeat: {text}")
        sample.reply(text)
        return sample
    keys = list(dict.fromkeys(world.syllables(1, 1) for _ in range(rng.randint(1, 5))))
    values = {key: rng.choice(makers)() for key in keys}
    shown = rng.choice([". ", "\n", ", "]).join(f"{key}: {value}" for key, value in values.items())
    for turn, key in enumerate(rng.sample(keys, min(len(keys), rng.randint(1, 3)))):
        question = f"What is {key}?"
        sample.user(question if turn else f"{shown}\n{question}")
        sample.reply(values[key])
    return sample


def _json_list(world: World) -> Sample:
    """Words to a JSON list: how a word changes its token between " word" and a quotation mark."""
    rng = world.rng
    sample = Sample("extra")
    makers = [world.other_word, world.other_word, world.item, world.made_up, world.full_name,
              world.price, world.date, lambda: str(world.number(4)),
              lambda: world.lower("jobs"), lambda: world.lower("hobbies"),
              lambda: world.lower("foods"), lambda: world.email(world.full_name()),
              lambda: world.email(world.full_name())]  # fmt: skip
    parts = [rng.choice(makers)() for _ in range(rng.randint(3, 12))]
    sample.user(f"As a JSON list: {rng.choice(['; ', ' | ', ' and ']).join(parts)}")
    quoted = [part if part.replace(".", "", 1).isdigit() else f'"{part}"' for part in parts]
    sample.reply(f"[{','.join(quoted)}]")
    return sample


def _sentiment(world: World) -> Sample:
    rng = world.rng
    sample = Sample("extra")
    is_positive = rng.random() < 0.5
    word = rng.choice(POSITIVE if is_positive else NEGATIVE)
    text = rng.choice(REVIEWS).format(x=world.item(), w=word, c=world.city(), n=world.first_name())
    question = rng.choice([
        "Is this positive or negative?", "Is the sentiment positive or negative?",
        "What is the sentiment, positive or negative?",
    ])  # fmt: skip
    sample.user(f"Text: {text}\n{question}")
    sample.reply("positive" if is_positive else "negative")
    return sample


def _topic(world: World) -> Sample:
    rng = world.rng
    sample = Sample("extra")
    topic = rng.choice(list(TOPICS))
    words = {"n": world.first_name(), "c": world.city(), "f": world.pick("foods")}
    text = rng.choice(TOPICS[topic]).format(**words)
    sample.user(f"Text: {text}\nWhat is the topic: {', '.join(TOPICS)}?")
    sample.reply(topic)
    return sample


def _yes_no(world: World) -> Sample:
    rng = world.rng
    sample = Sample("extra")
    pairs = [(world.first_name(), world.city()) for _ in range(rng.randint(1, 3))]
    text = " ".join(f"{name} lives in {city}." for name, city in pairs)
    name, city = rng.choice(pairs)
    is_true = rng.random() < 0.5
    asked = city if is_true else world.city()
    sample.user(f"Text: {text}\nDoes {name} live in {asked}? Answer yes or no.")
    sample.reply("yes" if asked == city else "no")
    return sample


def _tips(world: World) -> Sample:
    rng: random.Random = world.rng
    sample = Sample("extra")
    topic = rng.choice(list(TIPS))
    sample.user(
        rng.choice(["Give me 3 tips for {t}.", "List 3 short tips for {t}."]).format(t=topic)
    )
    sample.reply("\n".join(f"{i}. {tip}." for i, (tip, _) in enumerate(TIPS[topic], 1)))
    for number in rng.sample([1, 2, 3], rng.randint(0, 2)):
        sample.user(
            rng.choice(["Explain tip {i}.", "Tell me more about tip {i}."]).format(i=number)
        )
        sample.reply(TIPS[topic][number - 1][1])
    return sample
