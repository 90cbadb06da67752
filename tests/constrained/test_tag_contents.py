"""What may stand in structural tags besides documents of a schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stemma.constrained.compiler import compile_grammar
from stemma.constrained.spec import GrammarSpec
from stemma.constrained.tag_contents import MAX_DEPTH
from stemma.constrained.vocabulary import single_bytes
from stemma.errors import InvalidGrammar, UnsupportedSchema

BYTES = single_bytes()


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY = {"type": "any_text"}
TAGS = [tag("<f=a>", text("1"), "</f>"), tag("<f=b>", text("2"), "</f>")]
QWEN: dict[str, Any] = {
    "type": "qwen_xml_parameter",
    "json_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
        "required": ["a"],
    },
}


def spec(content: Any, *, is_lenient: bool = False) -> GrammarSpec:
    return GrammarSpec("structural_tag", json.dumps({"format": content}), is_lenient=is_lenient)


def accepts(content: Any, said: str, *, is_lenient: bool = False) -> bool:
    matcher = compile_grammar(spec(content, is_lenient=is_lenient)).bind(BYTES).matcher()
    return all(matcher.consume(byte) for byte in said.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("content", "yes", "no"),
    [
        (text("a<|b"), ["a<|b"], ["a", "a<|b."]),
        ({"type": "regex", "pattern": "[0-9]{1,3}"}, ["7", "123"], ["", "1234", "x"]),
        ({"type": "json_schema", "json_schema": {"type": "integer"}}, ["-3"], ["3.5", "x"]),
        ({"type": "sequence", "elements": [text("a"), text(""), text("b")]}, ["ab"], ["a", "b"]),
        ({"type": "or", "elements": [text("ab"), text("ac"), text("")]}, ["ab", "ac", ""], ["a"]),
        ({"type": "sequence", "elements": [text("a"), {"type": "star", "content": text(",a")}]},
         ["a", "a,a,a"], ["", "a,"]),
        ({"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "x*"}, "end": ">"},
         ["<>", "<xx>"], ["<", "x"]),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": [
            {"begin": "<a", "content": {"type": "or", "elements": [text("1"), text("2")]},
             "end": ">"}]}, ["", "so <a1> and <a2>"], ["<b", "<a3"]),
        (ANY, ["", "a\n<b>é"], []),
        ({**ANY, "excludes": ["<b", "aa"]}, ["", "<", "aba"], ["a<b", "baa", "<b>"]),
        ({**ANY, "max_chars": 2}, ["", "éé"], ["aaa"]),
        (tag("<t>", ANY, "</t>"), ["<t></t>", "<t><</t</t>"], ["<t>", "<t></t>a", "<t></t></t>"]),
        (tag("<t>", {**ANY, "max_chars": 3}, ["</t>", "|"]), ["<t>abc|", "<t>abc</t>"],
         ["<t>abcd|", "<t>a|b|", "<t>a|</t>", "<t>abcdef|"]),
        (tag("<t>", {"type": "sequence", "elements": [text("a"), {**ANY, "excludes": ["b"]}]}, "|"),
         ["<t>a|", "<t>acc|"], ["<t>|", "<t>ab|", "<t>a||"]),
        (tag("<", {"type": "or", "elements": [text("|"), ANY]}, "|"), ["<||", "<a|"], ["<a||"]),
        ({"type": "sequence", "elements": [ANY, text("END")]}, ["END", "ENDEND"], ["", "ENDE"]),
        ({"type": "grammar", "grammar": 'root ::= "(" root ")" | [a-c]*'}, ["", "((ab))"], ["(a"]),
        (tag("a", {"type": "grammar", "grammar": 'root ::= "(" root ")" | [a-c]*'}, "a"),
         ["aa", "aaa", "a(ca)a"], ["a", "a(ca)", "a(a)aa"]),
        ({"type": "optional", "content": text("ab")}, ["", "ab"], ["abab"]),
        ({"type": "plus", "content": text("ab")}, ["ab", "abab"], ["", "aba"]),
        ({"type": "repeat", "min": 2, "max": 3, "content": text("a")},
         ["aa", "aaa"], ["a", "aaaa"]),
        ({"type": "repeat", "min": 2, "max": -1, "content": text("a")}, ["aa", "aaaaa"], ["a"]),
        ({"type": "dispatch", "rules": [["<f>", text("1")], ["<g>", text("2")]]},
         ["", "<f", "a<f>1b<g>2<f>1"], ["<f>", "<f>2", "<g>1"]),
        ({"type": "dispatch", "rules": [["<f>", text("1")]], "loop": False, "excludes": ["no"]},
         ["", "a<f>1"], ["a<f>1b", "no", "no<f>1"]),
        ({"type": "tags_with_separator", "tags": TAGS, "separator": ","},
         ["", "<f=a>1</f>", "<f=b>2</f>,<f=a>1</f>"], ["<f=a>1</f>,", "<f=a>1</f><f=a>1</f>"]),
        ({"type": "tags_with_separator", "tags": TAGS, "separator": "", "at_least_one": True,
          "stop_after_first": True}, ["<f=a>1</f>"], ["", "<f=a>1</f><f=a>1</f>"]),
        ({"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS, "excludes": ["no"]},
         ["", "a<f=b>2</f>b"], ["no", "<f=a>1</f>no"]),
        ({"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS, "at_least_one": True},
         ["<f=b>2</f>a<f=a>1</f>"], ["", "a<f=b>2</f>"]),
        ({"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS, "at_least_one": True,
          "text_first": True}, ["<f=b>2</f>", "a<f=b>2</f>b"], ["", "a"]),
        (tag("[", {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS}, "]"),
         ["[]", "[a<f=a>1</f>b]"], ["[a]b]", "[<f=]", "[<f=a>1</f>"]),
        (tag("[", {"type": "triggered_tags", "triggers": ["<f="], "tags": TAGS,
                   "at_least_one": True, "stop_after_first": True}, "]"),
         ["[<f=a>1</f>]"], ["[]", "[a<f=a>1</f>]", "[<f=a>1</f>a]"]),
        (QWEN, ["<parameter=a>1</parameter>", "<parameter=a>\n-2\n</parameter>\n<parameter=b>"
                "\nx\n</parameter>\n", "<parameter=a>1</parameter><parameter=b></parameter>"],
         ["", "<parameter=b>x</parameter>", "<parameter=a>x</parameter>"]),
        ({"type": "json_schema", "style": "qwen_xml", "json_schema": QWEN["json_schema"]},
         ["<parameter=a>1</parameter>"], ['{"a":1}']),
    ],
)  # fmt: skip
def test_a_content_is_what_its_words_say(content: Any, yes: list[str], no: list[str]) -> None:
    assert [said for said in yes if not accepts(content, said)] == []
    assert [said for said in no if accepts(content, said)] == []


STYLE = {"key_begin": "<p=", "key_end": ">\n", "value_end": "\n</p>\n", "excludes": "</p>"}
SCHEMA = {
    "type": "object",
    "$defs": {"Kind": {"enum": ["a", "b</p>", "7"]}},
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "days": {"type": "integer"},
        "kind": {"$ref": "#/$defs/Kind"},
        "some": {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "integer"}]},
        "where": {"type": ["object", "string"], "properties": {"x": {"$ref": "#/properties/days"}},
                  "required": ["x"], "additionalProperties": False},
    },
    "required": ["city", "where"],
}  # fmt: skip
CITY, WHERE = "<p=city>\nUlm\n</p>\n", '<p=where>\n{"x":1}\n</p>\n'


def parameters(schema: Any = SCHEMA, style: Any = STYLE) -> Any:
    inner = {"type": "parameters", "json_schema": schema, "style": style}
    return {"type": "tag", "begin": "(", "content": inner, "end": ")"}


@pytest.mark.parametrize(
    ("said", "is_one"),
    [
        (CITY + WHERE, True),
        (CITY, False),
        (WHERE + CITY, False),
        (CITY.replace("Ulm", "\n<p=x> )\n") + WHERE, True),
        (CITY.replace("Ulm", "0123456789") + WHERE, False),
        (CITY.replace("Ulm", "</p>") + WHERE, False),
        (CITY + "<p=days>\n12\n</p>\n" + WHERE, True),
        (CITY + "<p=days>\n1.5\n</p>\n" + WHERE, False),
        (CITY + '<p=days>\n"1"\n</p>\n' + WHERE, False),
        (CITY + "<p=kind>\n7\n</p>\n" + WHERE, True),
        (CITY + "<p=kind>\nb</p>\n</p>\n" + WHERE, False),
        (CITY + "<p=some>\nnull\n</p>\n" + WHERE, True),
        (CITY + "<p=some>\n12 miles\n</p>\n" + WHERE, True),
        (CITY + "<p=some>\n12.5\n</p>\n" + WHERE, False),
        (CITY + "<p=some>\n None \n</p>\n" + WHERE, False),
        (CITY + "<p=where>\nthere\n</p>\n", True),
        (CITY + "<p=where>\n{there\n</p>\n", False),
        (CITY + '<p=where>\n{"x":"1"}\n</p>\n', False),
        (CITY + "<p=other>\n1\n</p>\n" + WHERE, False),
    ],
)
def test_parameters_are_raw_strings_and_all_else_is_json(said: str, is_one: bool) -> None:
    assert accepts(parameters(), f"({said})") == is_one


def test_parameters_may_be_separated_have_words_and_quotes() -> None:
    words = {"key_end": "=", "separator": ", ", "raw_strings": False,
             "words": ["None", "False", "True"]}  # fmt: skip
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": ["boolean", "null"]},
                             "c": {"type": "integer"}}, "required": ["b"]}  # fmt: skip
    for said in ("b=None", 'a="x", b=True', "b=False, c=3", 'a="\\"", b=True, c=3'):
        assert accepts(parameters(schema, words), f"({said})"), said
    for said in ("", "b=true", 'a="x" b=True', "b=True, ", "c=3", "a=x, b=True"):
        assert not accepts(parameters(schema, words), f"({said})"), said
    quoted = {"key_end": ":", "separator": ",", "quote": '<|"|>'}
    optional = {"properties": {"a": {"type": ["string", "integer"]}, "b": {"type": "string"}}}
    for said in ("", "a:3", 'a:<|"|>3<|"|>', 'b:<|"|>"<|<|"|>', 'a:1,b:<|"|><|"|>'):
        assert accepts(parameters(optional, quoted), f"({said})"), said
    for said in ("a:x", 'b:<|"|>x<|"|>,a:1', 'b:<|"|>x<|"|>y<|"|>', "a:1,"):
        assert not accepts(parameters(optional, quoted), f"({said})"), said


def test_what_is_said_of_a_schema_points_into_the_tag_that_has_it() -> None:
    lost = {"properties": {"n": {"type": "integer", "multipleOf": 12345}}}
    wrong = {"type": "json_schema", "json_schema": {"type": "strng"}}
    content: dict[str, Any] = {
        "type": "sequence",
        "elements": [
            text("a"),
            {"type": "optional", "content": parameters(lost)},
            {"type": "dispatch", "rules": [["b", ANY], ["c", wrong]]},
        ],
    }
    with pytest.raises(InvalidGrammar, match=r"^/format/elements/2/rules/1/1/json_schema: type="):
        compile_grammar(spec(content, is_lenient=True))
    content["elements"].pop()
    place = "/format/elements/1/content/content/json_schema/properties/n"
    (warning,) = compile_grammar(spec(content, is_lenient=True)).warnings
    assert warning.startswith(f"{place}: multipleOf is not enforced")
    with pytest.raises(UnsupportedSchema, match="multipleOf cannot") as refused:
        compile_grammar(spec(content))
    assert refused.value.pointer == place
    older = {"begin": "<", "schema": {"type": "strng"}, "end": ">"}
    source = json.dumps({"structures": [older], "triggers": ["<"]})
    with pytest.raises(InvalidGrammar, match=r"^/structures/0/schema: type="):
        compile_grammar(GrammarSpec("structural_tag", source))


def test_what_parameters_one_by_one_cannot_say_is_refused_or_warned_of() -> None:
    either = {**SCHEMA, "anyOf": [{"required": ["days"]}, {"required": ["kind"]}]}
    with pytest.raises(UnsupportedSchema, match=r"anyOf.*one by one"):
        compile_grammar(spec(parameters(either)))
    compiled = compile_grammar(spec(parameters(either), is_lenient=True))
    assert any("anyOf is not enforced" in warning for warning in compiled.warnings)
    spaced = {"properties": {"a b": {"type": "string"}}}
    with pytest.raises(UnsupportedSchema, match="'a b' is no parameter's name"):
        compile_grammar(spec(parameters(spaced)))
    assert accepts(parameters(spaced), "()", is_lenient=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"type": "nothing"}, "known are: json_schema"),
        ([], "an object is expected"),
        ({"type": "const_string", "value": 1}, "value: a text"),
        ({"type": "const_string", "value": ""}, "empty"),
        ({"type": "or"}, "elements: an array"),
        ({"type": "regex", "pattern": "("}, "missing|regex"),
        (parameters(style={"colour": ""}), "'colour' is not known"),
        (parameters(style={"words": ["a"]}), "three texts"),
        (parameters(style={"raw_strings": 1}), "true or false"),
        (parameters({"type": "array"}), "no object"),
        (parameters(False), "no document"),
        (parameters({"properties": {"a": False}, "required": ["a"]}), "no value is allowed"),
        (parameters({"properties": {str(i): True for i in range(300)}}), "at most 256"),
        (parameters({"$ref": "#"}), "itself"),
        ({"type": "any_tokens"}, "of tokens"),
        (tag("a", {"type": "token", "token": 3}, "b"), "of tokens"),
        (tag("a", ANY, {"type": "token", "token": 3}), "end: a token is not supported"),
        (tag("a", ANY, []), "end: at least one"),
        ({**ANY, "max_tokens": 3}, "max_tokens is not supported"),
        ({**ANY, "max_chars": -1}, "max_chars: a number from 0"),
        ({**ANY, "excludes": [""]}, "excludes: texts are expected"),
        ({"type": "grammar", "grammar": 'start: "a"'}, "line 1, column 1: a rule is expected"),
        ({"type": "grammar", "grammar": 'start: "a"', "syntax": "lark"}, "only ebnf"),
        ({"type": "grammar", "grammar": 'root ::= "a" root'}, "rule 'root' derives no finite text"),
        ({"type": "json_schema", "json_schema": {}, "style": "glm_xml"}, "style 'glm_xml'"),
        ({"type": "json_schema", "json_schema": {}, "excludes": ["a"]}, "excludes are not"),
        ({"type": "repeat", "min": 2, "max": 1, "content": ANY}, "max: a number from 2"),
        ({"type": "dispatch", "rules": [["", ANY]]}, "pairs of a text, not empty"),
        ({"type": "dispatch", "rules": [["<", ANY], ["<", ANY]]}, "a text of its own"),
        ({"type": "dispatch", "rules": [["f<", ANY], ["<", ANY], ["<<", ANY]]}, "'<<' never comes"),
        ({"type": "tags_with_separator", "tags": [], "separator": ""}, "at least one"),
        ({"type": "triggered_tags", "triggers": ["<", "<f"], "tags": TAGS}, "several triggers"),
        ({"type": "triggered_tags", "triggers": ["<g"], "tags": TAGS}, "none of the triggers"),
    ],
)
def test_what_is_no_content_is_refused_by_name(content: Any, message: str) -> None:
    with pytest.raises(InvalidGrammar, match=message):
        compile_grammar(spec(content))


TREE = {
    "type": "object",
    "properties": {"n": {"type": "number", "multipleOf": 0.5},
                   "kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["n"],
    "additionalProperties": False,
}  # fmt: skip
SAID = '{"n":1.5,"kids":[{"n":0}]}'
A_TREE = {"type": "json_schema", "json_schema": TREE}
AN_INTEGER = {"type": "json_schema", "json_schema": {"type": "integer"}}


@pytest.mark.parametrize(
    ("content", "yes", "no"),
    [
        (tag("<", A_TREE, ">"), [f"<{SAID}>"], [f"<{SAID}"]),
        ({"type": "triggered_tags", "triggers": ["<f="], "tags": [
            tag("<f=a>", A_TREE, "</f>"), tag("<f=b>", ANY, "</f>")]},
         ["", f"a <f=a>{SAID}</f><f=b>c</f></f>"], [f"<f=a>{SAID}<", "<f=a>1</f>"]),
        ({"type": "sequence", "elements": [{"type": "dispatch", "rules": [["<", A_TREE]]},
                                           text("END")]},
         ["END", f"a<{SAID}bENDEND"], ["", f"a<{SAID}", "<END"]),
        ({"type": "sequence", "elements": [{"type": "or", "elements": [A_TREE, AN_INTEGER]},
                                           {"type": "regex", "pattern": "[0-9]+"}]},
         [f"{SAID}7", "12"], ["1", SAID]),
    ],
)  # fmt: skip
def test_recursive_contents_keep_apart_from_the_text_around_them(
    content: Any, yes: list[str], no: list[str]
) -> None:
    assert compile_grammar(spec(content)).path == "lazy"
    assert [said for said in yes if not accepts(content, said)] == []
    assert [said for said in no if accepts(content, said)] == []


def test_contents_may_be_nested_to_a_depth() -> None:
    for depth, is_too_deep in ((MAX_DEPTH, False), (MAX_DEPTH + 2, True), (3000, True)):
        source = '{"type":"star","content":' * depth + json.dumps(text("a")) + "}" * depth
        nested = GrammarSpec("structural_tag", f'{{"format":{source}}}')
        if is_too_deep:
            with pytest.raises(InvalidGrammar, match="nested"):
                compile_grammar(nested)
        else:
            compile_grammar(nested)
