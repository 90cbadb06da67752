"""Samples of the ReAct agent: a question, a thought, an action, the tool's observation, an answer.

The program writes "\\nObservation: ...\\n"; the model writes the rest and learns to go on to
"\\nObservation:" after an action, where the program stops it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from samples import STOP, Sample
from world import World

SYSTEM = """Answer the question with the help of two tools.
calculator[expression] computes, for example calculator[12*7].
lookup[subject] finds a fact, for example lookup[capital of France].
Write a Thought, then an Action, and wait for the Observation. When you know the result, write \
the Answer.
Example:
Question: What is 12 times 7?
Thought: I need to multiply 12 by 7.
Action: calculator[12*7]
Observation: 84
Thought: I know the answer.
Answer: 84"""
OTHER_SYSTEMS = [
    "Answer with Thought, Action and Observation. Tools: calculator[expression], lookup[subject].",
    "You have two tools, calculator[expression] and lookup[subject]. Think, act, then answer.",
]
NOT_FOUND, ERROR = "not found", "error"
CANNOT_FIND, CANNOT_COMPUTE = "I could not find it.", "I could not compute it."

BARE = {
    "+": ["{a} + {b}", "{a}+{b}", "{a} plus {b}", "the sum of {a} and {b}"],
    "-": ["{a} - {b}", "{a}-{b}", "{a} minus {b}", "the difference between {a} and {b}"],
    "*": ["{a} * {b}", "{a}*{b}", "{a} times {b}", "{a} x {b}", "the product of {a} and {b}",
          "{a} multiplied by {b}"],
    "/": ["{a} / {b}", "{a}/{b}", "{a} divided by {b}", "{a} over {b}"],
}  # fmt: skip
ASK = [
    "What is {e}?", "What is {e}?", "What is {e}?", "How much is {e}?", "Compute {e}.", "{e}?",
    "Calculate {e}.", "What's {e}?", "Please compute {e}.", "Can you compute {e}?", "{e} =",
    "Tell me {e}.", "I want to know {e}.", "What does {e} give?", "Work out {e}.", "{e}",
]  # fmt: skip
COMMANDS = {
    "+": ["Add {a} and {b}.", "Add {b} to {a}.", "What do you get when you add {a} and {b}?"],
    "-": ["Subtract {b} from {a}.", "Take {b} away from {a}.", "How much is {a} less {b}?",
          "How much bigger is {a} than {b}?"],
    "*": ["Multiply {a} by {b}.", "Multiply {a} and {b}.", "What do you get for {a} times {b}?"],
    "/": ["Divide {a} by {b}.", "How often does {b} fit into {a}?",
          "What do you get when you divide {a} by {b}?"],
}  # fmt: skip
WORD_PROBLEMS = {
    "+": [
        "{p} has {a} {t} and buys {b} more. How many {t} does {p} have now?",
        "{p} has {a} {t} and {q} has {b} {t}. How many {t} do they have together?",
        "{p} had {a} {t}. {q} gave {p} {b} more {t}. How many {t} does {p} have now?",
        "There are {a} {t} in one box and {b} {t} in another. How many {t} are there in all?",
        "{p} found {a} {t} on Monday and {b} {t} on Tuesday. How many {t} did {p} find?",
        "A shop sold {a} {t} in the morning and {b} in the afternoon. How many {t} did it sell?",
        "{p} is {a} years old. How old will {p} be in {b} years?",
        "{p} walks {a} km and then {b} km. How far does {p} walk?",
        "A book costs {a} euros and a pen costs {b} euros. How much do they cost together?",
        "{p} saved {a} dollars in May and {b} dollars in June. How much did {p} save?",
        "A train has {a} passengers and {b} more get on. How many passengers are there now?",
        "{p} reads {a} pages today and {b} pages tomorrow. How many pages does {p} read?",
        "A school has {a} boys and {b} girls. How many children are in the school?",
        "{p} spent {a} dollars on {t} and {b} dollars on food. How much did {p} spend?",
        "How many {t} are {a} {t} and {b} {t}?",
        "{p} is {a} years old and {q} is {b} years older. How old is {q}?",
    ],
    "-": [
        "{p} has {a} {t} and gives {b} to {q}. How many {t} does {p} have left?",
        "{p} had {a} {t} and lost {b} of them. How many {t} are left?",
        "There are {a} {t} in a box. {p} takes out {b}. How many {t} are left?",
        "{p} has {a} {t} and {q} has {b} {t}. How many more {t} does {p} have?",
        "{p} has {a} dollars and spends {b} dollars. How much money is left?",
        "{p} is {a} years old and {q} is {b} years old. How much older is {p}?",
        "A shop had {a} {t} and sold {b}. How many {t} are left?",
        "{p} baked {a} cakes and {q} ate {b}. How many cakes are left?",
        "A bus has {a} passengers and {b} get off. How many passengers are still on the bus?",
        "A book has {a} pages and {p} has read {b}. How many pages are left?",
        "{p} wants to save {a} dollars and has {b} dollars. How many dollars are missing?",
        "The way is {a} km long. {p} has walked {b} km. How far is it still?",
        "{p} is {a} years old. How old was {p} {b} years ago?",
        "A coat costs {a} euros. It is now {b} euros cheaper. What does it cost?",
        "Of {a} {t}, {b} are broken. How many {t} are good?",
        "A tank holds {a} liters and {b} liters run out. How many liters are left?",
    ],
    "*": [
        "{p} has {a} boxes with {b} {t} each. How many {t} does {p} have?",
        "There are {a} rows of {b} {t}. How many {t} are there?",
        "{p} buys {a} {t} for {b} dollars each. How much does {p} pay?",
        "One ticket costs {b} euros. How much do {a} tickets cost?",
        "A car drives {b} km per hour for {a} hours. How far does it go?",
        "{p} reads {b} pages a day. How many pages does {p} read in {a} days?",
        "{p} earns {b} dollars an hour. How much does {p} earn in {a} hours?",
        "Each of {a} children gets {b} {t}. How many {t} are needed?",
        "A machine makes {b} {t} per hour. How many {t} does it make in {a} hours?",
        "There are {a} bags and in each bag are {b} {t}. How many {t} are there in all?",
        "A room is {a} meters long and {b} meters wide. What is its area?",
        "{p} plants {a} rows with {b} {t} in each row. How many {t} does {p} plant?",
        "{p} runs {b} km every day. How far does {p} run in {a} days?",
        "How many {t} are in {a} boxes of {b}?",
        "A house has {a} floors with {b} windows each. How many windows does it have?",
        "{p} packs {b} {t} into each of {a} bags. How many {t} does {p} pack?",
    ],
    "/": [
        "{p} shares {a} {t} among {b} friends. How many {t} does each friend get?",
        "{a} {t} are put into {b} boxes equally. How many {t} are in each box?",
        "{p} has {a} {t} and puts {b} into each bag. How many bags does {p} need?",
        "{b} {t} cost {a} dollars. How much does one cost?",
        "A car drives {a} km in {b} hours. How fast is it?",
        "{p} earns {a} dollars in {b} hours. How much does {p} earn per hour?",
        "A book has {a} pages. {p} reads {b} pages a day. How many days does it take?",
        "{a} children form groups of {b}. How many groups are there?",
        "{a} dollars are shared equally by {b} people. How much does each one get?",
        "A rope of {a} meters is cut into {b} equal pieces. How long is each piece?",
        "{p} needs {b} {t} for one cake. How many cakes can {p} make with {a} {t}?",
        "There are {a} {t} in {b} equal rows. How many {t} are in one row?",
        "{a} {t} are split among {b} children. How many {t} does each child get?",
        "{p} pays {a} euros for {b} tickets. What does one ticket cost?",
    ],
}  # fmt: skip
TWO_STEPS = [
    ("({a}+{b})*{c}", "({a} + {b}) * {c}"),
    ("({a}-{b})*{c}", "({a} - {b}) * {c}"),
    ("{a}*{b}+{c}", "{a} * {b} + {c}"),
    ("{a}*{b}-{c}", "{a} * {b} - {c}"),
    ("{a}+{b}+{c}", "{a} + {b} + {c}"),
    ("{a}+{b}-{c}", "{a} + {b} - {c}"),
    ("({a}+{b})/{c}", "({a} + {b}) / {c}"),
    ("{a}*{b}*{c}", "{a} * {b} * {c}"),
    ("{c}*({a}+{b})", "{c} * ({a} + {b})"),
    ("{a}-{b}-{c}", "{a} - {b} - {c}"),
    ("{a}/{b}+{c}", "{a} / {b} + {c}"),
    ("{a}+{b}*{c}", "{a} + {b} * {c}"),
]
TWO_STEP_PROBLEMS = [
    ("({a}+{b})*{c}", "Add {a} and {b}, then multiply by {c}."),
    ("({a}-{b})*{c}", "Subtract {b} from {a} and multiply the result by {c}."),
    ("{a}*{b}+{c}", "Multiply {a} by {b} and add {c}."),
    ("{a}*{b}-{c}", "Multiply {a} by {b}, then subtract {c}."),
    ("({a}+{b})/{c}", "Add {a} and {b}, then divide by {c}."),
    ("{a}*{b}+{c}", "{p} buys {a} {t} for {b} dollars each and a bag for {c} dollars. "
                    "How much does {p} pay?"),
    ("{a}*{b}-{c}", "{p} has {a} boxes with {b} {t} each and gives away {c} {t}. "
                    "How many {t} are left?"),
    ("({a}+{b})*{c}", "{p} runs {a} km in the morning and {b} km in the evening. "
                      "How far does {p} run in {c} days?"),
    ("{a}-{b}-{c}", "{p} has {a} {t}, gives {b} to {q} and loses {c}. How many are left?"),
    ("{a}+{b}+{c}", "{p} has {a} {t}, {q} has {b} and {r} has {c}. How many do they have in all?"),
    ("{a}+{b}-{c}", "{p} has {a} {t}, buys {b} more and eats {c}. How many {t} are left?"),
    ("({a}+{b})/{c}", "{p} has {a} {t} and {q} has {b} {t}. They share them among {c} friends. "
                      "How many {t} does each friend get?"),
    ("{a}*{b}*{c}", "There are {a} houses with {b} rooms each, and {c} {t} in each room. "
                    "How many {t} are there?"),
]  # fmt: skip
THOUGHTS = {
    "+": "add {a} and {b}",
    "-": "subtract {b} from {a}",
    "*": "multiply {a} by {b}",
    "/": "divide {a} by {b}",
}


@dataclass(frozen=True)
class Attribute:
    """A kind of fact: its subject, the kind of thing it is of, its value, and questions for it."""

    subject: str
    of: str
    value: str
    questions: tuple[str, ...]


ATTRIBUTES = [
    Attribute("population of {x}", "place", "count", (
        "What is the population of {x}?", "How many people live in {x}?",
        "How many inhabitants does {x} have?", "How big is the population of {x}?",
        "How many people are there in {x}?", "Population of {x}?",
        "Tell me the population of {x}.", "Do you know how many people live in {x}?")),
    Attribute("capital of {x}", "country", "city", (
        "What is the capital of {x}?", "Which city is the capital of {x}?",
        "What's the capital of {x}?", "Name the capital of {x}.", "Capital of {x}?",
        "Tell me the capital of {x}.", "What is the capital city of {x}?")),
    Attribute("author of {x}", "book", "person", (
        "Who wrote {x}?", "Who is the author of {x}?", "Who wrote the book {x}?",
        "Which author wrote {x}?", "By whom is the book {x}?", "Tell me the author of {x}.",
        "Who was the author of {x}?")),
    Attribute("height of {x}", "mountain", "meters", (
        "How high is {x}?", "What is the height of {x}?", "How tall is {x}?",
        "Tell me the height of {x}.", "How many meters high is {x}?", "Height of {x}?")),
    Attribute("length of {x}", "river", "km", (
        "How long is the {x}?", "What is the length of the {x}?", "How many km long is the {x}?",
        "Tell me the length of the {x}.")),
    Attribute("founder of {x}", "company", "person", (
        "Who founded {x}?", "Who is the founder of {x}?", "Who started the company {x}?",
        "Who was the founder of {x}?", "Tell me who founded {x}.")),
    Attribute("mayor of {x}", "place", "person", (
        "Who is the mayor of {x}?", "What is the name of the mayor of {x}?",
        "Tell me the mayor of {x}.", "Who is mayor in {x}?")),
    Attribute("president of {x}", "country", "person", (
        "Who is the president of {x}?", "Who is president of {x}?",
        "What is the name of the president of {x}?", "Name the president of {x}.")),
    Attribute("currency of {x}", "country", "word", (
        "What is the currency of {x}?", "Which currency does {x} use?",
        "What do people pay with in {x}?", "What money is used in {x}?")),
    Attribute("area of {x}", "country", "count", (
        "What is the area of {x}?", "How large is {x}?", "How big is {x}?",
        "How many square km does {x} have?")),
    Attribute("birth year of {x}", "person", "year", (
        "When was {x} born?", "In which year was {x} born?", "What is the birth year of {x}?",
        "What year was {x} born?")),
    Attribute("birthplace of {x}", "person", "city", (
        "Where was {x} born?", "What is the birthplace of {x}?", "In which city was {x} born?")),
    Attribute("opening year of {x}", "building", "year", (
        "When did {x} open?", "In which year did {x} open?", "What year was {x} opened?")),
    Attribute("language of {x}", "country", "name", (
        "Which language do people speak in {x}?", "What is the language of {x}?",
        "What language is spoken in {x}?")),
]  # fmt: skip
BY_SUBJECT = {attribute.subject: attribute for attribute in ATTRIBUTES}
POPULATION, HEIGHT = BY_SUBJECT["population of {x}"], BY_SUBJECT["height of {x}"]
LENGTH, AREA = BY_SUBJECT["length of {x}"], BY_SUBJECT["area of {x}"]
BIRTH = BY_SUBJECT["birth year of {x}"]
COMPARISONS: list[tuple[Attribute, str, tuple[str, ...]]] = [
    (POPULATION, "{u}-{v}", ("How many more people live in {x} than in {y}?",
                             "How much bigger is the population of {x} than that of {y}?",
                             "What is the population of {x} minus the population of {y}?")),
    (POPULATION, "{u}+{v}", ("How many people live in {x} and {y} together?",
                             "What is the total population of {x} and {y}?",
                             "What is the sum of the populations of {x} and {y}?")),
    (HEIGHT, "{u}-{v}", ("How much higher is {x} than {y}?", "How much taller is {x} than {y}?",
                         "What is the difference in height between {x} and {y}?")),
    (LENGTH, "{u}-{v}", ("How much longer is the {x} than the {y}?",
                         "How many km longer is the {x} than the {y}?",
                         "What is the difference in length between the {x} and the {y}?")),
    (LENGTH, "{u}+{v}", ("How long are the {x} and the {y} together?",)),
    (AREA, "{u}-{v}", ("How much larger is {x} than {y}?",)),
    (AREA, "{u}/{v}", ("How many times larger is {x} than {y}?",)),
    (HEIGHT, "{u}/{v}", ("How many times higher is {x} than {y}?",)),
    (BIRTH, "{v}-{u}", ("How many years older is {x} than {y}?",
                        "How many years before {y} was {x} born?")),
]  # fmt: skip
DERIVED: list[tuple[Attribute, str, tuple[str, ...]]] = [
    (HEIGHT, "2*{u}", ("What is twice the height of {x}?", "What is double the height of {x}?")),
    (HEIGHT, "{u}/2", ("What is half the height of {x}?",)),
    (POPULATION, "2*{u}", ("What is twice the population of {x}?",
                           "What is double the population of {x}?")),
    (POPULATION, "{u}/2", ("What is half the population of {x}?",
                           "How many people are half of the population of {x}?")),
    (POPULATION, "{u}+{n}", ("If {n} people move to {x}, how many people live there?",
                             "What is the population of {x} plus {n}?")),
    (LENGTH, "{n}*{u}", ("What is {n} times the length of the {x}?",)),
    (HEIGHT, "{n}*{u}", ("What is {n} times the height of {x}?",)),
    (HEIGHT, "{u}+{n}", ("What is the height of {x} plus {n}?",)),
    (AREA, "{u}/{n}", ("What is the area of {x} divided by {n}?",)),
    (BIRTH, "{n}-{u}", ("How old was {x} in {n}?", "How old is {x} in {n}?")),
]  # fmt: skip
CHAINS: list[tuple[str, str, tuple[str, ...]]] = [
    ("capital of {x}", "population of {x}", (
        "What is the population of the capital of {x}?",
        "How many people live in the capital of {x}?")),
    ("capital of {x}", "mayor of {x}", ("Who is the mayor of the capital of {x}?",)),
    ("author of {x}", "birth year of {x}", (
        "When was the author of {x} born?", "In which year was the author of {x} born?")),
    ("author of {x}", "birthplace of {x}", ("Where was the author of {x} born?",)),
    ("founder of {x}", "birth year of {x}", ("When was the founder of {x} born?",)),
    ("birthplace of {x}", "population of {x}", (
        "How many people live in the city where {x} was born?",)),
]  # fmt: skip
GREETINGS = ["Hello!", "Hi", "Hello", "Hi there!", "Good morning!", "Good evening!", "Hey"]
OBJECTS: dict[str, Callable[[World], str]] = {
    "place": World.city,
    "country": World.country,
    "book": World.book,
    "mountain": lambda w: w.rng.choice(["Mount {}", "Mount {}", "Mount {}", "{} Peak"]).format(
        w.made_up()
    ),
    "river": lambda w: w.rng.choice(["{} River", "{}", "River {}"]).format(w.made_up()),
    "company": World.company,
    "person": World.full_name,
    "building": World.place,
}
VALUES: dict[str, Callable[[World], str]] = {
    "count": lambda w: str(w.number(7)),
    "city": World.city,
    "person": World.full_name,
    "meters": lambda w: w.rng.choice(["{}", "{}", "{} m", "{} meters"]).format(w.number(4)),
    "km": lambda w: w.rng.choice(["{}", "{}", "{} km"]).format(w.number(4)),
    "word": lambda w: w.syllables(1, 2),
    "year": lambda w: str(w.rng.randint(1700, 2020)),
    "name": World.made_up,
}


def calculate(expression: str) -> str:
    """The calculator tool: the value in at most four decimals, or "error"."""
    if not expression or set(expression) - set("0123456789.+-*/() "):
        return ERROR
    try:
        value = float(eval(expression, {"__builtins__": {}}))  # digits and operators only
    except (SyntaxError, ZeroDivisionError, OverflowError, TypeError):
        return ERROR
    return f"{value:.4f}".rstrip("0").rstrip(".")


def react_sample(world: World, min_questions: int = 1, max_questions: int = 3) -> Sample:
    """A conversation of independent questions."""
    rng = world.rng
    sample = Sample("react")
    sample.system(SYSTEM if rng.random() < 0.5 else rng.choice(OTHER_SYSTEMS))
    makers = [_bare, _word_problem, _two_step, _lookup, _compare, _derive, _chain, _special]
    for _ in range(rng.randint(min_questions, max_questions)):
        rng.choices(makers, weights=[20, 24, 12, 20, 10, 7, 6, 4])[0](sample, world)
    return sample


def _act(sample: Sample, thought: str, action: str, observation: str) -> None:
    sample.generated(f"Thought: {thought}\nAction: {action}{STOP}")
    sample.text(f" {observation}\n")


def _finish(sample: Sample, answer: str, thought: str = "I know the answer.") -> None:
    sample.generated(f"Thought: {thought}\nAnswer: {answer}")
    sample.close()
    sample.answers.append(answer)


def _compute(sample: Sample, thought: str, expression: str) -> None:
    """The last action of a turn, a calculation, and the answer."""
    result = calculate(expression)
    _act(sample, f"I need to {thought}.", f"calculator[{expression}]", result)
    if result == ERROR:
        _finish(sample, CANNOT_COMPUTE, "The calculator failed.")
    else:
        _finish(sample, result)


def _ask(sample: Sample, question: str) -> None:
    sample.user(question)
    sample.open()


def _find(sample: Sample, world: World, attribute: Attribute, x: str) -> str | None:
    """Look a fact up, finish the turn and return None where it is not to be found."""
    subject = attribute.subject.format(x=x)
    if subject not in sample.facts:
        is_known = world.rng.random() >= 0.06
        sample.facts[subject] = VALUES[attribute.value](world) if is_known else NOT_FOUND
    value = sample.facts[subject]
    _act(sample, f"I need to look up the {subject}.", f"lookup[{subject}]", value)
    if value == NOT_FOUND:
        _finish(sample, CANNOT_FIND, "I did not find it.")
        return None
    return value


def _operand(world: World) -> str:
    number = world.number(4)
    if world.rng.random() < 0.1:
        return f"{number}.{world.rng.randint(1, 99)}"
    return str(number)


def _operands(world: World, op: str) -> dict[str, str]:
    a, b = _operand(world), _operand(world)
    if op in "-/" and float(a) < float(b) and world.rng.random() < 0.8:
        a, b = b, a
    if op == "/" and world.rng.random() < 0.02:
        b = "0"
    return {"a": a, "b": b}


def _binary(sample: Sample, op: str, values: dict[str, str]) -> None:
    _compute(sample, THOUGHTS[op].format(**values), f"{values['a']}{op}{values['b']}")


def _bare(sample: Sample, world: World) -> None:
    rng = world.rng
    op = rng.choice("+-*/")
    values = _operands(world, op)
    if rng.random() < 0.12:
        return _percent_or_square(sample, world)
    if rng.random() < 0.2:
        question = rng.choice(COMMANDS[op])
    else:
        question = rng.choice(ASK).replace("{e}", rng.choice(BARE[op]))
    question = question.format(**values)
    _ask(sample, question[:1].upper() + question[1:])
    _binary(sample, op, values)


def _percent_or_square(sample: Sample, world: World) -> None:
    rng = world.rng
    a, b = world.number(2), world.number(4)
    if rng.random() < 0.5:
        form = rng.choice(["What is {a}% of {b}?", "How much is {a} percent of {b}?"])
        _ask(sample, form.format(a=a, b=b))
        _compute(sample, f"compute {a} percent of {b}", f"{b}*{a}/100")
    else:
        form = rng.choice(["What is {b} squared?", "What is the square of {b}?"])
        _ask(sample, form.format(b=b))
        _compute(sample, f"multiply {b} by {b}", f"{b}*{b}")


def _people(world: World) -> dict[str, str]:
    return {
        "p": world.first_name(),
        "q": world.first_name(),
        "r": world.first_name(),
        "t": world.pick("things"),
    }


def _word_problem(sample: Sample, world: World) -> None:
    op = world.rng.choice("+-*/")
    values = _operands(world, op)
    _ask(sample, world.rng.choice(WORD_PROBLEMS[op]).format(**values, **_people(world)))
    _binary(sample, op, values)


def _two_step(sample: Sample, world: World) -> None:
    rng = world.rng
    a, b, c = sorted((world.number(3) for _ in range(3)), reverse=rng.random() < 0.7)
    values = {"a": str(a), "b": str(b), "c": str(c)}
    if rng.random() < 0.5:
        expression, shown = rng.choice(TWO_STEPS)
        question = rng.choice(ASK).replace("{e}", shown if rng.random() < 0.7 else expression)
    else:
        expression, question = rng.choice(TWO_STEP_PROBLEMS)
    expression = expression.format(**values)
    _ask(sample, question.format(**values, **_people(world)))
    _compute(sample, f"compute {expression}", expression)


def _lookup(sample: Sample, world: World) -> None:
    attribute = world.rng.choice(ATTRIBUTES)
    x = OBJECTS[attribute.of](world)
    _ask(sample, world.rng.choice(attribute.questions).format(x=x))
    value = _find(sample, world, attribute, x)
    if value is not None:
        _finish(sample, value)


def _compare(sample: Sample, world: World) -> None:
    attribute, form, questions = world.rng.choice(COMPARISONS)
    x = y = OBJECTS[attribute.of](world)
    while y == x:
        y = OBJECTS[attribute.of](world)
    _ask(sample, world.rng.choice(questions).format(x=x, y=y))
    u = _find(sample, world, attribute, x)
    v = _find(sample, world, attribute, y) if u is not None else None
    if u is not None and v is not None:
        _combine(sample, form, u=_digits(u), v=_digits(v))


def _derive(sample: Sample, world: World) -> None:
    attribute, form, questions = world.rng.choice(DERIVED)
    x = OBJECTS[attribute.of](world)
    n = str(world.rng.randint(1800, 2030)) if attribute is BIRTH else str(world.number(3))
    _ask(sample, world.rng.choice(questions).format(x=x, n=n))
    u = _find(sample, world, attribute, x)
    if u is not None:
        _combine(sample, form, u=_digits(u), n=n)


def _combine(sample: Sample, form: str, **values: str) -> None:
    expression = form.format(**values)
    op = next(char for char in form if char in "+-*/")
    a, b = expression.split(op)
    _compute(sample, THOUGHTS[op].format(a=a, b=b), expression)


def _digits(value: str) -> str:
    return value.split(" ")[0]


def _chain(sample: Sample, world: World) -> None:
    first, second, questions = world.rng.choice(CHAINS)
    x = OBJECTS[BY_SUBJECT[first].of](world)
    _ask(sample, world.rng.choice(questions).format(x=x))
    middle = _find(sample, world, BY_SUBJECT[first], x)
    value = _find(sample, world, BY_SUBJECT[second], middle) if middle is not None else None
    if value is not None:
        _finish(sample, value)


def _special(sample: Sample, world: World) -> None:
    """A greeting, for which no tool is needed, or thanks."""
    if world.rng.random() < 0.6:
        _ask(sample, world.rng.choice(GREETINGS))
        _finish(sample, "Hello! Ask me a question.", "I do not need a tool.")
    else:
        _ask(sample, world.rng.choice(["Thanks!", "Thank you.", "Thank you!", "Great, thanks."]))
        _finish(sample, "You are welcome!", "I do not need a tool.")
