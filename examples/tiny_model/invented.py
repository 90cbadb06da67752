"""Made-up tools, which leave a model nothing to go by but what it is told of them."""

from tool_kinds import Kind, Parameter, Tool, Value
from tool_words import KEYS, NOUNS, VERBS, code, decimal
from world import World, is_held_out


def invented_tool(world: World) -> Tool:
    """A tool that no list has: its name, its parameters and the words of its questions."""
    rng = world.rng
    style = rng.random()
    while True:
        verb = rng.choice(VERBS) if style < 0.8 else world.syllables()
        noun = rng.choice(NOUNS) if rng.random() < 0.6 else world.syllables()
        if is_held_out(f"{verb}_{noun}") == world.held_out:
            break
    num = rng.choices([0, 1, 2, 3], weights=[4, 40, 36, 20])[0]
    keys: list[str] = []
    while len(keys) < num:
        key = rng.choice(KEYS) if rng.random() < 0.6 else world.syllables(1, 1)
        keys += [key] if key not in keys and key != noun else []
    parameters = tuple(_invented_parameter(key, world) for key in keys)
    required = [p for p in parameters if not p.clause]
    told = ["the {0} {{{0}}}", "{0} {{{0}}}", "{0} = {{{0}}}"]
    form = rng.choice(told)
    parts = [form.format(p.key) for p in required]
    clause = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    subject = rng.choice([f"the {noun}", f"the {noun}", f"a {noun}", f"my {noun}"])
    asks = [f"{verb} {subject}", f"please {verb} {subject}", f"can you {verb} {subject}",
            f"{verb} {subject} for me", f"I want to {verb} {subject}"]  # fmt: skip
    joins = ["with", "with", "for", "using", "where"]
    questions = []
    for text in asks:
        join = rng.choice(joins)
        end = "?" if text.startswith("can") else "."
        joined = f"{text} {join} {clause}" if clause else text
        questions.append(f"{joined}{end}")
    if len(required) == 1 and rng.random() < 0.6:
        key = required[0].key
        questions = [f"what is the {noun} of {{{key}}}?", f"{verb} the {noun} of {{{key}}}.",
                     f"{verb} the {noun} for {{{key}}}.", f"{verb} {noun} {{{key}}}.",
                     f"please {verb} the {noun} {{{key}}}."]  # fmt: skip
        if not noun_is_asked(verb):
            questions = questions[1:]
    name = rng.choice([f"{verb}_{noun}"] * 4 + [f"{verb}{noun.capitalize()}", f"{noun}_{verb}"])
    described = rng.choice([
        f"{verb.capitalize()} a {noun}.", f"{verb.capitalize()} the {noun}.",
        f"{verb.capitalize()} the {noun} by {' and '.join(keys) or 'itself'}.",
        f"Use this to {verb} a {noun}.", "",
    ])  # fmt: skip
    kind = Kind((name,), (described,), parameters, tuple(questions), _any_result, "")
    return Tool(name, described, kind, {p.key: p.key for p in parameters})


def noun_is_asked(verb: str) -> bool:
    """Whether "What is the NOUN of ...?" is a question for a tool with this verb."""
    return verb in ("get", "find", "check", "fetch", "show", "read", "count", "measure", "estimate")


def _invented_parameter(key: str, world: World) -> Parameter:
    rng = world.rng
    clause = rng.choice([f"with {key} {{{key}}}", f"and {key} {{{key}}}", f"at {key} {{{key}}}"])
    clause = clause if rng.random() < 0.2 else ""
    style = rng.random()
    if style < 0.2:
        return Parameter(key, (key,), lambda w: w.number(4), "integer", clause=clause)
    if style < 0.3:
        return Parameter(key, (key,), decimal, "number", clause=clause)
    if style < 0.36:
        return Parameter(key, (key,), lambda w: w.rng.random() < 0.5, "boolean", clause=clause)
    if style < 0.48:
        words = tuple(dict.fromkeys(
            rng.choice([world.syllables(), world.pick("colours"), rng.choice(NOUNS)])
            for _ in range(rng.randint(2, 3))))  # fmt: skip
        return Parameter(key, (key,), lambda w: w.rng.choice(words), choices=words, clause=clause)
    maker = rng.choice([World.made_up, World.full_name, World.city, World.company, World.item,
                        World.other_word, World.other_word, World.date, code, World.first_name,
                        World.place])  # fmt: skip
    return Parameter(key, (key,), maker, clause=clause)


def _any_result(world: World, values: dict[str, Value]) -> str:
    rng = world.rng
    makers = [World.full_name, World.made_up, World.date, World.price, World.item, code,
              lambda w: str(w.number(5)), lambda w: f"{w.number(3)} {w.pick('things')}",
              World.place, World.time]  # fmt: skip
    return rng.choice(["ok", "done", *(rng.choice(makers)(world) for _ in range(6))])
