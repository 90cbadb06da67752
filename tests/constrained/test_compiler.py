"""From a caller's words to a bound grammar, the path it takes, and every way to fail."""

from __future__ import annotations

import json
import pickle
import time
from decimal import Decimal

import pytest
from grammars import SINGLE_BYTES, vocabulary_of

from stemma.constrained.compiled_grammar import CompiledGrammar
from stemma.constrained.compiler import Limits, compile_grammar, prepare
from stemma.constrained.lark import json_to_lark
from stemma.constrained.matcher import BoundGrammar
from stemma.constrained.native.bindings import library
from stemma.constrained.schema.schema_grammar import schema_grammar
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.unique_keys import key_tokens
from stemma.errors import InvalidGrammar, UnsupportedSchema

TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["v", "kids"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
TAGS = {
    "triggers": ["<f="],
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"enum": ["x"]}, "end": "</f>"},
    ],
}


def spec_of(kind: str, source: object = "") -> GrammarSpec:
    text = source if isinstance(source, str) else json.dumps(source)
    return GrammarSpec(kind, text)  # type: ignore[arg-type]


def nested_arrays(depth: int) -> dict[str, object]:
    schema: dict[str, object] = {"type": "array", "maxItems": 0}
    for _ in range(depth - 1):
        schema = {"type": "array", "items": schema}
    return schema


def bound(spec: GrammarSpec, *limits: Limits) -> BoundGrammar:
    compiled = pickle.loads(pickle.dumps(compile_grammar(spec, *limits)))  # it crosses processes
    grammar: BoundGrammar = compiled.bind(SINGLE_BYTES)
    return grammar


def parsed_json(schema: object) -> BoundGrammar:
    """The schema's grammar, followed by the parser."""
    lark = json_to_lark(schema_grammar(schema).grammar)
    return CompiledGrammar("pushdown", "", lark=lark).bind(SINGLE_BYTES)


