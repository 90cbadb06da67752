"""Structural tags as a grammar: free text until a trigger, then a tag with its content, and so on.

All of it is one grammar of expressions, so that it becomes an automaton where its contents are
regular, and else rules for the parser that no lexer misreads (`lexing.py`). Free text is bounded by
what must not occur in it, as in an Aho-Corasick automaton: it goes on to where the first of the
triggers, or of the ends of the tag around it, ends.

    until X    any text that ends with X, and in which no X ends before: no such text begins another
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from ..errors import InvalidGrammar
from .gbnf import read_gbnf
from .grammar import (
    EMPTY_WORD,
    NOTHING,
    Alt,
    And,
    Chars,
    Concat,
    Expression,
    Grammar,
    Literal,
    Not,
    Ref,
    Repeat,
    alt,
    concat,
    optional,
    repeat,
)
from .lark import json_cuts, with_whole_numbers
from .lexing import rules_to_lark
from .regular.charsets import ALL
from .regular.languages import is_known_empty
from .regular.regex_parser import parse_regex
from .schema.parameters import Parameter, ParameterStyle
from .tag_contents import (
    AnyText,
    Content,
    Dispatched,
    InSequence,
    OneOf,
    Parameters,
    Pattern,
    Repeated,
    Rules,
    SchemaDocument,
    Tag,
    Text,
)

START = "tags"
_ANY = Chars(ALL)
_ANY_TEXT = Repeat(_ANY, 0, None)


class Schemas(Protocol):
    """Compiles what contents say of schemas."""

    def document(self, schema: object, pointer: str) -> Grammar:
        """The grammar of the documents of a schema, which stands at `pointer`."""

    def parameters(
        self, schema: object, style: ParameterStyle, pointer: str
    ) -> Sequence[Parameter]:
        """An object's properties."""


class TagGrammar:
    """The grammar of structural tags. Raises InvalidGrammar."""

    def __init__(self, content: Content, schemas: Schemas) -> None:
        self._schemas = schemas
        self._rules: dict[str, Expression] = {}
        self._documents: dict[str, Grammar] = {}  # of JSON, by the prefix of their rules
        self._known: dict[str, Expression] = {}
        self.warnings: list[str] = []
        self.has_rules = False  # of a caller's own
        self._rules[START] = self._expression(content)
        if self._rules[START] == EMPTY_WORD:
            raise InvalidGrammar("it matches no text but the empty one")

    def grammar(self) -> Grammar:
        """Of all of it."""
        return Grammar(self._rules, START)

    def lark(self) -> str:
        """The same for the parser. Raises InvalidGrammar."""
        rules, cuts = dict(self._rules), dict[Expression, tuple[Expression, ...]]()
        documents: set[str] = set()
        for prefix, grammar in self._documents.items():
            whole = _renamed(with_whole_numbers(grammar), prefix)
            cuts |= json_cuts(whole)
            documents |= whole.rules.keys()
            rules |= whole.rules  # those that it has no more are reached by none
        return rules_to_lark(Grammar(rules, START), cuts, documents)

    def _expression(self, content: Content) -> Expression:
        """The texts of a content that nothing around bounds."""
        match content:
            case Text(value):
                return Literal(value)
            case Pattern(source):
                return parse_regex(source, dialect="python", anchored=True)
            case Rules(source):
                return self._once(source, "grammar", lambda: self._own_rules(source))
            case SchemaDocument(schema, pointer):
                return self._once(schema, "", lambda: self._document(schema, pointer))
            case Parameters(schema, style, pointer):
                parameters = partial(self._parameters, schema, style, pointer)
                return self._once(schema, repr(style), parameters)
            case InSequence(parts):
                return _sequence(*map(self._expression, parts))
            case OneOf(parts):
                return alt(*map(self._expression, parts))
            case Repeated(part, least, most):
                return repeat(self._expression(part), least, most)
            case AnyText(excludes):
                return _bounded(content, _free(excludes))
            case Tag(begin, inner, ends):
                return _sequence(Literal(begin), self._ended(inner, ends))
            case Dispatched(excludes=excludes):
                return self._dispatched(content, _free((*_triggers(content), *excludes)))

    def _ended(self, content: Content, ends: tuple[str, ...]) -> Expression:
        """The texts of a content with one of `ends` behind, which ends its free text."""
        found = tuple(filter(None, ends))
        match content:
            case AnyText(excludes) if found:
                if "" in ends:
                    return alt(self._expression(content), self._ended(content, found))
                bounded = (
                    _bounded(content, _until((end,), found, excludes), len(end)) for end in found
                )
                return alt(*bounded)
            case Dispatched(excludes=excludes) if found:
                if "" in ends:
                    return alt(self._expression(content), self._ended(content, found))
                last = _until(found, (*_triggers(content), *found), excludes)
                return self._dispatched(content, last, found)
            case InSequence(parts) if parts:
                before = map(self._expression, parts[:-1])
                return _sequence(*before, self._ended(parts[-1], ends))
            case OneOf(parts):
                return alt(*(self._ended(part, ends) for part in parts))
            case Repeated(AnyText() as part, 0 | 1, None):
                return self._ended(part, ends)  # any number of texts is one
            case _:
                return _sequence(self._expression(content), alt(*map(Literal, ends)))

    def _dispatched(
        self, content: Dispatched, last: Expression, ends: tuple[str, ...] = ()
    ) -> Expression:
        """`last`: free text that no trigger follows; with `ends`, these are behind the whole."""
        triggers = _triggers(content)
        stops = (*triggers, *ends)
        free, bare = [], []  # tags with text before them, and without
        for trigger, inner in content.rules:
            head = _until((trigger,), stops, content.excludes)
            if is_known_empty(head):
                raise InvalidGrammar(
                    f"trigger {trigger!r} never comes: another, an end or an excluded text is in it"
                )
            behind = self._expression(inner)
            free.append(_sequence(head, behind))
            bare.append(_sequence(Literal(trigger), behind))
        first = alt(*(free if content.begins_free or not content.is_required else bare))
        if content.is_repeated:
            more = _sequence(repeat(alt(*free), 0), last)
            return _sequence(first, more) if content.is_required else more
        whole = _sequence(first, alt(*map(Literal, ends)) if ends else EMPTY_WORD)
        return whole if content.is_required else alt(whole, last)

    def _document(self, schema: object, pointer: str) -> Expression:
        grammar = self._schemas.document(schema, pointer)
        reference, prefix = self._merged(grammar)
        self._documents[prefix] = grammar
        return reference

    def _own_rules(self, source: str) -> Expression:
        read = read_gbnf(source)
        self.has_rules = True
        self.warnings += read.warnings
        return self._merged(read.grammar)[0]

    def _parameters(self, schema: object, style: ParameterStyle, pointer: str) -> Expression:
        found = self._schemas.parameters(schema, style, pointer)
        items = [self._item(each, style) for each in found]
        behind: Expression = EMPTY_WORD  # what may come behind an item
        choices: Expression = EMPTY_WORD  # how the whole may begin
        for item, each in zip(reversed(items), reversed(found), strict=True):
            first = concat(item, behind)
            choices = first if each.is_required else alt(first, choices)
            more = concat(Literal(style.separator), item)
            behind = self._named(concat(more if each.is_required else optional(more), behind))
        gap = optional(Literal(style.gap)) if style.gap else EMPTY_WORD
        return self._named(concat(gap, choices)) if items else EMPTY_WORD

    def _item(self, parameter: Parameter, style: ParameterStyle) -> Expression:
        gap = optional(Literal(style.gap)) if style.gap else EMPTY_WORD
        end = concat(gap, Literal(style.value_end), gap)
        values: list[Expression] = []
        if parameter.flat is not None:
            values.append(concat(self._merged(parameter.flat)[0], end))
        if parameter.nested is not None:
            reference, prefix = self._merged(parameter.nested)
            self._documents[prefix] = parameter.nested
            values.append(concat(reference, end))
        begin = Literal(f"{style.key_begin}{parameter.name}{style.key_end}")
        return self._named(concat(begin, gap, alt(*values)))

    def _merged(self, grammar: Grammar) -> tuple[Ref, str]:
        """Take over a grammar's rules; a reference to its start, and the prefix of their names."""
        prefix = f"{len(self._rules)}."
        renamed = _renamed(grammar, prefix)
        self._rules |= renamed.rules
        return Ref(renamed.start), prefix

    def _named(self, expression: Expression) -> Expression:
        name = f"{len(self._rules)}:"
        self._rules[name] = expression
        return Ref(name)

    def _once(self, source: object, how: str, make: Callable[[], Expression]) -> Expression:
        key = json.dumps([how, source])
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]


