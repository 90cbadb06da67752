"""What tools are given and asked for: word lists, phrases, codes and numbers."""

# ruff: noqa: SIM905 (word lists read best as words)

from world import World, split_list

CURRENCIES = """
EUR USD GBP JPY CHF SEK NOK DKK PLN CZK CAD AUD INR BRL CNY KRW MXN TRY
""".split()
LANGUAGES = """
French German Spanish Italian Polish Dutch Swedish Danish Finnish Czech Greek Turkish Japanese
Korean Chinese Arabic Russian Portuguese Norwegian Hungarian
""".split()
SKIES = """
sunny cloudy rainy windy snowy foggy stormy clear
""".split()
ROOMS = split_list("kitchen,bedroom,bathroom,office,garage,hall,attic,living room,cellar,garden")
PHRASES = """
the train is late,I am on my way,the meeting is at noon,dinner is ready,the lamp is broken,
we need more milk,the report is done,I will call you later,the office is closed,thank you,
happy birthday,the keys are on the table,see you soon,the room is booked,I am ill today
"""
TASKS = """
buy milk,call the doctor,water the plants,pay the rent,clean the kitchen,feed the cat,write the
report,book a hotel,wash the car,bake a cake,visit my aunt,send the letter,repair the lamp,
take out the trash,read the book,call my mother
"""
PHRASE_LIST = split_list(PHRASES)
TASK_LIST = split_list(TASKS)
PHRASE_FORMS = [
    "the {i} is broken", "{n} called", "{n} is here", "we meet in {c}", "the {t} are in the {r}",
    "{n} has {x} {t}", "I need a {i}", "I bought a {i}", "the {i} costs {x} euros", "we go to {c}",
    "the {i} is in the {r}", "I will be in {c} at {h}", "{n} likes {f}", "{n} and {m} are late",
]  # fmt: skip
TASK_FORMS = ["buy {t}", "call {n}", "visit {n}", "repair the {i}", "clean the {r}", "cook {f}",
              "buy a {i}", "write to {n}", "sell the {i}", "pack the {t}"]  # fmt: skip


def decimal(world: World) -> int | float:
    """A number, often with a fraction."""
    rng = world.rng
    number = world.number(3)
    return number if rng.random() < 0.5 else float(f"{number}.{rng.randint(1, 99)}".rstrip("0"))


def words(world: World) -> str:
    """Some words in a row that make no sense, so that nothing but copying tells them."""
    return " ".join(world.other_word() for _ in range(world.rng.randint(2, 5)))


def phrase(world: World) -> str:
    """What one writes to another."""
    return _of_forms(world, PHRASE_LIST, PHRASE_FORMS)


def task(world: World) -> str:
    """What one has to do."""
    return _of_forms(world, TASK_LIST, TASK_FORMS)


def _of_forms(world: World, listed: list[str], forms: list[str]) -> str:
    kind = world.rng.random()
    if kind < 0.5:
        return world.rng.choice(listed)
    return world.rng.choice(forms).format(
        i=world.item(), n=world.first_name(), m=world.first_name(), c=world.city(),
        t=world.pick("things"), r=world.rng.choice(ROOMS), x=world.number(3), h=world.time(),
        f=world.pick("foods"))  # fmt: skip


def code(world: World) -> str:
    rng = world.rng
    letters = "".join(rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(rng.randint(1, 3)))
    return f"{letters}{rng.choice(['-', ''])}{world.number(4)}"


def expression(world: World) -> str:
    rng = world.rng
    a, b, c = (world.number(3) for _ in "123")
    forms = [f"{a}*{b}", f"{a}+{b}", f"{a}-{b}", f"{a}/{b}", f"({a}+{b})*{c}", f"{a}*{b}+{c}",
             f"{a}+{b}+{c}", f"{a}-{b}*{c}"]  # fmt: skip
    text = rng.choice(forms[:4] if rng.random() < 0.7 else forms[4:])
    return text


def minutes(world: World) -> int:
    return world.rng.choice([5, 10, 15, 20, 30, 45, 60, world.rng.randint(1, 90)])
