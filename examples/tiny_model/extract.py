"""Samples of JSON extraction: a text, an instruction, and a compact JSON object.

Values are copied verbatim; numbers (`NUMBERS`) are unquoted; a field that the text does not
mention is null.
"""

# ruff: noqa: SIM905 (word lists read best as words)

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from samples import Sample
from world import World

SYSTEMS = [
    "You turn texts into JSON.",
    "You extract data from texts.",
    "Answer with JSON only.",
    "You are a data extraction assistant. Answer with one JSON object.",
]
NUMBERS = {"age", "quantity", "price", "guests"}
ORDER = {
    "person": ["name", "age", "city", "job", "company", "hobby", "email", "phone"],
    "order": ["order_id", "customer", "item", "quantity", "price", "date", "city"],
    "event": ["event", "place", "city", "date", "time", "host", "guests"],
}
OPENERS = {
    "person": [
        "{name} is {age} years old.",
        "{name} is {age} years old and lives in {city}.",
        "{name} is {age} and works as a {job}.",
        "{name}, {age}, lives in {city}.",
        "{name} ({age}) lives in {city}.",
        "{name} ({age}) works as a {job} at {company}.",
        "{name}, a {age}-year-old {job}, lives in {city}.",
        "{name}, a {job} from {city}, is {age} years old.",
        "{name} lives in {city}.",
        "{name} comes from {city}.",
        "{name} works as a {job}.",
        "{name} is a {job}.",
        "{name} is a {job} at {company}.",
        "{name} works for {company}.",
        "{name} works at {company} in {city}.",
        "{name} is a {job} from {city}.",
        "{name} likes {hobby}.",
        "{name} loves {hobby} and lives in {city}.",
        "My name is {name} and I am {age} years old.",
        "My name is {name}. I live in {city}.",
        "I am {name}, {age} years old, and I live in {city}.",
        "I am {name} and I work as a {job}.",
        "Meet {name}, {age}, from {city}.",
        "Meet {name}, a {job} at {company}.",
        "This is {name} from {company}.",
        "This is {name}, a {job} in {city}.",
        "At {age}, {name} works as a {job} in {city}.",
        "In {city} lives {name}, who is {age} years old.",
        "Our new {job} is {name}.",
        "Our new colleague {name} is {age} years old.",
        "{company} has hired {name} as a {job}.",
        "{company} has a new {job}, {name}.",
        "You can reach {name} at {email}.",
        "{name} has the phone number {phone}.",
        "Please contact {name} ({email}).",
        "Please call {name} at {phone}.",
    ],
    "order": [
        "{customer} ordered {quantity} {item}s.",
        "{customer} ordered {quantity} pieces of {item} on {date}.",
        "{customer} bought a {item} for {price} dollars.",
        "{customer} bought {quantity} units of {item} for {price} euros each.",
        "{customer} from {city} ordered a {item}.",
        "{customer} from {city} bought {quantity} x {item}.",
        "Order {order_id}: {quantity} x {item} for {customer}.",
        "Order {order_id} by {customer}: {quantity} x {item} at ${price}.",
        "Order {order_id} was placed by {customer} on {date}.",
        "On {date}, {customer} ordered {quantity} x {item}.",
        "On {date} we got order {order_id} from {customer}.",
        "We received an order from {customer}.",
        "We received order {order_id} from {customer} in {city}.",
        "Please send {quantity} x {item} to {customer} in {city}.",
        "Please send one {item} to {customer}.",
        "{customer} would like to buy {quantity} x {item}.",
        "{customer} wants {quantity} x {item} at {price} dollars each.",
        "A {item} was sold to {customer} for {price} euros.",
        "The customer {customer} paid {price} dollars for a {item}.",
        "The customer is {customer}.",
        "Customer: {customer}, item: {item}, quantity: {quantity}.",
    ],
    "event": [
        "The {event} takes place at the {place}.",
        "The {event} takes place in {city} on {date}.",
        "The {event} takes place on {date} at {time}.",
        "The {event} is on {date} at {time} in the {place}.",
        "The {event} starts at {time} on {date}.",
        "The {event} will be held at the {place} in {city}.",
        "The {event} will be held in {city}.",
        "The {event} at the {place} starts at {time}.",
        "Join us for the {event} on {date}.",
        "Join us for the {event} at the {place} at {time}.",
        "Come to the {event} in {city} on {date}.",
        "You are invited to the {event} at the {place}.",
        "You are invited to the {event} on {date} at {time}.",
        "{host} invites you to the {event} on {date}.",
        "{host} invites you to the {event} in {city}.",
        "{host} hosts the {event} at the {place} in {city}.",
        "{host} organizes the {event}.",
        "On {date} at {time}, the {event} begins in {city}.",
        "On {date}, {city} hosts the {event}.",
        "Do not miss the {event} with {host}.",
        "Our {event} is on {date}.",
        "The {event} starts at {time}.",
        "We are looking forward to the {event}.",
        "We are planning the {event} for {guests} guests.",
    ],
}
FOLLOWERS = {
    "person": [
        "{He} is {age} years old.",
        "{He} turned {age} last week.",
        "{He} is {age}.",
        "{He} lives in {city}.",
        "{He} has lived in {city} for years.",
        "{His} home is in {city}.",
        "{He} moved to {city} some time ago.",
        "{first} lives in {city}.",
        "{first} is {age} years old.",
        "{He} works as a {job}.",
        "{He} is a {job}.",
        "{He} is a {job} by profession.",
        "{first} works as a {job} in {city}.",
        "{He} earns money as a {job}.",
        "{He} works for {company}.",
        "{He} works at {company}.",
        "{His} employer is {company}.",
        "{He} is a {job} at {company}.",
        "{He} has a job at {company}.",
        "{His} hobby is {hobby}.",
        "{He} likes {hobby}.",
        "{He} loves {hobby}.",
        "In {his} free time {he} enjoys {hobby}.",
        "{first} spends the weekends with {hobby}.",
        "{He} can be reached at {email}.",
        "{His} email is {email}.",
        "{His} email address is {email}.",
        "Write to {email}.",
        "{His} phone number is {phone}.",
        "{He} can be called at {phone}.",
        "Phone: {phone}.",
        "{He} lives in {city} and likes {hobby}.",
        "{He} works as a {job} and loves {hobby}.",
        "{His} email is {email} and {his} phone number is {phone}.",
    ],
    "order": [
        "The order number is {order_id}.",
        "The order has the number {order_id}.",
        "It is order {order_id}.",
        "Order number: {order_id}.",
        "The price is {price} dollars.",
        "Each one costs {price} euros.",
        "The price was {price} euros.",
        "It costs ${price}.",
        "The total is {price} dollars.",
        "The order was placed on {date}.",
        "It was ordered on {date}.",
        "The date of the order is {date}.",
        "We shipped it on {date}.",
        "It will be delivered to {city}.",
        "It goes to {city}.",
        "The delivery address is in {city}.",
        "Please ship it to {city}.",
        "The item is a {item}.",
        "The ordered item is: {item}.",
        "The product is a {item}.",
        "The quantity is {quantity}.",
        "The customer wants {quantity} of them.",
        "{quantity} pieces were ordered.",
        "It will arrive in {city} on {date}.",
        "The price for {quantity} pieces is {price} dollars.",
    ],
    "event": [
        "It takes place at the {place}.",
        "The place is the {place}.",
        "We meet at the {place}.",
        "It takes place in {city}.",
        "It will be in {city}.",
        "The venue is the {place} in {city}.",
        "It is on {date}.",
        "The date is {date}.",
        "It will take place on {date}.",
        "It starts at {time}.",
        "It begins at {time}.",
        "Doors open at {time}.",
        "We start at {time}.",
        "It starts on {date} at {time}.",
        "The host is {host}.",
        "It is organized by {host}.",
        "{host} will be the host.",
        "{host} is the organizer.",
        "{guests} guests are expected.",
        "We expect {guests} guests.",
        "There is room for {guests} guests.",
        "About {guests} people will come.",
    ],
}
DISTRACTORS = {
    "person": [
        "{His} brother {other} lives in {town}.",
        "{His} sister {other} is {n} years old.",
        "{His} best friend is called {other}.",
        "{His} neighbour {other} has a {pet}.",
        "{He} has a {pet} named {other}.",
        "{He} has {n} cousins.",
        "{He} often travels to {town}.",
        "{He} was born in {town}.",
        "{He} has read {n} books this year.",
        "The weather was nice yesterday.",
        "{He} is a very friendly person.",
        "{He} likes to eat {food}.",
        "{He} would like to visit {town} one day.",
        "{His} favourite colour is {colour}.",
        "{He} was happy about that.",
    ],
    "order": [
        "The invoice will follow by email.",
        "The parcel weighs {n} kg.",
        "{other} will check the order.",
        "Delivery takes {n} days.",
        "The package is {colour}.",
        "The warehouse is in {town}.",
        "Please handle it with care.",
        "The order is a gift for {other}.",
        "Thank you for your trust.",
        "Payment was made by card.",
    ],
    "event": [
        "There will be {food} for everyone.",
        "Tickets cost {n} euros.",
        "{other} will take photos.",
        "Last year it was in {town}.",
        "Please bring a friend.",
        "Everybody is welcome.",
        "The doors close {n} minutes later.",
        "The hall is painted {colour}.",
        "Music will be played by {other}.",
        "Registration is not required.",
    ],
}
FORM_KEYS = """
colour size weight height width price name title author year country language brand model material
owner status score level rank room floor street code number amount total date day month time place
city team coach player school teacher subject grade captain ship port flight gate seat driver car
engine speed distance file folder version user password color animal breed food drink dish taste
doctor patient disease symptom medicine dose hospital bank account currency balance product stock
supplier client project deadline budget task manager office department song singer album genre movie
director actor rating book publisher pages plant river mountain lake planet moon station line
""".split()
LISTED_INSTRUCTIONS = [
    "Extract {f} as JSON.",
    "Extract {f} as JSON.",
    "Extract {f} as JSON.",
    "Extract {f} as JSON.",
    "Give me {f} as JSON.",
    "Return {f} as JSON.",
    "Extract {f} from the text as JSON.",
    "Extract {f} in JSON.",
    "Find {f} and answer with JSON.",
]
FIRST_INSTRUCTIONS = [
    "Extract {f} as JSON: {t}",
    "Extract {f} as JSON: {t}",
    "Extract {f} as JSON.\nText: {t}",
    "Extract {f} as JSON from this text: {t}",
    "Return {f} as JSON: {t}",
]
LATER_INSTRUCTIONS = [
    "Now extract {f} as JSON.",
    "Extract {f} as JSON.",
    "Now {f}.",
    "And {f} as JSON?",
    "Extract {f} too.",
]
WHOLE_INSTRUCTIONS = [
    "Extract the {k} as JSON.",
    "Extract the {k} as JSON.",
    "Return the {k} as JSON.",
    "Turn the {k} into JSON.",
]


