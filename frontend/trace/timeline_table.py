"""The timeline's table: all numbers of all calls; the page's scripts read it."""

from __future__ import annotations

from html import escape

from .labels import ABSENT, count, seconds, short_source
from .records import CallRecord
from .report_text import notes_of
from .run_record import RunRecord

_COLUMNS = (
    "program",
    "branch",
    "call",
    "at",
    "start",
    "total",
    "queue",
    "prefill",
    "decode",
    "prompt",
    "cached",
    "host",
    "disk",
    "generated",
    "forced",
    "drafted",
    "accepted",
    "evicted",
    "preempted",
    "finish",
    "notes",
)
_WORDS = ("program", "branch", "call", "at", "finish", "notes")


def table_of(run: RunRecord) -> str:
    """A row per call; columns without any value are left out."""
    rows = [_values(call) for call in run.calls]
    columns = [
        (name, [row[index] for row in rows])
        for index, name in enumerate(_COLUMNS)
        if name in _WORDS or any(row[index] != ABSENT for row in rows)
    ]
    head = "".join(f"<th{_word(name)}>{name}</th>" for name, _ in columns)
    body = "\n".join(
        f'<tr id="c{number}">'
        + "".join(f"<td{_word(name)}>{escape(values[number])}</td>" for name, values in columns)
        + "</tr>"
        for number in range(len(rows))
    )
    return (
        '<section aria-label="all calls"><h2>All calls</h2><div class="wide"><table id="calls">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


def _values(call: CallRecord) -> tuple[str, ...]:
    """The cell values, in the columns' order."""
    evicted = ", ".join(f"{owner}: {num:,}" for owner, num in call.evicted.items())
    return (
        f"#{call.program}",
        call.path,
        call.name or call.kind,
        short_source(call.source),
        seconds(call.start_s),
        seconds(None if call.start_s is None else call.duration_s),
        seconds(call.queue_s),
        seconds(call.prefill_s),
        seconds(call.decode_s),
        count(call.prompt_tokens),
        count(call.cached_tokens),
        count(call.host_tokens),
        count(call.disk_tokens),
        count(call.generated_tokens),
        count(call.forced_tokens),
        count(call.drafted_tokens),
        count(call.accepted_tokens),
        evicted or ABSENT,
        count(call.preemptions),
        call.finish_reason or ABSENT,
        notes_of(call),
    )


def _word(column: str) -> str:
    return ' class="word"' if column in _WORDS else ""
