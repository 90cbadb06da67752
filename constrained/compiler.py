"""Compiles a grammar spec to a matchable form; reports the chosen path and the reason.

Runs in a worker process: its result is plain data, and running out of time is an error of that
grammar alone.

    regex, choices, GBNF ----------> Grammar --regular-------------> Dfa         path "fsm"
                                        |--recursive or large------> Lark text   path "pushdown"
    JSON Schema, structural tags --> Grammar --soon there----------> Dfa         path "fsm"
                                        |--recursive or large------> FlatGrammar path "lazy"
                                        |--long counts, much work--> Lark text   path "pushdown"
    Lark of the caller's ------------------------------------------------^

The engine follows the first by itself, and the second while that takes little
(`serving/light_grammar.py`); the others in processes of their own (`serving/parsers.py`).

`backends.py` compiles for `--grammar-backend`.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidGrammar, UnsupportedSchema
from .backends import compile_by_backend
from .compiled_grammar import CompiledGrammar
from .gbnf import is_gbnf, read_gbnf
from .grammar import Grammar, alt
from .grammar import Literal as Text
from .lark import json_to_lark, regular_to_lark
from .lark_reader import swallowing_terminals
from .lazy import LazyAutomaton
from .lexing import rules_to_lark
from .native.bindings import library
from .pushdown import check_lark
from .regular.build import NotRegular, TooManyStates, build_dfa
from .regular.compiled import compiled_dfa
from .regular.dfa import Dfa
from .regular.flat_grammar import flat_grammar
from .regular.limits import Budget
from .regular.regex_parser import parse_regex
from .spec import GrammarSpec
from .tag_contents import parse_tags
from .unique_items import item_tokens
from .unique_keys import key_tokens
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from .schema.parameters import Parameter, ParameterStyle
    from .schema.schema_grammar import SchemaGrammar


# Of an automaton that the engine follows itself: as safe as it is fast, since no output can make it
# do more.
SMALL_STATES = 4_000
SMALL_CPU_S = 0.01
# Of one that is made on the way: to see whether an intersection is empty may take a search through
# all that is counted in it.
MAX_COUNT = 8_000


@dataclass(frozen=True, slots=True)
class Limits:
    """The cost bounds of one compilation, beyond which the parser takes over."""

    max_states: int = 50_000
    max_cpu_s: float = 1.0


def compile_grammar(spec: GrammarSpec, limits: Limits = Limits()) -> CompiledGrammar:
    """Raises InvalidGrammar or UnsupportedSchema; `field` is the spec's kind."""
    try:
        if spec.backend != "stemma":
            return compile_by_backend(spec)
        return _COMPILERS[spec.kind](spec, limits)
    except UnsupportedSchema:
        raise
    except InvalidGrammar as error:
        if error.field is not None:
            raise
        raise InvalidGrammar(f"{spec.kind}: {error}", spec.kind) from error
    except TooManyStates as error:
        raise InvalidGrammar(f"{spec.kind}: too large: {error}", spec.kind) from error
    except RecursionError:
        raise InvalidGrammar(f"{spec.kind}: nested too deeply", spec.kind) from None


def prepare(vocabulary: Vocabulary) -> None:
    """Build now what would delay the first automaton, or the first one of each process forked."""
    key_tokens(vocabulary)
    item_tokens(vocabulary)
    _ = vocabulary.max_token_bytes, vocabulary.writes_all_bytes
    out = np.empty(vocabulary.num_words, np.uint32)
    compile_grammar(GrammarSpec("regex", "a?")).bind(vocabulary).matcher().mask(out)


def _regex(spec: GrammarSpec, limits: Limits) -> CompiledGrammar:
    expression = parse_regex(spec.source, dialect="extended", anchored=True)
    return _of_grammar(Grammar.of(expression), limits, regular_to_lark)