@dataclass(frozen=True)
class Story:
    """A text about one person, order or event, and the values that it mentions."""

    kind: str
    text: str
    values: dict[str, str]


def extract_sample(world: World) -> Sample:
    """A text about a person, an order or an event; 3 to 6 fields that it tells are asked for.

    Sometimes later turns ask for other fields of the same text.
    """
    rng = world.rng
    sample = Sample("extract")
    if rng.random() < 0.2:
        sample.system(rng.choice(SYSTEMS))
    story = make_story(world)
    while len(story.values) < 3:
        story = make_story(world)
    if rng.random() < 0.08 and len(story.values) <= 6:
        _whole_turn(sample, story, rng)
    else:
        size = min(rng.choice([3, 3, 4, 4, 5, 6]), len(story.values))
        _listed_turn(sample, story, rng, rng.sample(list(story.values), size))
    for _ in range(rng.randint(1, 3) if rng.random() < 0.3 else 0):
        fields = rng.sample(list(story.values), rng.randint(1, 3))
        sample.user(rng.choice(LATER_INSTRUCTIONS).format(f=join_fields(fields, rng)))
        sample.reply(to_json(story, fields), json_schema=schema_of(story, fields))
    return sample


def extract_many_sample(world: World) -> Sample:
    """Any text, also mere lists of keys and values, any fields, also missing ones, and many
    instructions: for training only, much to learn from for its length."""
    sample = Sample("extract")
    _extract(sample, world, num_later=world.rng.randint(2, 4), max_fields=5, forms=0.2)
    return sample