def _triggers(content: Dispatched) -> tuple[str, ...]:
    return tuple(trigger for trigger, _ in content.rules)


def _sequence(*parts: Expression) -> Expression:
    """As `concat`, but texts stay apart: a parser's terminals may end where one of them does."""
    flat: list[Expression] = []
    for part in parts:
        flat += part.parts if isinstance(part, Concat) else (part,)
    if NOTHING in flat:
        return NOTHING
    some = [part for part in flat if part != EMPTY_WORD]
    return some[0] if len(some) == 1 else Concat(tuple(some)) if some else EMPTY_WORD


def _until(ends: Sequence[str], stops: Sequence[str], excludes: Sequence[str]) -> Expression:
    """Texts that end with one of `ends`, where the first of `stops` ends."""
    texts = concat(_ANY_TEXT, alt(*map(Literal, ends)))
    early = concat(_ANY_TEXT, alt(*map(Literal, stops)), Repeat(_ANY, 1, None))
    parts = [texts, Not(early)]
    if excludes:
        parts.append(Not(concat(_ANY_TEXT, alt(*map(Literal, excludes)), _ANY_TEXT)))
    return And(tuple(parts))


def _free(excludes: Sequence[str]) -> Expression:
    """Texts in which none of these occurs."""
    if not excludes:
        return _ANY_TEXT
    return Not(concat(_ANY_TEXT, alt(*map(Literal, excludes)), _ANY_TEXT))


def _bounded(content: AnyText, text: Expression, num_more: int = 0) -> Expression:
    """Of at most so many characters, with others behind that do not count."""
    if content.max_chars is None:
        return text
    return And((text, Repeat(_ANY, 0, content.max_chars + num_more)))


def _renamed(grammar: Grammar, prefix: str) -> Grammar:
    """The same grammar with other names; shared parts stay shared."""
    known: dict[int, Expression] = {}

    def of(expression: Expression) -> Expression:
        found = known.get(id(expression))
        if found is None:
            found = known[id(expression)] = _with_names(expression, of, prefix)
        return found

    rules = {prefix + name: of(e) for name, e in grammar.rules.items()}
    return Grammar(rules, prefix + grammar.start)


def _with_names(
    expression: Expression, of: Callable[[Expression], Expression], prefix: str
) -> Expression:
    match expression:
        case Ref(name):
            return Ref(prefix + name)
        case Repeat(part, least, most):
            return Repeat(of(part), least, most)
        case Not(part):
            return Not(of(part))
        case Concat(parts):
            return Concat(tuple(map(of, parts)))
        case Alt(parts):
            return Alt(tuple(map(of, parts)))
        case And(parts):
            return And(tuple(map(of, parts)))
        case _:
            return expression
