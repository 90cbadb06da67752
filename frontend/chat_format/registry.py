"""The tool call formats: one row each, and how the format of a chat template is told by its marks.

The order counts: a template has the first format of which it has the marks, since some formats have
the marks of others and more. A template's own text counts before the tokens that its tokenizer has.
gpt-oss's harmony is no row, as it reads whole outputs; its marks in a template come before all.
`docs/use/tools.md` has this table; `python -m stemma.cli.format_table --write` writes it there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass

from .harmony import Harmony, is_harmony
from .harmony_reader import MARKS as HARMONY_MARKS
from .hermes import BEGIN, Hermes
from .json_calls import JsonCalls
from .literal_calls import BracedCalls, PythonicCalls
from .llama3 import PYTHON_TAG, Llama3
from .matching import STRING
from .mistral import ARGS, CALL_ID, TOOL_CALLS, Mistral
from .named_object import ArrayCalls
from .reasoning import PAIRS, REASONING_TOKENS
from .sections import Section
from .tagged_arguments import ParameterTags
from .tagged_calls import TaggedCalls
from .tool_format import TaughtFormat

Marks = Container[str]


@dataclass(frozen=True, slots=True)
class KnownFormat:
    """A row: its name and other servers' names for it, whose it is, how it is recognised (any of
    the groups of `marks`, and all marks of that), and a call of weather with a city of Ulm.

    `tokens`: texts of calls that are special tokens in some tokenizers. `make`: the format, given
    the marks that the template and the tokenizer have.
    """

    name: str
    models: str
    marks: tuple[tuple[str, ...], ...]
    make: Callable[[Marks], TaughtFormat]
    example: str
    aliases: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()


def _row(
    name: str,
    models: str,
    marks: tuple[tuple[str, ...], ...],
    taught: TaughtFormat,
    example: str,
    aliases: tuple[str, ...] = (),
    tokens: tuple[str, ...] = (),
) -> KnownFormat:
    """A row of a format that does not depend on marks."""
    return KnownFormat(name, models, marks, lambda _: taught, example, aliases, tokens)


def _phi4_mini(marks: Marks) -> TaughtFormat:
    """Its own tokens, unless the template asks for the word that vLLM's asks for."""
    named = ("functools", "<|tool_call|>")
    triggers = named if "functools" in marks else named[::-1]
    end = "" if "functools" in marks else "<|/tool_call|>"
    return ArrayCalls(triggers, end, wrappings=("<|/tool_call|>",))


