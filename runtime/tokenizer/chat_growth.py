"""Role delimiters of a growing conversation, without rendering it whole at each message.

Nearly every template writes a message by its neighbours alone, whatever comes earlier. So the
delimiters of one more message are read off a short conversation with the same beginning and end.
This is a guess: callers render the whole conversation once before anything is generated.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import InvalidProgram
from .chat_template import ChatTemplate, TemplateArgs
from .template_message import Turn

MIN_TURNS = 8  # conversations of up to so many messages are rendered whole
_TAIL_TURNS = 4  # at least this many of the last messages are rendered


def grown_marks(
    template: ChatTemplate,
    turns: Sequence[Turn],
    delimiters: Sequence[str],
    turn: Turn | None,
    args: TemplateArgs,
) -> list[str] | None:
    """The delimiters of `turns` plus one more message, or plus a generation prompt (`turn` None),
    given the `delimiters` of `turns`. Returns None where they cannot be guessed.

    Raises InvalidProgram with a `field` where the template leaves out the message's content.
    """
    short = _shortened(turns)
    if short is None:
        return None
    try:
        before = template.delimiters(short, args=args)
        if turn is None:
            after = template.delimiters(short, open_turn=True, args=args)
        else:
            after = template.delimiters([*short, turn], args=args)
    except InvalidProgram as error:
        if error.field == f"messages.{len(short)}.content":
            raise InvalidProgram(str(error), f"messages.{len(turns)}.content") from error
        return None
    last = len(before) - 1
    if after[:last] != before[:last] or not after[last].startswith(before[last]):
        return None
    fresh = after[last][len(before[last]) :]
    return [*delimiters[:-1], delimiters[-1] + fresh, *after[last + 1 :]]


def _shortened(turns: Sequence[Turn]) -> list[Turn] | None:
    """The messages up to the first user's, then last messages that could follow it; None where
    that is not shorter."""
    first = next((i for i, turn in enumerate(turns[:MIN_TURNS]) if turn.role == "user"), None)
    if first is None or len(turns) <= MIN_TURNS:
        return None
    head, following = first + 1, turns[first + 1].role
    for start in range(len(turns) - _TAIL_TURNS, head, -1):
        if turns[start].role == following:
            return [*turns[:head], *turns[start:]]
    return None
