"""What the page's modules make of text: markup stays text, JSON is read as others read it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from chat_page import Chat, answer_with

HOSTILE = [
    "<script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 1'>",
    "[click](javascript:window.broken=1)",
    "[click](JaVaScRiPt:window.broken=1)",
    "[click](data:text/html,<script>window.broken=1</script>)",
    "[click](vbscript:x) [x](//evil.example) [y](/v1/models) [z](file:///etc/passwd)",
    '[a](https://ok.example/"onmouseover="window.broken=1)',
    "![x](https://tracker.example/pixel.png)",
    "<https://ok.example> <a href='javascript:window.broken=1'>x</a>",
    "```html\n<script>window.broken = 1</script>\n```",
    "| <svg onload=window.broken=1> | b |\n| - | - |\n| <iframe src=//evil.example> | c |",
    "# <style>*{display:none}</style>\n> <object data=x>\n- <embed src=x>",
    "**" * 5000 + "[" * 5000 + "`" * 5000 + "_a" * 5000,
    "> " * 3000 + "- " * 3000,
    "\n".join("  " * depth + "- deep" for depth in range(300)),
]
ALLOWED_TAGS = {
    *("P", "H3", "H4", "H5", "H6", "UL", "OL", "LI", "BLOCKQUOTE", "HR", "STRONG", "EM", "S"),
    *("A", "CODE", "PRE", "FIGURE", "FIGCAPTION", "SPAN", "BUTTON", "svg", "path"),
    *("DIV", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD"),
}
SHOW = """async (texts) => {
  const { showMarkdown } = await import("/assets/chat/markdown.js");
  return texts.map((text) => {
    const box = document.createElement("div");
    document.body.append(box);
    const begin = performance.now();
    showMarkdown(box, text);
    const elements = [...box.querySelectorAll("*")];
    const links = elements.filter((e) => e.tagName === "A").map((e) => [e.href, e.rel, e.target]);
    const attributes = elements.flatMap((e) => e.getAttributeNames());
    const tags = elements.map((e) => e.tagName);
    const seen = { ms: performance.now() - begin, text: box.textContent, tags, attributes, links };
    box.remove();
    return seen;
  });
}"""
READ = """async (texts) => {
  const { JsonReader } = await import("/assets/chat/json_reader.js");
  return texts.map((text) => {
    const states = [];
    const reader = new JsonReader();
    for (let end = 1; end <= text.length; end++) states.push(reader.read(text.slice(0, end)).state);
    return states;
  });
}"""
FIT = """async (cases) => {
  const { checkAgainst } = await import("/assets/chat/schema_check.js");
  return cases.map(([schema, value]) => checkAgainst(schema, value));
}"""

CALCULATE = """async (texts) => {
  const { calculate } = await import("/assets/chat/tools/calculator.js");
  return texts.map((text) => {
    try { return calculate(text); } catch (error) { return `Error: ${error.message}`; }
  });
}"""
PARTS = """async (cases) => {
  const { partsOf } = await import("/assets/watch/roles.js");
  const told = ({ role, text }) => role + ":" + text;
  return cases.map(([text, before]) => partsOf(text, before).map(told));
}"""
NO_ARITHMETIC = [
    "", "1 +", "(1", "1)", "2 2", "1 / 0", "sqrt", "sqrt 4", "alert(1)", "constructor", "__proto__",
    "window.x", "'a' + 'b'", "1; 2", "[1]", "sqrt(-1)", "(" * 60 + "1" + ")" * 60, "1" * 501,
    "toString()", "`1`", "10 ** 999",
]  # fmt: skip
TOLD = [
    (["<|user|>Hi<|end|><|assistant|>Yes", ""], ["User:Hi", "Model:Yes"]),
    (["<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nHi", ""], ["System:Be.", "User:Hi"]),
    (["assistant\nYes", "...<|im_start|>"], ["Model:Yes"]),
    (
        ["<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>", ""],
        ["User:Hi"],
    ),
    (["<bos><start_of_turn>model\nYes<end_of_turn>\n", ""], ["Model:Yes"]),
    (["<s>[INST] Hi [/INST] Yes</s>", ""], ["User:Hi ", "Model:Yes"]),
    ([" goes on <user> if a < b", "x"], [": goes on <user> if a < b"]),
    (["<|end|>", ""], []),
]


@pytest.fixture
def page(open_page: Callable[..., Any]) -> Any:
    visit = open_page()
    Chat(visit.page)
    return visit.page


def test_markup_in_a_text_stays_text(page: Any) -> None:
    for text, seen in zip(HOSTILE, page.evaluate(SHOW, HOSTILE)):
        assert set(seen["tags"]) <= ALLOWED_TAGS, text[:60]
        assert not [name for name in seen["attributes"] if name.startswith("on") or name == "src"]
        for address, rel, target in seen["links"]:
            assert address.startswith(("http://", "https://")), text[:60]
            assert "noopener" in rel and target == "_blank"
        assert seen["ms"] < 1000, text[:60]
    assert page.evaluate("window.broken") is None


def test_markup_in_an_answer_does_nothing(open_page: Callable[..., Any]) -> None:
    visit = open_page()
    chat = Chat(visit.page)
    answer_with(visit.page, *({"content": f"{text}\n\n"} for text in HOSTILE[:12]))
    assert "<script>window.broken = 1</script>" in chat.send("<img src=x onerror=window.broken=1>")
    assert visit.page.locator(".thread img, .thread script, .thread iframe").count() == 0
    assert visit.page.evaluate("window.broken") is None


def test_markdown_has_the_forms_that_models_write(page: Any) -> None:
    text = (
        "# One\n\nA **b** *c* `d` [e](https://ok.example/p_q_r) 2 * 3 * 4 snake_case_name\n\n"
        "1. x\n   - y\n2. z\n\n> q\n\n```py\na = '**'\n```\n\n| h | i |\n| :- | -: |\n| 1 | 2 |\n"
    )
    (seen,) = page.evaluate(SHOW, [text])
    for tag in ("H3", "STRONG", "EM", "CODE", "A", "OL", "UL", "BLOCKQUOTE", "PRE", "TABLE"):
        assert tag in seen["tags"], tag
    assert seen["tags"].count("EM") == 1 and seen["tags"].count("STRONG") == 1
    assert "2 * 3 * 4 snake_case_name" in seen["text"] and "a = '**'" in seen["text"]
    assert seen["links"][0][0] == "https://ok.example/p_q_r"


def test_json_is_read_as_it_grows_just_as_a_parser_reads_the_whole(page: Any) -> None:
    rng = random.Random(7)
    whole = [json.dumps(_value(rng, 4), ensure_ascii=rng.random() < 0.5) for _ in range(120)]
    spoilt = [_spoil(text, rng) for text in whole for _ in range(3)]
    for text, states in zip(whole, page.evaluate(READ, whole)):
        assert "invalid" not in states and states[-1] == "complete", text
    for text, states in zip(spoilt, page.evaluate(READ, spoilt)):
        assert (states[-1:] == ["complete"]) == _is_json(text), text
        if "invalid" in states:
            first = states.index("invalid")
            assert set(states[first:]) == {"invalid"}, "what cannot become JSON never does"
    assert any("invalid" in states for states in page.evaluate(READ, spoilt))


def test_a_value_fits_a_schema_just_as_jsonschema_says(page: Any) -> None:
    rng = random.Random(11)
    cases = [[_schema(rng, 3), _value(rng, 3)] for _ in range(400)]
    verdicts = page.evaluate(FIT, cases)
    expected = [jsonschema.Draft202012Validator(schema).is_valid(value) for schema, value in cases]
    assert {True, False} <= set(expected)
    for (schema, value), verdict, is_valid in zip(cases, verdicts, expected):
        assert (not verdict["problems"]) == is_valid, (schema, value, verdict)
        assert verdict["unchecked"] == []
    (verdict,) = page.evaluate(FIT, [[{"type": "string", "format": "date"}, "x"]])
    assert verdict["unchecked"] == ["format"], "what was not looked at is said"


def test_arithmetic_is_what_python_says(page: Any) -> None:
    rng = random.Random(5)
    texts = [_expression(rng, 4) for _ in range(200)]
    expected = [eval(text.replace("^", "**"), {"max": max}) for text in texts]
    for text, value, found in zip(texts, expected, page.evaluate(CALCULATE, texts)):
        assert found == pytest.approx(value, rel=1e-12, abs=1e-12), text
    known = ["0.1 + 0.2", "2 × (3 + SQRT(16)) ÷ 7", "-2^2", "2^3^2", "min(3, 1, 2) % 2", "1e3 - .5"]
    assert page.evaluate(CALCULATE, known) == [0.3, 2, -4, 512, 1, 999.5]


def test_what_is_no_arithmetic_is_refused_and_never_run(page: Any) -> None:
    for text, found in zip(NO_ARITHMETIC, page.evaluate(CALCULATE, NO_ARITHMETIC)):
        assert str(found).startswith("Error: "), text


def test_special_tokens_of_templates_are_shown_as_who_speaks(page: Any) -> None:
    shown = page.evaluate(PARTS, [case for case, _ in TOLD])
    assert shown == [expected for _, expected in TOLD]


def _expression(rng: random.Random, depth: int) -> str:
    """With the same value in Python, but for `^`."""
    kind = rng.randrange(6 if depth else 1)
    if kind == 0:
        return rng.choice(["2", "3.5", "7", "0.25", "1e2"])
    one, other = _expression(rng, depth - 1), _expression(rng, depth - 1)
    match kind:
        case 1:
            return f"({one} {rng.choice('+-*')} {other})"
        case 2:
            return f"{one} - {other}"
        case 3:
            return f"max({one}, {other})"
        case 4:
            return f"-({one}) * 2 + {other}"
        case _:
            return f"({one}) / 8 ^ 2"


def _value(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(8 if depth else 5)
    match kind:
        case 0:
            return rng.choice(["", "a", 'Å\n"\\/\u2028 \U0001f600', "two words", "b"])
        case 1:
            return rng.choice([0, -1, 7, 34, 10**12])
        case 2:
            return rng.choice([0.5, -1.25e-7, 3.0e20, 2.0])
        case 3 | 4:
            return rng.choice([True, False, None])
        case 5:
            return [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
        case _:
            return {rng.choice("abcde"): _value(rng, depth - 1) for _ in range(rng.randrange(4))}


def _spoil(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice([",", "]", "}", '"', "0", "-", "x", " ", "\\", "\t"]) + text[at:]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def _schema(rng: random.Random, depth: int) -> Any:
    kind = rng.randrange(11 if depth else 6)
    match kind:
        case 0:
            return {"type": rng.choice(["string", "integer", "number", "boolean", "object"])}
        case 1:
            return {"type": ["array", "null", rng.choice(["string", "object"])], "maxItems": 2}
        case 2:
            return {"enum": [1, "a", None, True, [], 2.0]}
        case 3:
            return {"minimum": 0, "exclusiveMaximum": 34, "minLength": 1, "maxLength": 3}
        case 4:
            return {"pattern": "^a|o", "const": "a"} if rng.random() < 0.3 else {"pattern": "^a|o"}
        case 5:
            return rng.choice([True, False, {"minProperties": 1, "uniqueItems": True}])
        case 6:
            return {"items": _schema(rng, depth - 1), "prefixItems": [_schema(rng, depth - 1)]}
        case 7:
            return {"anyOf": [_schema(rng, depth - 1), _schema(rng, depth - 1)]}
        case 8:
            return {"oneOf": [_schema(rng, depth - 1), _schema(rng, depth - 1)]}
        case 9:
            return {"not": _schema(rng, depth - 1)}
        case _:
            return {
                "properties": {"a": _schema(rng, depth - 1), "b": _schema(rng, depth - 1)},
                "required": ["a"],
                "additionalProperties": _schema(rng, depth - 1),
            }