def extract_whole_sample(world: World) -> Sample:
    """All that a text tells, for training only: which fields it does not tell is hard to learn."""
    sample = Sample("extract")
    for _ in range(world.rng.randint(1, 2)):
        _whole_turn(sample, make_story(world), world.rng)
    return sample


def _extract(
    sample: Sample, world: World, num_later: int, max_fields: int, forms: float = 0.12
) -> None:
    """A turn with a text, and `num_later` turns that ask for other fields of it.

    `forms` is the share of texts that are mere lists of keys and values.
    """
    rng = world.rng
    story = make_form(world) if rng.random() < forms else make_story(world)
    _first_turn(sample, story, rng)
    for _ in range(num_later):
        fields = choose_fields(story, rng, rng.randint(1, max_fields))
        sample.user(rng.choice(LATER_INSTRUCTIONS).format(f=join_fields(fields, rng)))
        sample.reply(to_json(story, fields), json_schema=schema_of(story, fields))


def make_story(world: World, num_fields: int | None = None) -> Story:
    """Sentences drawn until each chosen field is told, distractors in between."""
    rng = world.rng
    kind = rng.choices(list(ORDER), weights=[5, 3, 3])[0]
    values = _values(world, kind)
    key = {"person": "name", "order": "customer", "event": "event"}[kind]
    size = num_fields or rng.choice([2, 3, 3, 4, 4, 5, 5, 6, 6, 7])
    names = [name for name in ORDER[kind] if name != "email" or rng.random() < 0.25]
    wanted = set(rng.sample(names, min(size, len(names)))) | {key}
    words = dict(values, **_extra_words(world, values))
    opener = _draw(rng, OPENERS[kind], wanted)
    told = _slots(opener, values)
    body = []
    while wanted - told and len(body) < 6:
        sentence = _draw(rng, FOLLOWERS[kind], wanted - told)
        told |= _slots(sentence, values)
        body.append(sentence)
    rng.shuffle(body)
    for _ in range(rng.choice([0, 0, 0, 1, 1, 2])):
        body.insert(rng.randint(0, len(body)), rng.choice(DISTRACTORS[kind]))
    words |= _pronouns(rng, opener)
    text = _fix_articles(" ".join(s.format(**words) for s in [opener, *body]))
    return Story(kind, text, {name: values[name] for name in ORDER[kind] if name in told})