def matches(grammar: BoundGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.consume(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("spec", "path", "yes", "no"),
    [
        (spec_of("regex", "[a-z]+@x"), "fsm", ["a@x"], ["a@", "@x", "a@xx"]),
        (spec_of("choices", ["yes", "no", "日本"]), "fsm", ["yes", "日本"], ["ye", "maybe", ""]),
        (spec_of("json_schema", {"type": "integer"}), "fsm", ["0", "-12"], ["01", "1.5", ""]),
        (spec_of("json_schema", TREE), "lazy",
         ['{"v":1,"kids":[]}', '{"v":1,"kids":[{"v":2,"kids":[]}]}'], ['{"v":1}', "[]"]),
        (spec_of("json_schema", nested_arrays(100)), "lazy", ["[" * 50 + "]" * 50], ["[1]"]),
        (spec_of("json_object"), "lazy", ["{}", '{"a":[1,{"b":null}]}'], ["[]", "1", "{"]),
        (spec_of("ebnf", 'start: "a" start "b" | "c"'), "pushdown", ["c", "aacbb"], ["acbb", "ab"]),
        (spec_of("ebnf", 'root ::= "(" root ")" | [0-9]+'), "pushdown", ["7", "((1))"], ["(1"]),
        (spec_of("ebnf", 'start: "::=" x\nx: "root ::= y"'), "pushdown", ["::=root ::= y"], [""]),
        (spec_of("ebnf", '# x\n  root-1::= "a"\nroot ::= root-1 "b"'), "fsm", ["ab"], ["a"]),
        (spec_of("ebnf", 'start: start "a" | "b"'), "pushdown", ["b", "baaa"], ["a", ""]),
        (spec_of("structural_tag", TAGS), "fsm",
         ["", "hi <b>", "<f=a>12</f>", 'so: <f=b>"x"</f> and <f=a>0</f>.'],
         ["<f=", "<f=c>", "<f=a>x</f>", "<f=a>1</f", "a <f=b>1</f>"]),
    ],
)  # fmt: skip
def test_a_grammar_takes_its_path_and_matches_its_texts(
    spec: GrammarSpec, path: str, yes: list[str], no: list[str]
) -> None:
    grammar = bound(spec)
    assert grammar.path == path and grammar.reason
    assert [text for text in yes if not matches(grammar, text)] == []
    assert [text for text in no if matches(grammar, text)] == []


@pytest.mark.parametrize("at_least_one", [False, True])
@pytest.mark.parametrize("stop_after_first", [False, True])
def test_triggered_tags_come_as_often_as_they_say(
    at_least_one: bool, stop_after_first: bool
) -> None:
    content = {"type": "json_schema", "json_schema": {"type": "integer"}}
    tags = {
        "type": "triggered_tags",
        "triggers": ["<t>"],
        "tags": [{"begin": "<t>", "content": content, "end": "</t>"}],
        "at_least_one": at_least_one,
        "stop_after_first": stop_after_first,
    }
    grammar = bound(spec_of("structural_tag", {"type": "structural_tag", "format": tags}))
    assert matches(grammar, "none") == (not at_least_one)
    assert matches(grammar, "one <t>1</t>") == (not at_least_one)
    assert matches(grammar, "<t>1</t>")
    assert matches(grammar, "<t>1</t> rest") == (not stop_after_first)
    assert matches(grammar, "<t>1</t><t>2</t>") == (not stop_after_first)


@pytest.mark.parametrize("is_lenient", [False, True])
@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"type": "string", "format": "uri", "minLength": 1, "maxLength": 2083},  # pydantic HttpUrl
         ["http://a.b/c?d=e", "x:" + "y" * 2081], ["", "a b", "x:" + "y" * 2082]),
        ({"type": "string", "format": "email", "maxLength": 320}, ["a@b.c"], ["a", "@b"]),
        ({"type": "string", "pattern": r"^\p{L}+$", "maxLength": 255},
         ["é", "a" * 255], ["", "a1", "a" * 256]),
        ({"type": "string", "not": {"format": "uri"}, "maxLength": 2083}, ["a b"], ["a:b"]),
        ({"type": "object", "propertyNames": {"pattern": r"^\p{L}+$", "maxLength": 255}},
         [{}, {"é": 1, "b": 2}], [{"": 1}, {"a1": 1}]),
    ],
)  # fmt: skip
def test_a_string_too_large_for_a_whole_automaton_is_followed_all_the_same(
    schema: object, yes: list[object], no: list[object], is_lenient: bool
) -> None:
    grammar = bound(GrammarSpec("json_schema", json.dumps(schema), is_lenient=is_lenient))
    assert grammar.path == "lazy"
    texts = [json.dumps(value, ensure_ascii=False, separators=(",", ":")) for value in yes + no]
    assert [matches(grammar, text) for text in texts] == [True] * len(yes) + [False] * len(no)


def test_a_grammar_past_its_limits_goes_to_the_parser() -> None:
    grammar = bound(spec_of("regex", "(a|b)*a(a|b){9}"), Limits(max_states=100))
    assert grammar.path == "pushdown" and "100 states" in grammar.reason
    assert matches(grammar, "b" * 5 + "a" + "b" * 9) and not matches(grammar, "b" * 20)


@pytest.mark.parametrize("step", [0.001, 0.01, 0.5, 1.5, 2, 3, 5, 7, 12, 25, 60])
def test_numbers_are_the_same_on_both_paths(step: float) -> None:
    """A number is one token of the parser's: were it several, its lexer would lose readings."""
    bounds: list[dict[str, object]] = [{}, {"minimum": 10}, {"exclusiveMinimum": 0, "maximum": 1e5}]
    multiples = [Decimal(repr(step)) * n for n in (-7, 0, 1, 20, 21, 77, 100, 12345)]
    values = [*multiples, *(value + 1 for value in multiples), Decimal("0.5"), Decimal("100.00001")]
    for bound_by in bounds:
        number = {"type": "number", "multipleOf": step, **bound_by}
        either = {"anyOf": [number, {"type": "integer", "minimum": 30}]}
        negated = {"type": "number", "not": {"multipleOf": step}, **bound_by}
        for value in (number, either, negated):
            schema = {
                "type": "object",
                "properties": {"v": value},
                "additionalProperties": False,
            }
            regular, parsed = bound(spec_of("json_schema", schema)), parsed_json(schema)
            assert (regular.path, parsed.path) == ("fsm", "pushdown")
            texts = [f'{{"v":{exact.normalize():f}}}' for exact in values]
            expected = [matches(regular, text) for text in texts]
            assert [matches(parsed, text) for text in texts] == expected, value
            assert any(expected)


