"""Samples of a chat over several turns: greetings, facts told, facts asked for, small talk.

Each reply is a function of the intent of the message and of the facts told so far, so that a
held-out chat has exactly one right reply to each message.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from samples import Sample
from world import World

SYSTEMS = [
    "You are a friendly assistant.",
    "You are a friendly assistant.",
    "You are a helpful assistant.",
    "You are Stemma Tiny, a small and friendly assistant.",
    "Be friendly and answer shortly.",
]
WHO = "I am Stemma Tiny, a small language model that runs on your computer."
ABILITIES = (
    "I can chat with you, remember what you tell me, turn texts into JSON and use a calculator "
    "and a lookup tool."
)
OUT_OF_SCOPE = (
    "I am a small model and do not know that. I can chat, remember what you tell me and turn "
    "texts into JSON."
)


@dataclass(frozen=True)
class Fact:
    """A kind of fact about the user: how it is told, changed, asked for and said back."""

    clause: str
    unknown: str
    tell: tuple[str, ...]
    update: tuple[str, ...]
    ask: tuple[str, ...]


FACTS = {
    "name": Fact(
        "your name is {v}", "your name",
        ("My name is {v}.", "I am {v}.", "I'm {v}.", "Call me {v}.", "You can call me {v}.",
         "My name's {v}.", "People call me {v}.", "This is {v}.", "{v} is my name.",
         "Hi, I am {v}.", "Hello, my name is {v}.", "Hi, my name is {v}.", "Hello, I'm {v}.",
         "Hey, {v} here.", "Please call me {v}.", "The name is {v}.", "I am called {v}.",
         "My first name is {v}.", "Hi! I'm {v}.", "Hello! My name is {v}.", "my name is {v}",
         "i am {v}", "Hi there, I'm {v}."),
        ("Actually, my name is {v}.", "No, my name is {v}.", "Sorry, my name is {v}.",
         "Please call me {v} from now on.", "I changed my name to {v}.",
         "Actually, call me {v}.", "My name is now {v}.", "Wait, my name is {v}."),
        ("What is my name?", "What's my name?", "Do you know my name?", "Who am I?",
         "Do you remember my name?", "Tell me my name.", "Can you tell me my name?",
         "What am I called?", "How am I called?", "Say my name.", "Which name did I tell you?",
         "Remember my name?", "What was my name?", "what is my name", "Have I told you my name?",
         "What did I say my name was?", "And what is my name?", "My name?")),
    "age": Fact(
        "you are {v} years old", "how old you are",
        ("I am {v} years old.", "I'm {v} years old.", "I am {v}.", "My age is {v}.",
         "I turned {v} last month.", "I just turned {v}.", "I'm {v}.", "i am {v} years old",
         "I have just become {v} years old."),
        ("Actually, I am {v} years old.", "No, I am {v} years old.", "Today I turned {v}.",
         "It was my birthday, now I am {v}.", "Sorry, I am {v} years old.", "I am {v} now."),
        ("How old am I?", "What is my age?", "Do you know how old I am?", "What's my age?",
         "Do you remember my age?", "Tell me my age.", "Can you tell me how old I am?",
         "Do you remember how old I am?", "My age?", "And how old am I?", "how old am i")),
    "city": Fact(
        "you live in {v}", "where you live",
        ("I live in {v}.", "My home is in {v}.", "I am from {v}.", "I come from {v}.",
         "I'm from {v}.", "I'm living in {v}.", "My home town is {v}.", "My city is {v}.",
         "I have lived in {v} for years.", "I have a flat in {v}.", "I am living in {v}.",
         "We live in {v}.", "i live in {v}", "My house is in {v}."),
        ("Actually, I moved to {v}.", "I moved to {v}.", "Now I live in {v}.",
         "I have moved to {v}.", "Actually, I live in {v}.", "No, I live in {v}.",
         "I just moved to {v}.", "Sorry, I live in {v} now.", "My new home is in {v}."),
        ("Where do I live?", "Do you remember where I live?", "What city do I live in?",
         "Where am I from?", "In which city do I live?", "Do you know where I live?",
         "Where is my home?", "Which city am I from?", "What is my city?", "Where do I come from?",
         "Tell me where I live.", "Can you tell me where I live?", "And where do I live?",
         "My city?", "where do i live", "What is my home town?")),
    "job": Fact(
        "your job is {v}", "what your job is",
        ("I work as a {v}.", "I am a {v}.", "I'm a {v}.", "My job is {v}.",
         "My profession is {v}.", "I work as a {v} here.", "I have a job as a {v}.",
         "By profession I am a {v}.", "I am working as a {v}.", "I earn my money as a {v}."),
        ("Actually, I am a {v}.", "I work as a {v} now.", "My new job is {v}.",
         "Now I work as a {v}.", "I changed my job, I am a {v} now.", "No, I am a {v}."),
        ("What is my job?", "What do I do for a living?", "What's my job?", "What do I work as?",
         "Do you remember my job?", "Do you know my job?", "What is my profession?",
         "Tell me my job.", "Where do I earn my money?", "Can you tell me my job?", "My job?",
         "And what is my job?")),
    "food": Fact(
        "your favourite food is {v}", "your favourite food",
        ("My favourite food is {v}.", "I like to eat {v}.", "I love to eat {v}.",
         "My favorite food is {v}.", "I love eating {v}.", "The food I like most is {v}.",
         "I like eating {v}.", "My favourite dish is {v}.", "I could eat {v} every day."),
        ("Actually, my favourite food is {v}.", "Now my favourite food is {v}.",
         "I changed my mind, my favourite food is {v}.", "These days I like to eat {v}.",
         "No, my favourite food is {v}."),
        ("What is my favourite food?", "What's my favorite food?", "What do I like to eat?",
         "Do you remember my favourite food?", "Which food do I like?", "What food do I like?",
         "Do you know my favourite food?", "Tell me my favourite food.",
         "What do I love to eat?", "What is my favourite dish?", "What could I eat every day?")),
    "colour": Fact(
        "your favourite colour is {v}", "your favourite colour",
        ("My favourite colour is {v}.", "My favorite color is {v}.", "I like the colour {v}.",
         "The colour I like most is {v}.", "I love the colour {v}.", "I love the color {v}.",
         "Of all colours I like {v} best."),
        ("Actually, my favourite colour is {v}.", "Now my favourite colour is {v}.",
         "I changed my mind, my favourite colour is {v}.", "No, my favourite colour is {v}."),
        ("What is my favourite colour?", "What's my favorite color?", "Which colour do I like?",
         "Do you remember my favourite colour?", "What colour do I like?",
         "Do you know my favourite colour?", "Tell me my favourite colour.",
         "Which color do I like best?", "What color do I like?", "My favourite colour?")),
    "hobby": Fact(
        "your hobby is {v}", "what your hobby is",
        ("My hobby is {v}.", "I like {v}.", "I love {v}.", "In my free time I like {v}.",
         "I enjoy {v}.", "I spend my weekends with {v}.", "My favourite hobby is {v}.",
         "I am a fan of {v}.", "My passion is {v}.",
         "I like {v} very much."),
        ("Actually, my hobby is {v}.", "My new hobby is {v}.", "Now my hobby is {v}.",
         "No, my hobby is {v}.", "I have a new hobby, {v}."),
        ("What is my hobby?", "What's my hobby?", "What do I like to do?", "What do I enjoy?",
         "What do I do in my free time?", "Do you remember my hobby?", "Do you know my hobby?",
         "Tell me my hobby.", "What do I like?", "What is my passion?", "Which hobby do I have?")),
    "music": Fact(
        "your favourite music is {v}", "your favourite music",
        ("My favourite music is {v}.", "I like to listen to {v}.", "I love listening to {v}.",
         "I listen to {v}.", "The music I like most is {v}.", "I often listen to {v}.",
         "My favorite music is {v}."),
        ("Actually, my favourite music is {v}.", "Now I like to listen to {v}.",
         "No, my favourite music is {v}.", "These days I listen to {v}."),
        ("What is my favourite music?", "What music do I like?", "Which music do I like?",
         "What do I listen to?", "Do you remember my favourite music?", "What's my favorite music?",
         "Do you know what music I like?", "Tell me my favourite music.")),
    "number": Fact(
        "your lucky number is {v}", "your lucky number",
        ("My lucky number is {v}.", "{v} is my lucky number.", "My favourite number is {v}.",
         "The number {v} brings me luck.", "The number I like is {v}."),
        ("Actually, my lucky number is {v}.", "Now my lucky number is {v}.",
         "No, my lucky number is {v}.", "My new lucky number is {v}."),
        ("What is my lucky number?", "What's my lucky number?", "Which number do I like?",
         "Do you remember my lucky number?", "Do you know my lucky number?",
         "Tell me my lucky number.", "What is my favourite number?",
         "Which number brings me luck?")),
    "pet": Fact(
        "you have a {k} named {v}", "whether you have a pet",
        ("I have a {k} named {v}.", "My {k} is called {v}.", "I have a {k} called {v}.",
         "I have a {k}. Its name is {v}.", "My {k}'s name is {v}.", "My pet is a {k} named {v}.",
         "I own a {k} named {v}.", "The name of my {k} is {v}.", "At home I have a {k} named {v}."),
        ("Now I have a {k} named {v}.", "I have a new pet, a {k} named {v}.",
         "I got a new {k} named {v}."),
        ("Do I have a pet?", "What is my pet called?", "What is the name of my pet?",
         "What's my pet's name?", "Do you remember my pet?", "Which pet do I have?",
         "What pet do I have?", "Tell me about my pet.", "Do you know my pet?",
         "How is my pet called?")),
}  # fmt: skip
HELLO = """
Hi|Hello|Hey|Hi!|Hello!|Hey!|Hi there|Hi there!|Hello there!|Good morning|Good morning!|
Good evening|Good evening!|Good afternoon!|Good day!|Greetings!|hi|hello|Hello, how is it going|
Hallo!|Hello friend!|Hi assistant!|Hello again!|Nice to meet you!
"""
HOW_ARE_YOU = """
How are you?|How are you today?|How are you doing?|How is it going?|How do you do?|
Are you well?|How do you feel?|Hi, how are you?|Hello, how are you?|Hey, how are you doing?|
how are you
"""
THANKS = """
Thanks|Thanks!|Thank you|Thank you!|Thanks a lot!|Thank you very much!|Many thanks!|Great, thanks!|
Thank you so much!|Perfect, thank you.|Cool, thanks!|Thanks for your help!|thanks|thank you
"""
BYE = """
Bye|Bye!|Goodbye|Goodbye!|See you!|See you later!|Good night!|I have to go.|I have to go now. Bye!|
See you tomorrow!|Bye bye!|Ciao!|Until next time!|That is all, bye.|bye|Take care!
"""
WHO_ARE_YOU = """
Who are you?|What are you?|What is your name?|What's your name?|Tell me about yourself.|
Are you a human?|Are you a robot?|Are you an AI?|Do you have a name?|Who am I talking to?|
What kind of model are you?|Who is this?|How are you called?|Introduce yourself.|
Are you a language model?|what is your name|who are you|What should I call you?
"""
WHAT_CAN_YOU = """
What can you do?|What can you do for me?|Help!|Help|How can you help me?|What are you able to do?|
What are you good at?|What do you know?|What are your abilities?|Can you help me?|
What can I ask you?|What are you for?|How do I use you?|What can we do?|what can you do
"""
WELL = """
I am fine.|I am fine, thanks.|Fine, thank you.|I am well.|I am good.|I'm good, thanks.|Very good!|
I am great!|I feel good.|I'm fine.|All good.|Great!|Good!
"""
OKAY = "Okay.|OK|Okay|Ok.|Good.|I see.|Alright.|Yes.|No.|Sure.|Fine.|Cool.|Nice.|Great.|Right.|ok"
JOKE = """
Tell me a joke.|Do you know a joke?|Make me laugh.|Tell me something funny.|A joke, please.|
Can you tell me a joke?|tell me a joke
"""
SUMMARY = """
What do you know about me?|Tell me what you know about me.|What did I tell you?|
What have I told you so far?|What do you remember about me?|Summarize what you know about me.|
Tell me everything you know about me.|What have you learned about me?|Sum up what I told you.|
what do you know about me
"""
SMALL_TALK = """
It is raining today.|The weather is nice.|I saw a film yesterday.|I am tired.|I had a long day.|
I went for a walk.|My day was good.|I slept well.|The sun is shining.|I am a bit bored.|
I bought a new {item}.|I met {n} today.|I was in {c} last week.|I ate {f} for lunch.|
I read a book about {c}.|{n} called me today.|My friend {n} is ill.|Tomorrow I will meet {n}.|
My friend {n} lives in {c}.|
My neighbour has a {pet}.|We watched a game yesterday.|
I am happy today.|It was cold this morning.|I cooked {f} yesterday.|I lost my {item}.|
My sister likes {f}.|
I had a dream about {c}.|My brother is called {n}.|The train was late.|It is late.|I am hungry.|
I will go on a trip to {c}.|We went to {c} by train.|My {item} is broken.|I need a break.
"""
UNKNOWN_QUESTIONS = """
What is the capital of {c}?|Who is {n}?|Where is {c}?|What is {x} plus {y}?|How high is Mount {m}?|
Who wrote {b}?|What is the weather in {c}?|What time is it?|What day is it today?|
Who won the game yesterday?|How do I cook {f}?|How do I repair a {item}?|What is a {item}?|
Write a poem about {w}.|Write a story about a {pet}.|Translate {w} into French.|Explain {w} to me.|
What does {w} mean?|How many people live in {c}?|Who is the president of {k}?|
Can you sing a song?|Can you write code?|Write a program that sorts numbers.|
What is the meaning of life?|What is quantum physics?|How far is the moon?|Why is the sky blue?|
Who invented the {item}?|Is there life on Mars?|Which is the best {item}?|
How much does a {item} cost?|What is {x} times {y}?|How do I get to {c}?|
What is the best restaurant in {c}?|Recommend a book.|What should I eat today?|
Give me a recipe for {f}.|Do you like {f}?|Do you like {n}?|What is your favourite colour?|
Where were you born?|Can you dance?|Do you have a {pet}?|Play some {mu}.|Turn on the light.|
Open the window.|Order a {item} for me.|Book a flight to {c}.|Send an email to {n}.|Call {n}.|
Set a timer for {x} minutes.|Who is the mayor of {c}?|When was {n} born?|How do plants grow?|
What is the largest city in {k}?|What language do they speak in {k}?|Is {c} in {k}?|
How old is {n}?|Where does {n} live?|What is the square root of {x}?|Draw a {pet}.|
How does a {item} work?|What happened in {y}?|Name three rivers in {k}.|What is the news today?|
Who painted the {w}?|How can I learn {h}?|What are the rules of {h}?|Solve this equation.|
What is the speed of light?|
How many days has a year?|Define {w}.|Spell {w}.|{w}|
{w} {v}|{w} {v} {z}|{w}?|{x}|{x} {y}|???|...|{w} {v} {z} {w}|Fix my {item}.|
What is the price of {w}?|
Tell me about {c}.|Tell me about {w}.|What do you think about {w}?|Why do people like {f}?|
When does the train to {c} leave?|Compare {c} and {k}.|Which films are on today?|Is {f} healthy?
"""
REPLIES = {
    "how_are_you": "I am fine, thank you. How are you?",
    "thanks": "You are welcome!",
    "who": WHO,
    "can": ABILITIES,
    "well": "I am glad to hear that.",
    "okay": "Is there anything else I can do for you?",
    "joke": "Why did the computer sneeze? It had a virus.",
    "small_talk": "That is interesting. Tell me more.",
    "unknown": OUT_OF_SCOPE,
}


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.replace("\n", "").split("|")]


MESSAGES = {
    "hello": _entries(HELLO),
    "how_are_you": _entries(HOW_ARE_YOU),
    "thanks": _entries(THANKS),
    "bye": _entries(BYE),
    "who": _entries(WHO_ARE_YOU),
    "can": _entries(WHAT_CAN_YOU),
    "well": _entries(WELL),
    "okay": _entries(OKAY),
    "joke": _entries(JOKE),
    "summary": _entries(SUMMARY),
    "small_talk": _entries(SMALL_TALK),
    "unknown": _entries(UNKNOWN_QUESTIONS),
}
VALUES: dict[str, Callable[[World], str]] = {
    "name": lambda w: w.full_name() if w.rng.random() < 0.2 else w.first_name(),
    "age": lambda w: str(w.rng.randint(5, 99)),
    "city": World.city,
    "job": lambda w: w.lower("jobs"),
    "food": lambda w: w.lower("foods"),
    "colour": lambda w: w.lower("colours"),
    "hobby": lambda w: w.lower("hobbies"),
    "music": lambda w: w.lower("music"),
    "number": lambda w: str(w.number(3)),
    "pet": World.first_name,
}


@dataclass
class Chat:
    """One conversation under way; `known` maps the kind of a fact to its clause."""

    sample: Sample
    world: World
    known: dict[str, str]
    name: str | None = None

    def say(self, message: str, reply: str) -> None:
        self.sample.user(message)
        self.sample.reply(reply)

    def small_talk(self, kind: str) -> None:
        message = self.fill(self.world.rng.choice(MESSAGES[kind]))
        greeting = f", {self.name}" if self.name else ""
        if kind == "hello":
            self.say(message, f"Hello{greeting}! How can I help you?")
        elif kind == "bye":
            self.say(message, f"Goodbye{greeting}!")
        elif kind == "summary":
            self.say(message, self._summary())
        else:
            self.say(message, REPLIES[kind])

    def tell(self, kinds: list[str]) -> None:
        """The user tells facts of these kinds, each for the first time."""
        rng = self.world.rng
        told = [self._tell(kind, FACTS[kind].tell) for kind in kinds]
        if len(told) == 2 and rng.random() < 0.5 and told[1].startswith(("My ", "I ", "I'")):
            second = told[1] if told[1][0] == "I" else "m" + told[1][1:]
            message = f"{told[0].rstrip('.!')} and {second}"
        else:
            message = " ".join(m if m.endswith((".", "!")) else m + "." for m in told[:-1])
            message = f"{message} {told[-1]}".strip()
        if rng.random() < 0.12 and message.startswith(("My ", "I ", "I'")):
            message = rng.choice(["Hi! ", "Hello! ", "By the way, ", "Well, ", "So, "]) + (
                message if message[0] == "I" else message[0].lower() + message[1:]
            )
        self.say(message, self._acknowledge(kinds))

    def update(self, kind: str) -> None:
        forms = FACTS[kind].update if self.world.rng.random() < 0.8 else FACTS[kind].tell
        message = self._tell(kind, forms)
        if kind == "name":
            self.say(message, f"Okay, I will call you {self.name}.")
        else:
            self.say(message, f"Okay, now {self.known[kind]}.")

    def ask(self, kind: str) -> None:
        rng = self.world.rng
        message = rng.choice(FACTS[kind].ask)
        if rng.random() < 0.08:
            message = rng.choice(["Okay. ", "Please tell me: ", "One question: ", "So, "]) + message
        if kind in self.known:
            clause = self.known[kind]
            self.say(message, f"{clause[0].upper()}{clause[1:]}.")
        else:
            self.say(message, f"You have not told me {FACTS[kind].unknown} yet.")

    def _tell(self, kind: str, forms: tuple[str, ...]) -> str:
        world = self.world
        value, pet = VALUES[kind](world), world.lower("pets")
        self.known[kind] = FACTS[kind].clause.format(v=value, k=pet)
        if kind == "name":
            self.name = value
        form = world.rng.choice(forms)
        message = form.format(v=value, k=pet)
        vowel = (pet if "{k}" in form else value)[0] in "aeiou"
        if vowel and " a {" in form:
            message = message.replace(" a ", " an ", 1)
        return message

    def _acknowledge(self, kinds: list[str]) -> str:
        clauses = [self.known[kind] for kind in kinds if kind != "name"]
        hello = f"Nice to meet you, {self.name}!" if "name" in kinds else ""
        got = f"Got it, {' and '.join(clauses)}." if clauses else ""
        return f"{hello} {got}".strip()

    def _summary(self) -> str:
        if not self.known:
            return "You have not told me anything yet."
        clauses = [self.known[kind] for kind in FACTS if kind in self.known]
        listed = ", ".join(clauses[:-1]) + " and " + clauses[-1] if len(clauses) > 1 else clauses[0]
        return f"You told me that {listed}."

    def fill(self, form: str) -> str:
        if "{" not in form:
            return form
        world = self.world
        return form.format(
            n=world.first_name(), c=world.city(), k=world.country(), m=world.made_up(),
            f=world.pick("foods"), item=world.pick("items"), pet=world.pick("pets"),
            b=world.book(), h=world.pick("hobbies"), mu=world.pick("music"), x=world.number(3),
            y=world.number(4), w=world.syllables(1, 3), v=world.syllables(1, 3),
            z=world.syllables(1, 2),
        )  # fmt: skip


def chat_sample(world: World, max_turns: int = 10) -> Sample:
    """A chat of at most `max_turns` turns; facts are told early, asked for later."""
    rng = world.rng
    sample = Sample("chat")
    if rng.random() < 0.5:
        sample.system(rng.choice(SYSTEMS))
    chat = Chat(sample, world, {})
    turns = rng.randint(1, max_turns)
    for turn in range(turns):
        if turn == 0 and rng.random() < 0.4:
            chat.small_talk("hello" if rng.random() < 0.7 else "how_are_you")
        elif turn > 0 and turn == turns - 1 and rng.random() < 0.3:
            chat.small_talk("bye")
        else:
            _turn(chat, rng)
    return sample


def chat_summary_sample(world: World) -> Sample:
    """Facts told, changed and summed up again and again: for training only, as a summary of many
    facts is the hardest reply."""
    sample = Sample("chat")
    chat = Chat(sample, world, {})
    for _ in range(world.rng.randint(3, 7)):
        _turn(chat, world.rng, [35, 0, 6, 8 if chat.known else 0, 35, 8, 4])
    return sample


def _turn(chat: Chat, rng: random.Random, weights: list[int] | None = None) -> None:
    """One message and its reply; `weights` are those of the moves below."""
    new = [kind for kind in FACTS if kind not in chat.known]
    move = rng.choices(
        ["tell", "ask", "ask_new", "update", "summary", "talk", "unknown"],
        weights=weights
        or [30, 8 + 10 * min(len(chat.known), 3), 12, 2 + len(chat.known), 9, 12, 9],
    )[0]
    if move == "tell" and new:
        weights = [4 if kind == "name" else 2 if kind == "city" else 1 for kind in new]
        kinds = list(dict.fromkeys(rng.choices(new, weights=weights, k=rng.choice([1, 1, 2]))))
        chat.tell(kinds)
    elif move == "ask" and chat.known:
        chat.ask(rng.choice(list(chat.known)))
    elif move == "ask_new" and new:
        chat.ask(rng.choice(new))
    elif move == "update" and chat.known:
        chat.update(rng.choice(list(chat.known)))
    elif move == "summary":
        chat.small_talk("summary")
    elif move == "unknown":
        chat.small_talk("unknown")
    else:
        kinds = [kind for kind in MESSAGES if kind not in ("bye", "summary", "unknown")]
        chat.small_talk(rng.choice([*kinds, "small_talk"]))
