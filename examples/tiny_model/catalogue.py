"""The listed tools: their names, schemas, questions for them, results and answers.

A table, and so longer than other files. `KINDS` has all of them.
"""

from collections.abc import Callable
from dataclasses import replace

from react import ATTRIBUTES, OBJECTS, VALUES, WORD_PROBLEMS, Attribute, calculate
from tool_kinds import Kind, Parameter, Value
from tool_words import (
    CURRENCIES,
    LANGUAGES,
    SKIES,
    code,
    decimal,
    expression,
    minutes,
    phrase,
    task,
    words,
)
from world import World


def _operation(op: str) -> Callable[[World, dict[str, Value]], str]:
    return lambda world, values: calculate(f"{values['a']}{op}{values['b']}")


def _numbers(whole: bool) -> tuple[Parameter, Parameter]:
    make: Callable[[World], Value] = (lambda w: w.number(4)) if whole else decimal
    kind = "integer" if whole else "number"
    return (Parameter("a", ("a", "x"), make, kind),
            Parameter("b", ("b", "y"), make, kind))  # fmt: skip


def _text(key: str, names: str, make: Callable[[World], Value], clause: str = "") -> Parameter:
    return Parameter(key, tuple(names.split()), make, clause=clause)


def _ok(world: World, values: dict[str, Value]) -> str:
    return world.rng.choice(["ok", "done", "success", "sent", "saved"])


def _clock(world: World, first: int, last: int) -> str:
    """A time between these hours."""
    return f"{world.rng.randint(first, last)}:{world.rng.choice(['00', '15', '30', '45'])}"


def _weather(world: World, values: dict[str, Value]) -> str:
    rng = world.rng
    sky, degrees = rng.choice(SKIES), rng.randint(-9, 39)
    unit = rng.choice(["degrees", "degrees", "C"])
    return rng.choice([f"{sky}, {degrees} {unit}", f"{degrees} {unit} and {sky}", sky,
                       f"{degrees} {unit}"])  # fmt: skip


def _people(world: World, values: dict[str, Value]) -> dict[str, str]:
    return {"p": world.first_name(), "q": world.first_name(), "t": world.pick("things")}


def _with_stories(kind: Kind, op: str) -> Kind:
    """The operation is also asked for in a story."""
    told = replace(kind, questions=tuple(WORD_PROBLEMS[op]), details=_people)
    return replace(kind, others=(told,))


ADDITION = Kind(
    ("add", "add_numbers"),
    ("Add two numbers.", "Adds a and b.", "Add a and b.", "Returns the sum of two numbers."),
    _numbers(True),
    ("What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?",
     "What is the sum of {a} and {b}?", "{a} + {b}", "Calculate {a} plus {b}.", "{a}+{b}?",
     "Please add {a} and {b}."),
    _operation("+"), "{a} plus {b} is {r}.",
)  # fmt: skip
MULTIPLICATION = Kind(
    ("multiply", "multiply_numbers"),
    ("Multiply two numbers.", "Multiplies a and b.", "Multiply a and b.",
     "Returns the product of two numbers."),
    _numbers(True),
    ("What is {a} * {b}?", "What is {a} times {b}?", "Multiply {a} by {b}.",
     "Multiply {a} and {b}.",
     "How much is {a} times {b}?", "What is the product of {a} and {b}?", "{a} * {b}", "{a}*{b}?",
     "Calculate {a} times {b}.", "What is {a} multiplied by {b}?"),
    _operation("*"), "{a} times {b} is {r}.",
)  # fmt: skip
SUBTRACTION = Kind(
    ("subtract", "subtract_numbers"),
    ("Subtract b from a.", "Subtracts two numbers.", "Returns the difference of two numbers."),
    _numbers(True),
    ("What is {a} - {b}?", "What is {a} minus {b}?", "Subtract {b} from {a}.",
     "How much is {a} minus {b}?", "{a} - {b}", "Calculate {a} minus {b}."),
    _operation("-"), "{a} minus {b} is {r}.",
)  # fmt: skip
DIVISION = Kind(
    ("divide", "divide_numbers"),
    ("Divide a by b.", "Divides two numbers.", "Returns the quotient of two numbers."),
    _numbers(False),
    ("What is {a} / {b}?", "What is {a} divided by {b}?", "Divide {a} by {b}.",
     "How much is {a} divided by {b}?", "{a} / {b}", "Calculate {a} divided by {b}."),
    _operation("/"), "{a} divided by {b} is {r}.",
)  # fmt: skip
CALCULATOR = Kind(
    ("calculator", "calculate"),
    ("Computes an expression.", "Calculate an arithmetic expression.", "A calculator.",
     "Evaluate a mathematical expression."),
    (_text("e", "expression expr", expression),),
    ("What is {e}?", "How much is {e}?", "Compute {e}.", "Calculate {e}.", "{e}", "{e} =",
     "What does {e} give?", "Please compute {e}.", "Can you calculate {e}?", "Evaluate {e}."),
    lambda world, values: calculate(str(values["e"])), "The result is {r}.",
)  # fmt: skip
WHOLE_OPERATIONS = [_with_stories(kind, op) for kind, op in zip(
    (ADDITION, SUBTRACTION, MULTIPLICATION), "+-*", strict=True)]  # fmt: skip