def _choices(spec: GrammarSpec, limits: Limits) -> CompiledGrammar:
    choices = _json(spec)
    if not isinstance(choices, list) or not all(isinstance(text, str) for text in choices):
        raise InvalidGrammar("a JSON array of texts is expected")
    if any(not _is_text(choice) for choice in choices):
        raise InvalidGrammar("lone surrogates are no text")
    return _of_grammar(Grammar.of(alt(*map(Text, choices))), limits, regular_to_lark)


def _ebnf(spec: GrammarSpec, limits: Limits) -> CompiledGrammar:
    if is_gbnf(spec.source):
        read = read_gbnf(spec.source)
        compiled = _of_grammar(read.grammar, limits, rules_to_lark)
        return replace(compiled, warnings=(*read.warnings, *compiled.warnings))
    warnings = (*check_lark(spec.source), *swallowing_terminals(spec.source))
    reason = "a grammar of the caller's own rules"
    return CompiledGrammar("pushdown", reason, lark=spec.source, warnings=warnings)


def _json_schema(spec: GrammarSpec, limits: Limits) -> CompiledGrammar:
    made = _schema_grammar(_json(spec), spec)
    compiled = _on_the_way(made.grammar, limits, json_to_lark)
    return replace(
        compiled,
        warnings=made.warnings,
        schema=spec.source if spec.is_lenient else None,
        needs_unique_keys=made.needs_unique_keys,
        has_patterned_keys=made.has_patterned_keys,
        item_places=made.item_places,
    )


def _json_object(spec: GrammarSpec, limits: Limits) -> CompiledGrammar:
    made = _schema_grammar({"type": "object"}, spec)
    compiled = _on_the_way(made.grammar, limits, json_to_lark)
    return replace(compiled, needs_unique_keys=made.needs_unique_keys)


def _structural_tag(spec: GrammarSpec, limits: Limits) -> CompiledGrammar:
    from .structural_tags import TagGrammar  # as schema_grammar below

    schemas = _TagSchemas(spec)
    tags = TagGrammar(parse_tags(_json(spec)), schemas)
    # Rules of a caller's may be left recursive, or ambiguous without bound.
    make = _of_grammar if tags.has_rules else _on_the_way
    compiled = make(tags.grammar(), limits, lambda _: tags.lark())
    warnings = (*schemas.warnings, *tags.warnings, *compiled.warnings)
    return replace(compiled, warnings=warnings)


class _TagSchemas:
    """Compiles the schemas of tags as the spec asks, and keeps the warnings. What is said of a
    schema points into the tag, not into the schema."""

    def __init__(self, spec: GrammarSpec) -> None:
        self._spec = spec
        self.warnings: list[str] = []

    def document(self, schema: object, pointer: str) -> Grammar:
        with _pointing_from(pointer):
            made = _schema_grammar(schema, self._spec, watches_items=False)
        self._warn(pointer, made.warnings)
        return made.grammar

    def parameters(
        self, schema: object, style: ParameterStyle, pointer: str
    ) -> Sequence[Parameter]:
        from .schema.parameters import ParameterOptions, parameters_of

        spec = self._spec
        options = ParameterOptions(
            spec.whitespace, spec.property_order, spec.is_lenient, spec.formats == "enforce"
        )
        with _pointing_from(pointer):
            found, warnings = parameters_of(schema, style, options)
        self._warn(pointer, warnings)
        return found

    def _warn(self, pointer: str, warnings: Sequence[str]) -> None:
        self.warnings.extend(_from(pointer, warning) for warning in warnings)


@contextlib.contextmanager
def _pointing_from(pointer: str) -> Iterator[None]:
    """Refusals of the schema at `pointer` name places from the root of what it is in."""
    try:
        yield
    except UnsupportedSchema as error:
        raise UnsupportedSchema(
            pointer + error.pointer, error.keyword, error.reason, error.remedy
        ) from error
    except InvalidGrammar as error:
        raise InvalidGrammar(_from(pointer, str(error)), error.field) from error


def _from(pointer: str, message: str) -> str:
    """A message that begins with a pointer from the schema's root, "/" where it is that."""
    if not message.startswith("/"):
        return f"{pointer}: {message}"
    return pointer + message.removeprefix("/" if message.startswith("/:") else "")


