"""What a sample is: a conversation cut into the stretches that a program and the model write.

A runtime tokenizes each stretch alone (role markers, literal text, generated text), so a sample
keeps them apart; training puts loss on the generated stretches only. This module knows nothing
of what the conversations are about.
"""

from dataclasses import dataclass, field
from typing import Any

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
MARKERS = {role: f"<|{role}|>" for role in ROLES}
STOP = "\nObservation:"
CHOICE_WEIGHT = 4.0  # a choice is one hard token where other replies have dozens, most of them easy


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
    what it can use (`choices`, `json_schema`).
    """

    skill: str
    segments: list[Segment] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    answers: list[str] = field(default_factory=list)
    limits: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.segments:
            self.segments.append(Segment(BEGIN, is_marker=True))

    def system(self, text: str) -> None:
        self._message("system", text)

    def user(self, text: str) -> None:
        self._message("user", text)

    def reply(self, text: str, **limits: Any) -> None:
        """A whole assistant turn that the model generates."""
        self.limits.append(limits)
        self.open()
        self.generated(text, CHOICE_WEIGHT if "choices" in limits else 1.0)
        self.close()

    def reasoned_reply(self, reason: str, text: str, **limits: Any) -> None:
        """A reply whose last line, `text`, follows from the line before it."""
        self.limits.append(limits)
        self.open()
        self.generated(reason)
        self.generated("\n")
        self.generated(text, CHOICE_WEIGHT if "choices" in limits else 1.0)
        self.close()

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