OPERATIONS = [replace(kind, parameters=_numbers(False)) for kind in WHOLE_OPERATIONS]


def _story(op: str) -> Kind:
    def details(world: World, values: dict[str, Value]) -> dict[str, str]:
        a, b = str(values["e"]).split(op)
        return {"a": a, "b": b, **_people(world, values)}

    parameter = _text("e", "expression", lambda w: f"{w.number(3)}{op}{w.number(3)}")
    return replace(CALCULATOR, parameters=(parameter,), questions=tuple(WORD_PROBLEMS[op]),
                   details=details)  # fmt: skip


CALCULATOR = replace(CALCULATOR, others=tuple(map(_story, "+-*/")))
WEATHER = Kind(
    ("get_weather", "weather"),
    ("Get the weather in a city.", "Get the current weather.", "Get weather for a given city.",
     "Returns the weather of a place.", "Get the current weather in a given location."),
    (_text("c", "city location", World.city),
     Parameter("u", ("unit", "units"), lambda w: w.rng.choice(["celsius", "fahrenheit"]),
               choices=("celsius", "fahrenheit"), clause="in {u}")),
    ("What is the weather in {c}?", "What's the weather in {c}?", "How is the weather in {c}?",
     "What is the weather like in {c}?", "Weather in {c}?", "Tell me the weather in {c}.",
     "How's the weather in {c} today?", "What is the weather in {c} today?", "weather in {c}",
     "Get the weather for {c}.", "Can you check the weather in {c}?", "Is it cold in {c}?",
     "What is the current weather in {c}?", "Is it raining in {c}?", "How warm is it in {c}?",
     "what's the weather like in {c}"),
    _weather, "The weather in {c} is {r}.",
)  # fmt: skip
PLAIN_WEATHER = Kind(
    WEATHER.names, WEATHER.descriptions, WEATHER.parameters[:1], WEATHER.questions, _weather,
    WEATHER.answer,
)  # fmt: skip
TIME = Kind(
    ("get_current_time", "get_time"),
    ("Get the current time in a city.", "Returns the time of a place.", "Get the current time."),
    (_text("c", "city location", World.city),),
    ("What time is it in {c}?", "What is the time in {c}?", "Time in {c}?",
     "How late is it in {c}?",
     "Tell me the time in {c}.", "What is the current time in {c}?", "what time is it in {c}"),
    lambda world, values: f"{world.rng.randint(0, 23)}:{world.rng.randint(0, 59):02d}",
    "It is {r} in {c}.",
)  # fmt: skip
NOW = Kind(
    ("get_current_time", "get_time"),
    ("Get the current time.", "Returns the time now."),
    (),
    ("What time is it?", "What is the time?", "What time is it now?", "Tell me the time.",
     "what time is it", "Do you know what time it is?", "What is the current time?"),
    lambda world, values: f"{world.rng.randint(0, 23)}:{world.rng.randint(0, 59):02d}",
    "It is {r}.",
)  # fmt: skip
TODAY = Kind(
    ("get_current_date", "get_date"),
    ("Get the current date.", "Returns the date of today."),
    (),
    ("What day is it today?", "What is the date?", "What is today's date?", "Which day is it?",
     "Tell me the date."),
    lambda world, values: world.date(), "Today is {r}.",
)  # fmt: skip
SEARCH = Kind(
    ("search", "web_search"),
    ("Search the web.", "Search for a query.", "Search the documents.", "Look something up."),
    (_text("q", "query q",
           lambda w: w.rng.choice([w.book, w.full_name, w.made_up, w.company, w.place, w.item,
                                   lambda: w.pick("hobbies"), lambda: w.pick("foods"),
                                   lambda: words(w), lambda: f"{w.item()} in {w.city()}"])()),),
    ("Search for {q}.", "Search the web for {q}.", "Find something about {q}.", "Google {q}.",
     "Look for {q} on the web.", "Please search for {q}.", "Search {q}.", "Find pages about {q}.",
     "What can you find about {q}?", "Can you search for {q}?"),
    lambda world, values: world.rng.choice(
        [f"{world.full_name()} wrote about it", f"{world.number(3)} pages", world.company(),
         f"a {world.item()} from {world.city()}"]),
    "I found this: {r}.",
)  # fmt: skip
CONVERT = Kind(
    ("convert_currency", "currency_converter"),
    ("Convert an amount to another currency.", "Convert money between currencies.",
     "Currency conversion."),
    (Parameter("a", ("amount", "value"), decimal, "number"),
     _text("f", "from_currency from", lambda w: w.rng.choice(CURRENCIES)),
     _text("t", "to_currency to", lambda w: w.rng.choice(CURRENCIES))),
    ("Convert {a} {f} to {t}.", "How much is {a} {f} in {t}?", "What is {a} {f} in {t}?",
     "Change {a} {f} into {t}.", "How many {t} are {a} {f}?", "Exchange {a} {f} to {t}.",
     "{a} {f} in {t}", "Please convert {a} {f} to {t}."),
    lambda world, values: world.rng.choice(["{}", "{} " + str(values["t"])]).format(world.price()),
    "{a} {f} are {r}.",
)  # fmt: skip
EMAIL = Kind(
    ("send_email", "email"),
    ("Send an email.", "Sends an email to somebody.", "Write an email to a person."),
    (_text("t", "to recipient",
           lambda w: w.email(w.full_name()) if w.rng.random() < 0.4 else w.first_name()),
     _text("b", "body text", phrase)),
    ("Send an email to {t} saying {b}.", "Email {t} that {b}.", "Write an email to {t}: {b}.",
     "Send {t} an email saying {b}.", "Send an email to {t} that {b}.",
     "Please email {t} and say {b}."),
    _ok, "I sent the email to {t}.",
)  # fmt: skip
REMINDER = Kind(
    ("set_reminder", "remind"),
    ("Set a reminder.", "Remind the user of something.", "Creates a reminder at a time."),
    (_text("x", "text task", task),
     _text("w", "time when",
           lambda w: w.rng.choice([_clock(w, 7, 22), w.time()]))),
    ("Remind me to {x} at {w}.", "Set a reminder to {x} at {w}.", "At {w} remind me to {x}.",
     "Please remind me to {x} at {w}.", "Create a reminder at {w} to {x}.",
     "Can you remind me to {x} at {w}?"),
    _ok, "I will remind you to {x} at {w}.",
)  # fmt: skip
STOCK = Kind(
    ("get_stock_price", "stock_price"),
    ("Get the price of a stock.", "Returns the current stock price.", "Stock price by symbol."),
    (_text("s", "symbol ticker",
           lambda w: "".join(w.rng.choice("ABCDEFGHIJKLMNOPRSTUVWXYZ")
                             for _ in range(w.rng.randint(2, 4)))
           if w.rng.random() < 0.5 else w.company()),),
    ("What is the stock price of {s}?", "What does {s} stock cost?", "Stock price of {s}?",
     "How is the {s} stock doing?", "Get the stock price of {s}.", "How much is a share of {s}?",
     "What is the price of {s} stock?", "What is {s} trading at?"),
    lambda world, values: world.rng.choice(["{}", "{} USD", "{} dollars"]).format(world.price()),
    "The stock price of {s} is {r}.",
)  # fmt: skip
TRANSLATE = Kind(
    ("translate", "translate_text"),
    ("Translate a text.", "Translates text into another language."),
    (_text("x", "text phrase", phrase),
     _text("l", "language target_language", lambda w: w.rng.choice(LANGUAGES))),
    ("Translate {x} into {l}.", "How do you say {x} in {l}?", "Translate to {l}: {x}.",
     "Say {x} in {l}.", "What is {x} in {l}?", "Put {x} into {l}."),
    lambda world, values: " ".join(world.syllables() for _ in range(world.rng.randint(1, 3))),
    "In {l} that is {r}.",
)  # fmt: skip
TIMER = Kind(
    ("set_timer", "start_timer"),
    ("Start a timer.", "Sets a timer in minutes."),
    (Parameter("m", ("minutes", "duration"), minutes, "integer"),),
    ("Set a timer for {m} minutes.", "Start a timer of {m} minutes.", "Timer for {m} minutes.",
     "Wake me in {m} minutes.", "Please set a {m} minute timer."),
    _ok, "The timer runs for {m} minutes.",
)  # fmt: skip
TRACK = Kind(
    ("track_package", "track_order"),
    ("Track a package.", "Get the status of an order by its number."),
    (_text("c", "order_id id", code),),
    ("Where is my package {c}?", "Track {c}.", "Where is order {c}?", "What is the status of {c}?",
     "Track my order {c}.", "Has {c} been delivered?"),
    lambda world, values: world.rng.choice(["delivered", "on its way", f"in {world.city()}",
                                            "lost", f"arrives on {world.weekday()}"]),
    "The status of {c} is {r}.",
)  # fmt: skip
NOTE = Kind(
    ("save_note", "create_note"),
    ("Save a note.", "Adds a note to the list.", "Write something down."),
    (_text("x", "text note", lambda w: w.rng.choice([task, phrase])(w)),),
    ("Note that {x}.", "Write down: {x}.", "Save the note {x}.", "Make a note: {x}.",
     "Add {x} to my notes.", "Add a note: {x}."),
    _ok, "I noted it.",
)  # fmt: skip


