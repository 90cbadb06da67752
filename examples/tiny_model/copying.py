"""Plain copying ("Repeat: ..."): what a young model learns first and the other skills stand on."""

from samples import Sample
from world import World


def copy_sample(world: World) -> Sample:
    """Repeat a text, or say the value that belongs to a key."""
    rng = world.rng
    sample = Sample("copy")
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
    sample = Sample("copy")
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