_DEEPSEEK = tuple(f"<｜tool▁{what}｜>" for what in (
    "calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))  # fmt: skip
_KIMI = tuple(f"<|tool_{what}|>" for what in (
    "calls_section_begin", "calls_section_end", "call_begin", "call_end",
    "call_argument_begin"))  # fmt: skip
_QUOTE = '<|"|>'

FORMATS: tuple[KnownFormat, ...] = (
    KnownFormat(
        "mistral", "Mistral", ((TOOL_CALLS,),), lambda marks: Mistral(is_newer=ARGS in marks),
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ulm"}}]',
        tokens=(TOOL_CALLS, ARGS, CALL_ID),
    ),
    _row(
        "deepseek_v3", "DeepSeek V3, R1", ((_DEEPSEEK[0], "```json"),),
        JsonCalls(
            Section(_DEEPSEEK[0], _DEEPSEEK[1], _DEEPSEEK[2], ("```", _DEEPSEEK[3])),
            before_name=("function", _DEEPSEEK[4]), name_end="\n", behind_name=("```json",),
            glue="\n", before_end="\n", between="\n",
        ),
        f"{_DEEPSEEK[0]}{_DEEPSEEK[2]}function{_DEEPSEEK[4]}weather\n"
        f'```json\n{{"city": "Ulm"}}\n```{_DEEPSEEK[3]}{_DEEPSEEK[1]}',
        ("deepseekv3",), _DEEPSEEK,
    ),
    _row(
        "deepseek_v31", "DeepSeek V3.1", ((_DEEPSEEK[0],),),
        JsonCalls(
            Section(_DEEPSEEK[0], _DEEPSEEK[1], _DEEPSEEK[2], (_DEEPSEEK[3],)),
            behind_name=(_DEEPSEEK[4],),
        ),
        f"{_DEEPSEEK[0]}{_DEEPSEEK[2]}weather{_DEEPSEEK[4]}"
        f'{{"city": "Ulm"}}{_DEEPSEEK[3]}{_DEEPSEEK[1]}',
        ("deepseekv31",),
    ),
    _row(
        "kimi_k2", "Kimi K2", ((_KIMI[0],),),
        JsonCalls(
            Section(_KIMI[0], _KIMI[1], _KIMI[2], (_KIMI[3],)),
            behind_name=(_KIMI[4],), is_numbered=True,
        ),
        f"{_KIMI[0]}{_KIMI[2]}functions.weather:0{_KIMI[4]}"
        f'{{"city": "Ulm"}}{_KIMI[3]}{_KIMI[1]}',
        tokens=_KIMI,
    ),
    _row(
        "minimax_m2", "MiniMax M2", (("<minimax:tool_call>",),),
        TaggedCalls(
            Section(
                "<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="', ("</invoke>",)
            ),
            ParameterTags(
                '<parameter name="', ('">',), "</parameter>", ("</invoke>", "</minimax:tool_call>")
            ),
            name_end='">',
        ),
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Ulm</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        ("minimax-m2",), ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    _row(
        "seed_oss", "Seed-OSS", (("<seed:tool_call>",),),
        TaggedCalls(
            Section("<seed:tool_call>", "</seed:tool_call>", "<function=", ("</function>",),
                    holds_one=True),
            ParameterTags(
                "<parameter=", (">",), "</parameter>", ("</function>", "</seed:tool_call>")
            ),
            name_end=">",
        ),
        "<seed:tool_call>\n<function=weather>\n<parameter=city>Ulm</parameter>\n</function>\n"
        "</seed:tool_call>",
        tokens=("<seed:tool_call>", "</seed:tool_call>"),
    ),
    _row(
        "gemma4", "Gemma 4", (("<|tool_call>",),),
        BracedCalls("<|tool_call>", "<tool_call|>", _QUOTE),
        f"<|tool_call>call:weather{{city:{_QUOTE}Ulm{_QUOTE}}}<tool_call|>",
        tokens=("<|tool_call>", "<tool_call|>", _QUOTE),
    ),
    _row(
        "lfm2", "LFM2", (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        PythonicCalls("<|tool_call_start|>", "<|tool_call_end|>"),
        '<|tool_call_start|>[weather(city="Ulm")]<|tool_call_end|>',
        tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    _row(
        "command_r7b", "Command R7B, Command A", (("<|START_ACTION|>",),),
        ArrayCalls(
            ("<|START_ACTION|>",), "<|END_ACTION|>",
            wrappings=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            openings=(
                ("{", '"tool_call_id"', ":", STRING, ",", '"tool_name"', ":", '"'),
                ("{", '"tool_name"', ":", '"'),
            ),
            written='{{"tool_call_id": "0", "tool_name": "{name}", "parameters": ',
        ),
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "weather", "parameters": '
        '{"city": "Ulm"}}]<|END_ACTION|>',
        ("cohere_command3",), ("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    _row(
        "functionary_v3_2", "Functionary v3.2", ((">>>all",),),
        JsonCalls(
            Section(call_begin=">>>"), name_end="\n", begins_at_start=True, opening="all\n",
            wrappings=(">>>all\n",),
        ),
        'weather\n{"city": "Ulm"}',
    ),
    _row(
        "qwen3_coder", "Qwen3-Coder, Qwen3.5, Nemotron 3", (("<function=", "<parameter="),),
        TaggedCalls(
            Section("<tool_call>", "</tool_call>", "<function=", ("</function>",), holds_one=True),
            ParameterTags("<parameter=", (">",), "</parameter>", ("</function>", "</tool_call>"),
                          is_padded=True),
            name_end=">",
        ),
        "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n</function>\n"
        "</tool_call>",
        ("qwen3_xml", "nemotron_v3"),
    ),
    _row(
        "functionary_v3_1", "Functionary v3.1", (("<function=",),),
        JsonCalls(Section(call_begin="<function=", call_end=("</function>",)), name_end=">"),
        '<function=weather>{"city": "Ulm"}</function>',
    ),
    _row(
        "glm47", "GLM-4.7", (("</arg_key><arg_value>",),),
        TaggedCalls(
            Section("<tool_call>", "</tool_call>"),
            ParameterTags(
                "<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>", ("</tool_call>",)
            ),
            name_end="", line_end="",
        ),
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Ulm</arg_value></tool_call>",
    ),
    _row(
        "glm45", "GLM-4.5, GLM-4.6", (("<arg_key>",),),
        TaggedCalls(
            Section("<tool_call>", "</tool_call>"),
            ParameterTags(
                "<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>", ("</tool_call>",)
            ),
            name_end="", between_key_and_value="\n",
        ),
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call>",
        ("glm",),
    ),
    KnownFormat(
        "phi4_mini_json", "Phi-4-mini", (("functools",), ("<|/tool_call|>",)), _phi4_mini,
        'functools[{"name": "weather", "arguments": {"city": "Ulm"}}]',
        tokens=("<|tool_call|>", "<|/tool_call|>"),
    ),
    _row(
        "granite", "Granite 3", (("<|tool_call|>",),), ArrayCalls(("<|tool_call|>", BEGIN)),
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Ulm"}}]',
        tokens=("<|tool_call|>",),
    ),
    _row(
        "hermes", "Hermes, Qwen2.5, Qwen3, Granite 4, SmolLM3", ((BEGIN,),), Hermes(),
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>',
        ("qwen", "qwen25"), (BEGIN, "</tool_call>"),
    ),
    _row(
        "llama3", "Llama 3.1 to 3.3", ((PYTHON_TAG,), ("ipython",)), Llama3(),
        '{"name": "weather", "parameters": {"city": "Ulm"}}',
        ("llama3_json",), (PYTHON_TAG,),
    ),
)  # fmt: skip
_BY_NAME = {name: row for row in FORMATS for name in (row.name, *row.aliases)}
HARMONY = "harmony"  # no row: it reads whole outputs
TOOL_CALL_PARSERS = ("auto", HARMONY, *_BY_NAME, "none")

# Special tokens that are shown in outputs, as calls and reasoning are written with them.
STRUCTURE_MARKS = tuple(
    dict.fromkeys((*REASONING_TOKENS, *(token for row in FORMATS for token in row.tokens)))
)
# Texts by which a template's formats are recognised.
FORMAT_MARKS = tuple(
    dict.fromkeys(
        (
            *STRUCTURE_MARKS,
            *HARMONY_MARKS,
            *(mark for row in FORMATS for group in row.marks for mark in group),
            *(tags.end for tags in PAIRS.values()),
        )
    )
)


def channels_of(parser: str, marks: Mapping[str, int | None], written: Marks) -> Harmony | None:
    """The format of whole outputs for `parser`, where it is harmony; "auto": where the template has
    its marks, before all others', whatever tokens there are."""
    is_it = parser == HARMONY or (parser == "auto" and is_harmony(written))
    return Harmony.of(marks) if is_it else None


def format_of(parser: str, marks: Marks, written: Marks = ()) -> TaughtFormat | None:
    """The format for `parser`, one of TOOL_CALL_PARSERS; "auto": the one whose marks the template
    has, or else the tokenizer. `marks`: of either; `written`: of the template. None: not known."""
    found = detected(marks, written) if parser == "auto" else _BY_NAME.get(parser)
    return None if found is None else found.make(marks)


def detected(marks: Marks, written: Marks) -> KnownFormat | None:
    """The row that a template's marks tell, or else those of its tokenizer."""
    for there in (written, marks):
        for row in FORMATS:
            if any(all(mark in there for mark in group) for group in row.marks):
                return row
    return None