@pytest.mark.parametrize(
    ("number", "yes", "no"),
    [
        ({"type": "integer", "multipleOf": 5, "minimum": 10}, ["10", "100"], ["5", "101"]),
        ({"type": "number", "multipleOf": 0.001, "exclusiveMinimum": 0},
         ["0.5", "1000", "12.345"], ["0", "0.0001", "12.3456"]),
    ],
)  # fmt: skip
def test_multiples_in_a_recursive_schema(
    number: dict[str, object], yes: list[str], no: list[str]
) -> None:
    schema = {"type": "object", "properties": {"v": number}}
    for grammar in (bound(spec_of("json_schema", schema)), parsed_json(schema)):
        assert [text for text in yes if not matches(grammar, f'{{"v":{text},"w":[{{}}]}}')] == []
        assert [text for text in no if matches(grammar, f'{{"v":{text}}}')] == []


def test_no_terminal_of_the_parser_is_written_out_twice() -> None:
    """Rules within terminals keep their names: else their texts multiply."""
    number = {"type": "integer", "multipleOf": 7}
    schema = {"type": "object", "properties": dict.fromkeys("abcd", number)}
    lark = json_to_lark(schema_grammar(schema).grammar)
    assert len(lark) < 20_000
    bodies = [line.partition(": ")[2] for line in lark.splitlines()]
    assert all(other.count(body) <= 1 for body in bodies if len(body) > 60 for other in bodies)


def test_a_multiple_with_too_many_remainders_for_a_token_is_refused_to_the_parser_alone() -> None:
    closed = {"type": "integer", "multipleOf": 997}
    assert matches(bound(spec_of("json_schema", closed)), str(997**5))
    within = {"type": "object", "properties": {"v": closed}}
    grammar = bound(spec_of("json_schema", within))
    assert matches(grammar, f'{{"v":{997**5},"w":{{}}}}')
    assert not matches(grammar, f'{{"v":{997**5 + 1}}}')
    with pytest.raises(InvalidGrammar, match="multipleOf cannot be enforced in a schema that is"):
        parsed_json(within)


def test_a_prepared_vocabulary_has_what_masks_are_made_of() -> None:
    vocabulary = vocabulary_of([b"a", b"b", b"bb"])
    prepare(vocabulary)
    assert {"trie", "slices"} <= vars(vocabulary).keys()
    misses = key_tokens.cache_info().misses
    key_tokens(vocabulary)
    assert key_tokens.cache_info().misses == misses