def _fact_kind(attribute: Attribute) -> Kind:
    """The lookup tool asked for one kind of fact; its argument is the subject, as in ReAct."""
    prefix = attribute.subject.format(x="")
    return Kind(
        ("lookup", "wikipedia"),
        ("Finds a fact.", "Look up a fact.", "Looks up a subject.", "Find a fact about a subject."),
        (_text("s", "subject topic",
               lambda w: attribute.subject.format(x=OBJECTS[attribute.of](w))),),
        attribute.questions,
        lambda world, values: VALUES[attribute.value](world), "The {s} is {r}.",
        lambda world, values: {"x": str(values["s"]).removeprefix(prefix)},
    )  # fmt: skip


LOOKUPS = {attribute.subject: _fact_kind(attribute) for attribute in ATTRIBUTES}
LOOKUP = replace(LOOKUPS["population of {x}"], others=tuple(LOOKUPS.values()))
KINDS = [*WHOLE_OPERATIONS, *OPERATIONS, DIVISION, CALCULATOR, CALCULATOR, WEATHER, PLAIN_WEATHER,
         PLAIN_WEATHER, TIME, NOW, TODAY, SEARCH, CONVERT, EMAIL, REMINDER, STOCK, TRANSLATE, TIMER,
         TRACK, NOTE, LOOKUP, LOOKUP]  # fmt: skip