def make_form(world: World) -> Story:
    """A text of keys and values: names, words and numbers under any of many keys."""
    rng = world.rng
    keys = rng.sample(FORM_KEYS, rng.randint(2, 7))
    if rng.random() < 0.3:
        keys[0] = world.syllables(1, 2)
    makers: list[Callable[[], str]] = [
        world.made_up, world.full_name, world.city, lambda: world.lower("items"),
        lambda: str(world.number(4)), world.date, world.price, lambda: world.syllables(1, 2),
    ]  # fmt: skip
    values = {key: rng.choice(makers)() for key in keys}
    form, joint = rng.choice([
        ("{k}: {v}", ", "), ("{k}: {v}", "\n"), ("The {k} is {v}.", " "), ("{k} = {v}", "; "),
        ("- {k}: {v}", "\n"), ("The {k} is {v}", " and "), ("{k} {v}", ", "),
    ])  # fmt: skip
    upper = rng.random() < 0.3 and form[0] == "{"
    shown = [form.format(k=k.capitalize() if upper else k, v=v) for k, v in values.items()]
    return Story("data", joint.join(shown), values)


def choose_fields(story: Story, rng: random.Random, size: int) -> list[str]:
    """`size` fields in random order, mostly such as the text tells."""
    told = list(story.values)
    fields = rng.sample(told, min(size, len(told)))
    rest = [name for name in ORDER.get(story.kind, FORM_KEYS[:9]) if name not in story.values]
    if rest and rng.random() < 0.05:
        fields[rng.randrange(len(fields))] = rng.choice(rest)
    return fields


def join_fields(fields: list[str], rng: random.Random) -> str:
    if len(fields) == 1 or rng.random() < 0.6:
        return ", ".join(fields)
    return ", ".join(fields[:-1]) + " and " + fields[-1]


def to_json(story: Story, fields: list[str]) -> str:
    """The compact object; numbers stand as they are written in the text."""
    return "{" + ",".join(f'"{name}":{_value(story, name)}' for name in fields) + "}"


def schema_of(story: Story, fields: list[str]) -> dict[str, Any]:
    """Of an object with these fields in this order; the type of a field of "data" is open."""
    return {
        "type": "object",
        "properties": {name: {"type": _types(story, name)} for name in fields},
        "required": fields,
        "additionalProperties": False,
    }


def _types(story: Story, name: str) -> list[str]:
    if story.kind == "data":
        return ["string", "number", "null"]
    return ["number" if name in NUMBERS else "string", "null"]


def _value(story: Story, name: str) -> str:
    if name not in story.values:
        return "null"
    value = story.values[name]
    is_number = name in NUMBERS if story.kind != "data" else value.replace(".", "", 1).isdigit()
    return value if is_number else json.dumps(value)