def test_a_lenient_grammar_keeps_its_schema_for_validation() -> None:
    source = json.dumps({"type": "integer"})
    assert compile_grammar(GrammarSpec("json_schema", source, is_lenient=True)).schema == source
    assert compile_grammar(GrammarSpec("json_schema", source)).schema is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (spec_of("regex", "("), "regex"),
        (spec_of("regex", r"(a)\1"), "regex"),
        (spec_of("regex", r"[^\x00-\U0010ffff]"), "nothing|regex"),
        (spec_of("choices", []), "choices: it matches nothing"),
        (spec_of("choices", {"a": 1}), "choices"),
        (spec_of("choices", [1]), "choices"),
        (spec_of("choices", "["), "choices: not JSON"),
        (spec_of("choices", ["\ud800"]), "surrogate"),
        (spec_of("json_schema", "{"), "json_schema: not JSON"),
        (spec_of("json_schema", {"type": "nonsense"}), "nonsense"),
        (spec_of("json_schema", {"$ref": "#"}), "itself"),
        (spec_of("json_schema", {"type": "object", "properties": {"a": {"$ref": "#"}},
                                 "required": ["a"]}), "no document"),
        (spec_of("ebnf", 'start: "a'), "ebnf"),
        (spec_of("ebnf", "start: missing"), "missing"),
        (spec_of("ebnf", 'start: start "a"'), "ebnf: it matches nothing"),
        (spec_of("ebnf", 'root ::= "a'), "ebnf"),
        (spec_of("ebnf", 'start: A\nA: /a/ & /b/'), "ebnf: it matches nothing"),
        (spec_of("structural_tag", "{}"), "format"),
        (spec_of("structural_tag", {"structures": [], "triggers": ["a"]}), "structural_tag"),
        (spec_of("structural_tag", {**TAGS, "triggers": ["<g="]}), "none of the triggers"),
        (spec_of("structural_tag", {**TAGS, "triggers": [1]}), "texts"),
        (spec_of("structural_tag", {"format": {"type": "sequence"}}), "elements: an array"),
        (spec_of("structural_tag", {"format": {"type": "any_tokens"}}), "of tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_compiled_is_refused_by_name(spec: GrammarSpec, message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message) as caught:
        compile_grammar(spec)
    assert caught.value.field is not None


def test_an_unsupported_schema_names_its_place() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "http://example.com/x"}}}
    with pytest.raises(UnsupportedSchema) as caught:
        compile_grammar(spec_of("json_schema", schema))
    assert caught.value.pointer == "/properties/a"


@pytest.mark.parametrize(
    "spec",
    [
        spec_of("regex", "(a{1000}){100}"),
        spec_of("regex", "a{100000}"),
        spec_of("regex", "(a|b)*a(a|b){20}"),
        spec_of("regex", "(" * 5000 + ")" * 5000),
        spec_of("choices", [str(i) * 3 for i in range(5000)]),
        spec_of("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000),
        spec_of("json_schema", {"type": "string", "maxLength": 10**6}),
    ],
)
def test_a_hostile_grammar_ends_soon(spec: GrammarSpec) -> None:
    start = time.process_time()
    try:
        matcher = bound(spec).matcher()
        matcher.forced_tokens()
    except InvalidGrammar:
        pass
    assert time.process_time() - start < 10.0  # 2 s of CPU where nobody shares its caches


@pytest.mark.parametrize(
    ("source", "place", "shown"),
    [
        ("start: )", "1(8)", "   1 | start: )\n"),
        ("start: nothing", "at 1(8)", "   1 | start: nothing\n"),
        ("start: a\n\na: b c\n", "at 3(4)", "   1 | start: a\n   2 | \n   3 | a: b c\n"),
        ("\n" * 9 + "start: )", "10(8)", "   8 | \n   9 | \n  10 | start: )\n"),
        ('start: /2(3)/ "1 | x" b', "at 1(8)", '   1 | start: /2(3)/ "1 | x" b\n'),
    ],
)
def test_an_error_in_a_grammar_counts_the_callers_lines(
    source: str, place: str, shown: str
) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        compile_grammar(spec_of("ebnf", source))
    message = str(caught.value)
    assert message.startswith(f"ebnf: {place}: ")
    assert shown in message and "%llguidance" not in message


def test_what_neither_automaton_nor_parser_can_hold_is_refused_with_a_remedy() -> None:
    if library() is None:
        pytest.skip("without compiled code there is the parser alone")
    schema = {
        "type": "string",
        "pattern": "^([a-z]{0,50}-){0,50}$",
        "minLength": 300,
        "maxLength": 400,
        "not": {"pattern": "ab.*cd"},
    }
    both = r"automaton: .*; for the parser: .*remedy: .*`pattern`"
    with pytest.raises(InvalidGrammar, match=both):
        compile_grammar(spec_of("json_schema", schema), Limits(max_cpu_s=0.1))