def _schema_grammar(
    schema: object, spec: GrammarSpec, *, watches_items: bool = True
) -> SchemaGrammar:
    from .schema.schema_grammar import schema_grammar  # import takes 0.1 s, needed only to compile

    return schema_grammar(
        schema,
        whitespace=spec.whitespace,
        property_order=spec.property_order,
        asserts_format=spec.formats == "enforce",
        is_lenient=spec.is_lenient,
        watches_items=watches_items,
    )


_COMPILERS: dict[str, Callable[[GrammarSpec, Limits], CompiledGrammar]] = {
    "regex": _regex,
    "choices": _choices,
    "json_schema": _json_schema,
    "json_object": _json_object,
    "ebnf": _ebnf,
    "structural_tag": _structural_tag,
}


def _on_the_way(
    grammar: Grammar, limits: Limits, to_lark: Callable[[Grammar], str]
) -> CompiledGrammar:
    """A small automaton where there soon is one; one that is made on the way; what that cannot hold
    goes to the parser."""
    native = library()
    if native is None:
        return _of_grammar(grammar, limits, to_lark)
    flat = flat_grammar(grammar)
    small = Budget.of(min(limits.max_states, SMALL_STATES), min(limits.max_cpu_s, SMALL_CPU_S))
    with contextlib.suppress(NotRegular, TooManyStates):
        return _of_dfa(compiled_dfa(flat, small, native))
    if (most := flat.largest_count) > MAX_COUNT:
        return _of_lark(to_lark(grammar), f"something may come {most} times: too many states")
    began_s = time.thread_time()
    try:
        automaton = LazyAutomaton(flat, Budget.of(limits.max_states, limits.max_cpu_s))
    except (NotRegular, TooManyStates) as error:
        reason = f"too large for an automaton: {error}"
        try:
            return _of_lark(to_lark(grammar), reason)
        except InvalidGrammar as refusal:
            remedy = (
                "smaller counts (`minLength`, `maxLength`, repetitions in a `pattern`) where "
                "`pattern`, `format` or `not` ask for more of the same text"
            )
            raise InvalidGrammar(f"{reason}; for the parser: {refusal}; remedy: {remedy}") from None
    if automaton.is_empty:
        raise InvalidGrammar("it matches nothing")
    automaton.is_accepting(automaton.start)  # makes the first transitions
    if automaton.has_failed:
        return _of_lark(to_lark(grammar), "too many rules without a byte between them")
    reason = f"{len(flat.rule_names)} rules, states as they are reached"
    is_soon_begun = time.thread_time() < began_s + SMALL_CPU_S
    return CompiledGrammar("lazy", reason, rules=flat, is_soon_begun=is_soon_begun)


def _of_grammar(
    grammar: Grammar, limits: Limits, to_lark: Callable[[Grammar], str]
) -> CompiledGrammar:
    """An automaton where one exists within the limits, else a grammar for the parser."""
    try:
        dfa = build_dfa(grammar, max_states=limits.max_states, max_cpu_s=limits.max_cpu_s)
    except NotRegular as error:
        reason = f"recursive: {error}"
    except TooManyStates as error:
        reason = f"too large for an automaton: {error}"
    else:
        return _of_dfa(dfa)
    return _of_lark(to_lark(grammar), reason)


def _of_dfa(dfa: Dfa) -> CompiledGrammar:
    if dfa.is_empty:
        raise InvalidGrammar("it matches nothing")
    return CompiledGrammar("fsm", f"regular, {dfa.num_states} states", dfa=dfa)


def _of_lark(lark: str, reason: str) -> CompiledGrammar:
    return CompiledGrammar("pushdown", reason, lark=lark, warnings=check_lark(lark))


def _json(spec: GrammarSpec) -> object:
    try:
        return json.loads(spec.source)
    except ValueError as error:
        raise InvalidGrammar(f"not JSON: {error}") from error


def _is_text(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