def _first_turn(sample: Sample, story: Story, rng: random.Random) -> None:
    """The text with the first instruction, and the reply."""
    if rng.random() < 0.1:
        _whole_turn(sample, story, rng)
    else:
        fields = choose_fields(story, rng, rng.choice([1, 2, 3, 3, 4, 4, 5, 5, 6]))
        _listed_turn(sample, story, rng, fields)


def _whole_turn(sample: Sample, story: Story, rng: random.Random) -> None:
    """All that the text tells, in the canonical order of fields."""
    instruction = rng.choice(WHOLE_INSTRUCTIONS).format(k=story.kind)
    sample.user(f"Text: {story.text}\n{instruction}")
    sample.reply(to_json(story, list(story.values)))


def _listed_turn(sample: Sample, story: Story, rng: random.Random, fields: list[str]) -> None:
    """The fields that are asked for, in the order in which they are."""
    listed = join_fields(fields, rng)
    if rng.random() < 0.25:
        sample.user(rng.choice(FIRST_INSTRUCTIONS).format(f=listed, t=story.text))
    else:
        form = rng.choice(LISTED_INSTRUCTIONS)
        sample.user(f"Text: {story.text}\n{form.format(f=listed)}")
    sample.reply(to_json(story, fields), json_schema=schema_of(story, fields))


def _values(world: World, kind: str) -> dict[str, str]:
    rng = world.rng
    if kind == "person":
        name = world.full_name() if rng.random() < 0.8 else world.first_name()
        return {
            "name": name,
            "age": str(rng.randint(2, 99)),
            "city": world.city(),
            "job": world.lower("jobs"),
            "company": world.company(),
            "hobby": world.lower("hobbies"),
            "email": world.email(name),
            "phone": world.phone(),
        }
    if kind == "order":
        letters = "".join(rng.choice("ABCDEFGHKLMNPRSTXZ") for _ in range(rng.randint(0, 2)))
        dash = "-" if letters and rng.random() < 0.5 else ""
        return {
            "order_id": f"{letters}{dash}{rng.randint(100, 99999)}",
            "customer": world.company() if rng.random() < 0.25 else world.full_name(),
            "item": world.item(),
            "quantity": str(world.number(3)),
            "price": world.price(),
            "date": world.date(),
            "city": world.city(),
        }
    return {
        "event": world.event(),
        "place": world.place(),
        "city": world.city(),
        "date": world.date(),
        "time": world.time(),
        "host": world.company() if rng.random() < 0.3 else world.full_name(),
        "guests": str(world.number(3)),
    }


def _extra_words(world: World, values: dict[str, str]) -> dict[str, str]:
    return {
        "first": values.get("name", "").split(" ")[0],
        "other": world.first_name(),
        "town": world.city(),
        "n": str(world.rng.randint(2, 90)),
        "pet": world.pick("pets"),
        "food": world.pick("foods"),
        "colour": world.pick("colours"),
    }


def _pronouns(rng: random.Random, opener: str) -> dict[str, str]:
    if "I " in opener or "My " in opener:
        return {"He": "I", "he": "I", "His": "My", "his": "my"}
    he, his = rng.choice([("he", "his"), ("she", "her")])
    return {"He": he.capitalize(), "he": he, "His": his.capitalize(), "his": his}


def _fix_articles(text: str) -> str:
    for vowel in "aeiou":
        text = text.replace(f" a {vowel}", f" an {vowel}").replace(f"A {vowel}", f"An {vowel}")
    for wrong, right in (("I is ", "I am "), ("I works ", "I work "), ("I lives ", "I live "),
                         ("I likes ", "I like "), ("I loves ", "I love "), ("I has ", "I have "),
                         ("I enjoys ", "I enjoy "), ("I earns ", "I earn "),
                         ("I was ", "I was "), ("and loves ", "and loves ")):  # fmt: skip
        text = text.replace(wrong, right)
    return text


def _slots(sentence: str, values: dict[str, str]) -> set[str]:
    return {name for name in values if f"{{{name}}}" in sentence}


def _draw(rng: random.Random, sentences: list[str], wanted: set[str]) -> str:
    """A sentence that tells only wanted fields, and at least one."""
    every = {name for names in ORDER.values() for name in names}
    fitting = []
    for sentence in sentences:
        slots = {name for name in every if f"{{{name}}}" in sentence}
        if slots and slots <= wanted:
            fitting.append(sentence)
    return rng.choice(fitting)
