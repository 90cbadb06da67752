"""From a caller's words to a bound grammar, the path it takes, and every way to fail."""

from __future__ import annotations

import json
import pickle
import time

import pytest
from grammars import SINGLE_BYTES, vocabulary_of

from stemma.constrained import BoundGrammar, GrammarSpec, Limits, compile_grammar, prepare
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


def matches(grammar: BoundGrammar, text: str) -> bool:
    matcher = grammar.matcher()
    return all(matcher.consume(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("spec", "path", "yes", "no"),
    [
        (spec_of("regex", "[a-z]+@x"), "fsm", ["a@x"], ["a@", "@x", "a@xx"]),
        (spec_of("choices", ["yes", "no", "日本"]), "fsm", ["yes", "日本"], ["ye", "maybe", ""]),
        (spec_of("json_schema", {"type": "integer"}), "fsm", ["0", "-12"], ["01", "1.5", ""]),
        (spec_of("json_schema", TREE), "pushdown",
         ['{"v":1,"kids":[]}', '{"v":1,"kids":[{"v":2,"kids":[]}]}'], ['{"v":1}', "[]"]),
        (spec_of("json_schema", nested_arrays(100)), "pushdown", ["[" * 50 + "]" * 50], ["[1]"]),
        (spec_of("json_object"), "pushdown", ["{}", '{"a":[1,{"b":null}]}'], ["[]", "1", "{"]),
        (spec_of("ebnf", 'start: "a" start "b" | "c"'), "pushdown", ["c", "aacbb"], ["acbb", "ab"]),
        (spec_of("ebnf", 'root ::= "(" root ")" | [0-9]+'), "pushdown", ["7", "((1))"], ["(1"]),
        (spec_of("ebnf", 'start: start "a" | "b"'), "pushdown", ["b", "baaa"], ["a", ""]),
        (spec_of("structural_tag", TAGS), "pushdown",
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
    assert matches(grammar, "one <t>1</t>")
    assert matches(grammar, "<t>1</t> rest") == (not stop_after_first)
    assert matches(grammar, "<t>1</t><t>2</t>") == (not stop_after_first)


def test_a_grammar_past_its_limits_goes_to_the_parser() -> None:
    grammar = bound(spec_of("regex", "(a|b)*a(a|b){9}"), Limits(max_states=100))
    assert grammar.path == "pushdown" and "100 states" in grammar.reason
    assert matches(grammar, "b" * 5 + "a" + "b" * 9) and not matches(grammar, "b" * 20)


def test_a_prepared_vocabulary_has_what_masks_are_made_of() -> None:
    vocabulary = vocabulary_of([b"a", b"b", b"bb"])
    prepare(vocabulary)
    assert "trie" in vars(vocabulary) and len(vocabulary.masks) == 1
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
        (spec_of("structural_tag", {"format": {"type": "sequence"}}), "triggered_tags"),
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
    start = time.perf_counter()
    try:
        matcher = bound(spec).matcher()
        matcher.forced_tokens()
    except InvalidGrammar:
        pass
    assert time.perf_counter() - start < 5.0  # 2 s on a machine of one's own
