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
    ROOMS,
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
    return (Parameter("a", ("a", "x", "first", "num1", "left"), make, kind),
            Parameter("b", ("b", "y", "second", "num2", "right"), make, kind))  # fmt: skip


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
    ("add", "add_numbers", "sum", "plus", "addition"),
    ("Add two numbers.", "Adds a and b.", "Add a and b.", "Returns the sum of two numbers."),
    _numbers(True),
    ("What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?",
     "What is the sum of {a} and {b}?", "{a} + {b}", "Calculate {a} plus {b}.", "{a}+{b}?",
     "Please add {a} and {b}."),
    _operation("+"), "{a} plus {b} is {r}.",
)  # fmt: skip
MULTIPLICATION = Kind(
    ("multiply", "multiply_numbers", "product", "times", "mul"),
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
    ("subtract", "subtract_numbers", "minus", "difference"),
    ("Subtract b from a.", "Subtracts two numbers.", "Returns the difference of two numbers."),
    _numbers(True),
    ("What is {a} - {b}?", "What is {a} minus {b}?", "Subtract {b} from {a}.",
     "How much is {a} minus {b}?", "{a} - {b}", "Calculate {a} minus {b}."),
    _operation("-"), "{a} minus {b} is {r}.",
)  # fmt: skip
DIVISION = Kind(
    ("divide", "divide_numbers", "division", "quotient"),
    ("Divide a by b.", "Divides two numbers.", "Returns the quotient of two numbers."),
    _numbers(False),
    ("What is {a} / {b}?", "What is {a} divided by {b}?", "Divide {a} by {b}.",
     "How much is {a} divided by {b}?", "{a} / {b}", "Calculate {a} divided by {b}."),
    _operation("/"), "{a} divided by {b} is {r}.",
)  # fmt: skip
CALCULATOR = Kind(
    ("calculator", "calculate", "calc", "compute", "evaluate", "math"),
    ("Computes an expression.", "Calculate an arithmetic expression.", "A calculator.",
     "Evaluate a mathematical expression."),
    (_text("e", "expression expr formula input query", expression),),
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
    ("get_weather", "weather", "get_current_weather", "current_weather", "fetch_weather",
     "check_weather", "weather_lookup"),
    ("Get the weather in a city.", "Get the current weather.", "Get weather for a given city.",
     "Returns the weather of a place.", "Get the current weather in a given location."),
    (_text("c", "city location place town city_name", World.city),
     Parameter("u", ("unit", "units", "scale"), lambda w: w.rng.choice(["celsius", "fahrenheit"]),
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
FORECAST = Kind(
    ("get_forecast", "forecast", "weather_forecast"),
    ("Get the forecast for some days.", "Weather forecast for a city."),
    (_text("c", "city location place", World.city),
     Parameter("d", ("days", "num_days"), lambda w: w.rng.randint(1, 14), "integer")),
    ("What is the forecast for {c} for {d} days?", "Forecast for {c} for the next {d} days.",
     "How will the weather be in {c} in the next {d} days?", "Show the {d} day forecast for {c}."),
    _weather, "The forecast for {c} is {r}.",
)  # fmt: skip
TIME = Kind(
    ("get_current_time", "get_time", "current_time", "time_in", "what_time"),
    ("Get the current time in a city.", "Returns the time of a place.", "Get the current time."),
    (_text("c", "city location place timezone", World.city),),
    ("What time is it in {c}?", "What is the time in {c}?", "Time in {c}?",
     "How late is it in {c}?",
     "Tell me the time in {c}.", "What is the current time in {c}?", "what time is it in {c}"),
    lambda world, values: f"{world.rng.randint(0, 23)}:{world.rng.randint(0, 59):02d}",
    "It is {r} in {c}.",
)  # fmt: skip
NOW = Kind(
    ("get_current_time", "get_time", "current_time", "now", "clock"),
    ("Get the current time.", "Returns the time now."),
    (),
    ("What time is it?", "What is the time?", "What time is it now?", "Tell me the time.",
     "what time is it", "Do you know what time it is?", "What is the current time?"),
    lambda world, values: f"{world.rng.randint(0, 23)}:{world.rng.randint(0, 59):02d}",
    "It is {r}.",
)  # fmt: skip
TODAY = Kind(
    ("get_current_date", "get_date", "today", "current_date"),
    ("Get the current date.", "Returns the date of today."),
    (),
    ("What day is it today?", "What is the date?", "What is today's date?", "Which day is it?",
     "Tell me the date."),
    lambda world, values: world.date(), "Today is {r}.",
)  # fmt: skip
SEARCH = Kind(
    ("search", "web_search", "search_web", "search_docs", "find", "google_search"),
    ("Search the web.", "Search for a query.", "Search the documents.", "Look something up."),
    (_text("q", "query q text search_query input",
           lambda w: w.rng.choice([w.book, w.full_name, w.made_up, w.company, w.place, w.item,
                                   lambda: w.pick("hobbies"), lambda: w.pick("foods"),
                                   lambda: words(w), lambda: f"{w.item()} in {w.city()}"])()),
     Parameter("n", ("limit", "max_results", "count", "k"), lambda w: w.rng.randint(1, 20),
               "integer", clause="with at most {n} results")),
    ("Search for {q}.", "Search the web for {q}.", "Find something about {q}.", "Google {q}.",
     "Look for {q} on the web.", "Please search for {q}.", "Search {q}.", "Find pages about {q}.",
     "What can you find about {q}?", "Can you search for {q}?"),
    lambda world, values: world.rng.choice(
        [f"{world.full_name()} wrote about it", f"{world.number(3)} pages", world.company(),
         f"a {world.item()} from {world.city()}"]),
    "I found this: {r}.",
)  # fmt: skip
CONVERT = Kind(
    ("convert_currency", "currency_converter", "exchange", "convert_money", "convert"),
    ("Convert an amount to another currency.", "Convert money between currencies.",
     "Currency conversion."),
    (Parameter("a", ("amount", "value", "sum"), decimal, "number"),
     _text("f", "from_currency from source base", lambda w: w.rng.choice(CURRENCIES)),
     _text("t", "to_currency to target", lambda w: w.rng.choice(CURRENCIES))),
    ("Convert {a} {f} to {t}.", "How much is {a} {f} in {t}?", "What is {a} {f} in {t}?",
     "Change {a} {f} into {t}.", "How many {t} are {a} {f}?", "Exchange {a} {f} to {t}.",
     "{a} {f} in {t}", "Please convert {a} {f} to {t}."),
    lambda world, values: world.rng.choice(["{}", "{} " + str(values["t"])]).format(world.price()),
    "{a} {f} are {r}.",
)  # fmt: skip
EMAIL = Kind(
    ("send_email", "email", "send_mail", "write_email"),
    ("Send an email.", "Sends an email to somebody.", "Write an email to a person."),
    (_text("t", "to recipient address",
           lambda w: w.email(w.full_name()) if w.rng.random() < 0.4 else w.first_name()),
     _text("b", "body text message content", phrase),
     _text("s", "subject title", lambda w: w.rng.choice([w.event, w.made_up, w.item])(),
           "with the subject {s}")),
    ("Send an email to {t} saying {b}.", "Email {t} that {b}.", "Write an email to {t}: {b}.",
     "Send {t} an email saying {b}.", "Send an email to {t} that {b}.",
     "Please email {t} and say {b}."),
    _ok, "I sent the email to {t}.",
)  # fmt: skip
MESSAGE = Kind(
    ("send_message", "send_sms", "text_message", "notify"),
    ("Send a message.", "Send a text message to a person."),
    (_text("t", "to name person contact", World.first_name),
     _text("b", "text message body content", phrase)),
    ("Tell {t} that {b}.", "Send a message to {t}: {b}.", "Text {t} that {b}.",
     "Send {t} a message saying {b}.", "Message {t}: {b}.", "Write to {t} that {b}."),
    _ok, "I sent the message to {t}.",
)  # fmt: skip
REMINDER = Kind(
    ("set_reminder", "remind", "create_reminder", "add_reminder"),
    ("Set a reminder.", "Remind the user of something.", "Creates a reminder at a time."),
    (_text("x", "text task title message", task),
     _text("w", "time when at",
           lambda w: w.rng.choice([_clock(w, 7, 22), w.time()]))),
    ("Remind me to {x} at {w}.", "Set a reminder to {x} at {w}.", "At {w} remind me to {x}.",
     "Please remind me to {x} at {w}.", "Create a reminder at {w} to {x}.",
     "Can you remind me to {x} at {w}?"),
    _ok, "I will remind you to {x} at {w}.",
)  # fmt: skip
STOCK = Kind(
    ("get_stock_price", "stock_price", "get_price", "stock_quote", "get_quote"),
    ("Get the price of a stock.", "Returns the current stock price.", "Stock price by symbol."),
    (_text("s", "symbol ticker stock company name",
           lambda w: "".join(w.rng.choice("ABCDEFGHIJKLMNOPRSTUVWXYZ")
                             for _ in range(w.rng.randint(2, 4)))
           if w.rng.random() < 0.5 else w.company()),),
    ("What is the stock price of {s}?", "What does {s} stock cost?", "Stock price of {s}?",
     "How is the {s} stock doing?", "Get the stock price of {s}.", "How much is a share of {s}?",
     "What is the price of {s} stock?", "What is {s} trading at?"),
    lambda world, values: world.rng.choice(["{}", "{} USD", "{} dollars"]).format(world.price()),
    "The stock price of {s} is {r}.",
)  # fmt: skip
BOOKING = Kind(
    ("book_table", "reserve_table", "make_reservation", "book_restaurant"),
    ("Book a table at a restaurant.", "Reserve a table.", "Make a reservation in a restaurant."),
    (_text("r", "restaurant place name", World.place),
     Parameter("n", ("people", "guests", "party_size", "seats"), lambda w: w.rng.randint(1, 14),
               "integer"),
     _text("w", "time at when",
           lambda w: _clock(w, 11, 22), "at {w}")),
    ("Book a table for {n} at {r}.", "Reserve a table at {r} for {n} people.",
     "Book a table for {n} people in {r}.", "Get me a table for {n} at {r}.",
     "I need a table at {r} for {n} people.", "Please book {r} for {n} people."),
    _ok, "I booked a table for {n} at {r}.",
)  # fmt: skip
TRANSLATE = Kind(
    ("translate", "translate_text", "translation"),
    ("Translate a text.", "Translates text into another language."),
    (_text("x", "text phrase sentence input", phrase),
     _text("l", "language target_language to target", lambda w: w.rng.choice(LANGUAGES))),
    ("Translate {x} into {l}.", "How do you say {x} in {l}?", "Translate to {l}: {x}.",
     "Say {x} in {l}.", "What is {x} in {l}?", "Put {x} into {l}."),
    lambda world, values: " ".join(world.syllables() for _ in range(world.rng.randint(1, 3))),
    "In {l} that is {r}.",
)  # fmt: skip
TIMER = Kind(
    ("set_timer", "start_timer", "timer"),
    ("Start a timer.", "Sets a timer in minutes."),
    (Parameter("m", ("minutes", "duration", "mins"), minutes, "integer"),),
    ("Set a timer for {m} minutes.", "Start a timer of {m} minutes.", "Timer for {m} minutes.",
     "Wake me in {m} minutes.", "Please set a {m} minute timer."),
    _ok, "The timer runs for {m} minutes.",
)  # fmt: skip
LIGHT = Kind(
    ("set_light", "switch_light", "control_light", "turn_light"),
    ("Switch a light on or off.", "Controls the lights of a room."),
    (_text("r", "room place area", lambda w: w.rng.choice(ROOMS)),
     Parameter("s", ("state", "status", "action"), lambda w: w.rng.choice(["on", "off"]),
               choices=("on", "off"))),
    ("Turn {s} the light in the {r}.", "Turn the light in the {r} {s}.",
     "Switch {s} the {r} light.",
     "Light {s} in the {r}.", "Please turn {s} the lights in the {r}.", "Turn {s} the {r} lights."),
    _ok, "The light in the {r} is {s}.",
)  # fmt: skip
HEATING = Kind(
    ("set_temperature", "set_heating", "set_thermostat"),
    ("Set the temperature of a room.", "Controls the heating."),
    (_text("r", "room place area", lambda w: w.rng.choice(ROOMS)),
     Parameter("d", ("degrees", "temperature", "value"), lambda w: w.rng.choice(
         [w.rng.randint(10, 30), w.rng.randint(10, 30) + 0.5]), "number")),
    ("Set the {r} to {d} degrees.", "Heat the {r} to {d} degrees.",
     "Make the {r} {d} degrees warm.",
     "Set the temperature in the {r} to {d}.", "Set the heating in the {r} to {d} degrees."),
    _ok, "The {r} is set to {d} degrees.",
)  # fmt: skip
ALARM = Kind(
    ("set_alarm", "alarm", "create_alarm"),
    ("Set an alarm.", "Wakes the user at a time."),
    (_text("w", "time at when", lambda w: _clock(w, 4, 11)),
     Parameter("e", ("repeat", "every_day", "daily"), lambda w: True, "boolean",
               clause="every day")),
    ("Set an alarm for {w}.", "Wake me at {w}.", "Wake me up at {w}.", "Alarm at {w}."),
    _ok, "The alarm is set for {w}.",
)  # fmt: skip
EVENT = Kind(
    ("create_event", "add_event", "schedule_meeting", "add_to_calendar"),
    ("Create a calendar event.", "Adds an event to the calendar.", "Schedule a meeting."),
    (_text("t", "title name event subject", World.event),
     _text("d", "date day when",
           lambda w: w.rng.choice([w.date, w.weekday])()),
     _text("l", "location place where", World.place, "at {l}")),
    ("Add {t} to my calendar on {d}.", "Schedule {t} on {d}.", "Put {t} on {d} in my calendar.",
     "Create an event {t} on {d}.", "Plan {t} for {d}."),
    _ok, "I added {t} on {d}.",
)  # fmt: skip
MUSIC = Kind(
    ("play_music", "play_song", "play"),
    ("Play music.", "Plays a song or an artist."),
    (_text("m", "query song artist title name",
           lambda w: w.rng.choice([w.full_name, w.book, w.made_up, lambda: w.pick("music")])()),
     Parameter("v", ("volume", "level"), lambda w: w.rng.randint(1, 100), "integer",
               clause="at volume {v}")),
    ("Play {m}.", "Play some {m}.", "I want to hear {m}.", "Put on {m}.", "Please play {m}."),
    _ok, "Now playing {m}.",
)  # fmt: skip
ORDER = Kind(
    ("order_item", "place_order", "buy", "add_to_cart", "create_order"),
    ("Order an item.", "Place an order in the shop.", "Adds an item to the cart."),
    (_text("i", "item product article name", lambda w: f"{w.pick('things')}"),
     Parameter("n", ("quantity", "amount", "count"), lambda w: w.number(2), "integer"),
     Parameter("x", ("express", "is_gift", "gift", "urgent"), lambda w: w.rng.random() < 0.5,
               "boolean", clause="with express {x}")),
    ("Order {n} {i}.", "Buy {n} {i}.", "I want {n} {i}.", "Please order {n} {i}.",
     "Get me {n} {i}.", "I need {n} {i}."),
    _ok, "I ordered {n} {i}.",
)  # fmt: skip
TRACK = Kind(
    ("track_package", "track_order", "order_status", "get_order_status"),
    ("Track a package.", "Get the status of an order by its number."),
    (_text("c", "order_id id code tracking_number number", code),),
    ("Where is my package {c}?", "Track {c}.", "Where is order {c}?", "What is the status of {c}?",
     "Track my order {c}.", "Has {c} been delivered?"),
    lambda world, values: world.rng.choice(["delivered", "on its way", f"in {world.city()}",
                                            "lost", f"arrives on {world.weekday()}"]),
    "The status of {c} is {r}.",
)  # fmt: skip
DISTANCE = Kind(
    ("get_distance", "distance", "route", "get_route"),
    ("Get the distance between two cities.", "Distance from one place to another."),
    (_text("f", "from start origin source", World.city), _text("t", "to end destination target",
                                                               World.city)),
    ("How far is it from {f} to {t}?", "What is the distance between {f} and {t}?",
     "Distance from {f} to {t}?", "How far is {t} from {f}?", "How many km from {f} to {t}?"),
    lambda world, values: world.rng.choice(["{} km", "{}"]).format(world.number(4)),
    "From {f} to {t} it is {r}.",
)  # fmt: skip
FLIGHT = Kind(
    ("search_flights", "find_flight", "book_flight", "get_flights"),
    ("Search flights.", "Find a flight between two cities."),
    (_text("f", "origin from departure", World.city),
     _text("t", "destination to arrival", World.city),
     _text("d", "date day", lambda w: w.rng.choice([w.date, w.weekday])(), "on {d}")),
    ("Find a flight from {f} to {t}.", "I want to fly from {f} to {t}.", "Flights from {f} to {t}.",
     "Book a flight from {f} to {t}.", "Is there a flight from {f} to {t}?"),
    lambda world, values: f"{code(world)} at {world.time()}", "I found this flight: {r}.",
)  # fmt: skip
CONTACT = Kind(
    ("get_contact", "find_contact", "get_phone_number", "phone_book"),
    ("Get the phone number of a person.", "Find a contact by name."),
    (_text("n", "name person contact", lambda w: w.rng.choice([w.full_name, w.first_name])()),),
    ("What is the phone number of {n}?", "How can I call {n}?", "Find the number of {n}.",
     "Get the phone number of {n}.", "Phone number of {n}?"),
    lambda world, values: world.phone(), "The number of {n} is {r}.",
)  # fmt: skip
NOTE = Kind(
    ("save_note", "create_note", "add_note", "add_todo", "add_task"),
    ("Save a note.", "Adds a note to the list.", "Write something down."),
    (_text("x", "text note content task", lambda w: w.rng.choice([task, phrase])(w)),),
    ("Note that {x}.", "Write down: {x}.", "Save the note {x}.", "Make a note: {x}.",
     "Add {x} to my notes.", "Add a note: {x}."),
    _ok, "I noted it.",
)  # fmt: skip
USER = Kind(
    ("get_user", "get_customer", "find_user", "lookup_user"),
    ("Get a user by id.", "Find a customer by number."),
    (Parameter("i", ("user_id", "id", "customer_id", "number"), lambda w: w.number(5), "integer"),),
    ("Who is user {i}?", "Get user {i}.", "Show me the user with id {i}.", "Find customer {i}.",
     "What is the name of user {i}?", "Look up user {i}."),
    lambda world, values: world.full_name(), "User {i} is {r}.",
)  # fmt: skip
PERSON = Kind(
    ("Person", "save_person", "add_person", "Contact", "extract_person"),
    ("A person.", "Save a person.", "Information about a person.", ""),
    (_text("n", "name full_name person", World.full_name),
     Parameter("a", ("age", "years"), lambda w: w.rng.randint(5, 99), "integer"),
     _text("c", "city location town", World.city, "and lives in {c}")),
    ("{n} is {a} years old.", "Text: {n} is {a} years old.", "{n} is {a}.",
     "I met {n}, who is {a} years old.", "My friend {n} is {a} years old."),
    _ok, "I saved {n}.",
)  # fmt: skip
DICE = Kind(
    ("random_number", "roll_dice", "get_random_number"),
    ("Get a random number.", "Draw a number between two numbers."),
    (Parameter("a", ("min", "low", "start"), lambda w: w.rng.randint(0, 20), "integer"),
     Parameter("b", ("max", "high", "end"), lambda w: w.rng.randint(21, 999), "integer")),
    ("Give me a random number between {a} and {b}.", "Draw a number from {a} to {b}.",
     "Pick a random number from {a} to {b}.", "A random number between {a} and {b}, please."),
    lambda world, values: str(world.number(3)), "The number is {r}.",
)  # fmt: skip


def _fact_kind(attribute: Attribute) -> Kind:
    """The lookup tool asked for one kind of fact; its argument is the subject, as in ReAct."""
    prefix = attribute.subject.format(x="")
    return Kind(
        ("lookup", "lookup", "look_up", "find_fact", "get_fact", "wikipedia", "knowledge"),
        ("Finds a fact.", "Look up a fact.", "Looks up a subject.", "Find a fact about a subject."),
        (_text("s", "subject subject topic fact query",
               lambda w: attribute.subject.format(x=OBJECTS[attribute.of](w))),),
        attribute.questions,
        lambda world, values: VALUES[attribute.value](world), "The {s} is {r}.",
        lambda world, values: {"x": str(values["s"]).removeprefix(prefix)},
    )  # fmt: skip


LOOKUPS = {attribute.subject: _fact_kind(attribute) for attribute in ATTRIBUTES}
LOOKUP = replace(LOOKUPS["population of {x}"], others=tuple(LOOKUPS.values()))
KINDS = [*WHOLE_OPERATIONS, *OPERATIONS, DIVISION, CALCULATOR, CALCULATOR, WEATHER, PLAIN_WEATHER,
         FORECAST, TIME, NOW, TODAY, SEARCH, CONVERT, EMAIL, MESSAGE, REMINDER, STOCK, BOOKING,
         TRANSLATE, TIMER, LIGHT, HEATING, ALARM, EVENT, MUSIC, ORDER, TRACK, DISTANCE, FLIGHT,
         CONTACT, NOTE, USER, PERSON, DICE, LOOKUP, LOOKUP]  # fmt: skip
