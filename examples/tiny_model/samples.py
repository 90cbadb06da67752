"""What a sample is: a conversation cut into the stretches that a program and the model write.

A runtime tokenizes each stretch alone (role markers, literal text, generated text), so a sample
keeps them apart; training puts loss on the generated stretches only. This module knows nothing
of what the conversations are about.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
MARKERS = {role: f"<|{role}|>" for role in ROLES}
STOP = "\nObservation:"
CHOICE_WEIGHT = 4.0  # a choice is one hard token where other replies have dozens, most of them easy
NAME_WEIGHT = 2.0  # the name of the called tool
BEGIN_RESPONSE, END_RESPONSE = "<tool_response>\n", "\n</tool_response>"


@dataclass(frozen=True)
class Segment:
    """One stretch of a conversation; a marker is one special token, all else is plain text.

    `weight` is that of a token of it in the loss, if it is generated.
    """

    text: str
    is_generated: bool = False
    is_marker: bool = False
    weight: float = 1.0


@dataclass
class Sample:
    """A conversation with its expected generated stretches.

    `facts` is what the lookup tool knows (subject -> text); it is empty unless the skill is
    react. `answers` are the final answers of a react conversation, one for each question.
    `limits` has for each whole reply the arguments of `stemma.gen` with which a program keeps to
    what it can use (`choices`, `json_schema`). `tools` and `dialogue` are, where there are tools,
    these and the messages in OpenAI's format.
    """

    skill: str
    segments: list[Segment] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)
    limits: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    dialogue: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.segments:
            self.segments.append(Segment(BEGIN, is_marker=True))

    def system(self, text: str) -> None:
        self._message("system", text)

    def system_with_tools(self, text: str, tools: Sequence[dict[str, Any]]) -> None:
        """A system message with the tools told in it, as the chat template does; `text`: or ""."""
        self.tools = list(tools)
        self.segments.append(Segment(MARKERS["system"], is_marker=True))
        if text:
            self.segments.append(Segment(text))
            self._log("system", text)
        gap = "\n\n" if text else ""
        self.segments.append(Segment(f"{gap}Tools:" + "".join(map(told, tools))))
        self.segments.append(Segment(END, is_marker=True))

    def user(self, text: str) -> None:
        self._message("user", text)
        self._log("user", text)

    def reply(self, text: str, **limits: Any) -> None:
        """A whole assistant turn that the model generates."""
        self.limits.append(limits)
        self.open()
        self.generated(text, CHOICE_WEIGHT if "choices" in limits else 1.0)
        self.close()
        self._log("assistant", text)

    def reasoned_reply(self, reason: str, text: str, **limits: Any) -> None:
        """A reply whose last line, `text`, follows from the line before it."""
        self.limits.append(limits)
        self.open()
        self.generated(reason)
        self.generated("\n")
        self.generated(text, CHOICE_WEIGHT if "choices" in limits else 1.0)
        self.close()

    def call(self, calls: Sequence[tuple[str, dict[str, Any]]], results: Sequence[str]) -> None:
        """An assistant turn that calls tools, by name and arguments, and what they return."""
        self.open()
        self.write_calls(calls)
        self.close()
        self.segments.append(Segment(MARKERS["user"], is_marker=True))
        gap = ""
        for result in results:
            self.segments += [Segment(gap + BEGIN_RESPONSE), Segment(result)]
            gap = END_RESPONSE + "\n"
        self.segments += [Segment(END_RESPONSE), Segment(END, is_marker=True)]
        ids = [f"call_{len(self.dialogue)}_{index}" for index in range(len(calls))]
        functions = [{"name": name, "arguments": compact(given)} for name, given in calls]
        made = [{"id": call_id, "type": "function", "function": function}
                for call_id, function in zip(ids, functions, strict=True)]  # fmt: skip
        self.dialogue.append({"role": "assistant", "content": None, "tool_calls": made})
        for call_id, result in zip(ids, results, strict=True):
            self.dialogue.append({"role": "tool", "tool_call_id": call_id, "content": result})

    def write_calls(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Calls as the model generates them."""
        for index, (name, arguments) in enumerate(calls):
            self.generated(("\n" if index else "") + '<tool_call>\n{"name": "')
            self.generated(name, NAME_WEIGHT)
            self.generated(f'", "arguments": {compact(arguments)}}}\n</tool_call>')

    def open(self) -> None:
        """Begin an assistant turn."""
        self.segments.append(Segment(MARKERS["assistant"], is_marker=True))

    def generated(self, text: str, weight: float = 1.0) -> None:
        self.segments.append(Segment(text, is_generated=True, weight=weight))

    def text(self, text: str) -> None:
        """A stretch that the program writes."""
        self.segments.append(Segment(text))

    def close(self) -> None:
        """End an assistant turn; the model generates the end marker."""
        self.segments.append(Segment(END, is_generated=True, is_marker=True))

    def render(self) -> str:
        """The conversation as one string, markers included."""
        return "".join(segment.text for segment in self.segments)

    def messages(self, role: str) -> list[str]:
        """The texts of all messages of `role`; in an assistant's, the observations stay out."""
        found: list[str] = []
        current = ""
        for segment in self.segments:
            if segment.is_marker and segment.text in MARKERS.values():
                current = segment.text
                found += [""] if current == MARKERS[role] else []
            elif not segment.is_marker and current == MARKERS[role]:
                is_kept = segment.is_generated or role != "assistant"
                found[-1] += segment.text if is_kept else ""
        return found

    def _message(self, role: str, text: str) -> None:
        self.segments.append(Segment(MARKERS[role], is_marker=True))
        self.segments.append(Segment(text))
        self.segments.append(Segment(END, is_marker=True))

    def _log(self, role: str, text: str) -> None:
        self.dialogue.append({"role": role, "content": text})


def compact(value: Any) -> str:
    """JSON as a grammar leads to it: without blanks."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def told(tool: dict[str, Any]) -> str:
    """One line for a tool, as the chat template writes it."""
    function = tool["function"]
    schema = function["parameters"]
    parameters = []
    for name, given in schema["properties"].items():
        mark = "" if name in schema["required"] else "?"
        kind = "|".join(given["enum"]) if "enum" in given else given["type"]
        parameters.append(f"{name}{mark}" + ("" if kind == "string" else f":{kind}"))
    description = f" {function['description']}" if "description" in function else ""
    return f"\n{function['name']}({','.join(parameters)}){description}"
