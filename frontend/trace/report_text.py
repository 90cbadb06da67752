"""A report for a terminal: a table of calls per program, then the totals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .labels import count, percent, seconds, short_source
from .records import CallRecord, ProgramRecord
from .run_record import RunRecord, Totals

_LEFT = ("branch", "call", "at", "notes")  # columns that are text


def text_of(run: RunRecord) -> str:
    """No line break at the end. An "*" marks calls on their program's critical path."""
    blocks = [_program(index, program) for index, program in enumerate(run.programs)]
    return "\n\n".join([*blocks, "\n".join(f"{k:<14} {v}" for k, v in total_rows(run.totals))])


def total_rows(totals: Totals) -> list[tuple[str, str]]:
    """(label, amount) of a report's totals, in words."""
    of_path = percent(totals.critical_s / totals.slowest_s if totals.slowest_s else None)
    hit_rate = percent(totals.hit_rate)
    lower = _parted(("host", totals.host_tokens), ("disk", totals.disk_tokens))
    num_failed = f", {totals.num_failed} failed" if totals.num_failed else ""
    return [
        ("total", seconds(totals.duration_s)),
        ("programs", f"{totals.num_programs} with {totals.num_calls} calls{num_failed}"),
        ("critical path", f"{seconds(totals.critical_s)} ({of_path} of the slowest program)"),
        ("parallelism", "-" if totals.parallelism is None else f"{totals.parallelism:.2f} calls"),
        (
            "time in calls",
            f"queue {seconds(totals.queue_s)}, prefill {seconds(totals.prefill_s)}, "
            f"decode {seconds(totals.decode_s)}",
        ),
        ("pauses", seconds(totals.pause_s)),
        (
            "prompt tokens",
            f"{count(totals.prompt_tokens)}, {count(totals.cached_tokens)} of them cached "
            f"({hit_rate}){lower}",
        ),
        (
            "generated",
            f"{count(totals.generated_tokens)} tokens, {count(totals.forced_tokens)} forced, "
            f"{count(totals.accepted_tokens)} of {count(totals.drafted_tokens)} drafted ones "
            "accepted",
        ),
        ("evicted", f"{totals.evicted_tokens:,} tokens, {count(totals.preemptions)} preemptions"),
    ]


def notes_of(call: CallRecord) -> str:
    """Unusual facts: tiers, evictions, preemptions, samples, cuts, errors."""
    notes = [f"{call.num_samples} samples"] if call.num_samples > 1 else []
    notes += [f"{count(n)} from {tier}" for tier, n in _lower_tiers(call) if n]
    notes += [f"evicted {num:,} of {owner}" for owner, num in call.evicted.items()]
    notes += [f"preempted {call.preemptions}x"] if call.preemptions else []
    notes += ["cut at max_tokens"] if call.finish_reason == "length" else []
    notes += [f"failed: {call.error}"] if call.error else []
    notes += ["did not run"] if call.start_s is None and not call.error else []
    return "; ".join(notes)


def _lower_tiers(call: CallRecord) -> tuple[tuple[str, int | None], ...]:
    return ("host", call.host_tokens), ("disk", call.disk_tokens)


_COLUMNS: dict[str, Callable[[CallRecord], str]] = {
    "branch": lambda call: call.path,
    "call": lambda call: f"{call.name or call.kind}{'*' if call.is_critical else ''}",
    "at": lambda call: short_source(call.source),
    "start": lambda call: seconds(call.start_s),
    "queue": lambda call: seconds(call.queue_s),
    "prefill": lambda call: seconds(call.prefill_s),
    "decode": lambda call: seconds(call.decode_s),
    "prompt": lambda call: count(call.prompt_tokens),
    "cached": lambda call: count(call.cached_tokens),
    "forced": lambda call: count(call.forced_tokens),
    "drafted": lambda call: count(call.drafted_tokens),
    "accepted": lambda call: count(call.accepted_tokens),
    "gen": lambda call: count(call.generated_tokens),
    "notes": notes_of,
}


def _program(index: int, program: ProgramRecord) -> str:
    head = (
        f"#{index} {program.name}: {seconds(program.duration_s)} from "
        f"{seconds(program.start_s)} on, critical path {seconds(program.critical_s)}"
    )
    lines = [head, *_table(program.calls)]
    lines += [
        f"  pause {pause.label or '(unnamed)'} on {pause.path} at {short_source(pause.source)}: "
        f"{seconds(pause.end_s - pause.start_s)}, expected {seconds(pause.expected_s)}"
        for pause in program.pauses
    ]
    lines += [
        f"  hint {hint.action} on {hint.path} at {short_source(hint.source)}: "
        f"{hint.outcome or 'no answer'}, {count(hint.num_tokens)} tokens"
        + (f" ({hint.reason})" if hint.reason else "")
        for hint in program.hints
    ]
    early = program.early_calls
    if early.num_begun:
        lines.append(
            f"  early calls of tools: {early.num_begun} begun, {early.num_used} used, "
            f"{early.num_failed} failed, {seconds(early.saved_s)} before they were asked for"
        )
    return "\n".join([*lines, *([f"  failed: {program.error}"] if program.error else [])])


def _table(calls: Sequence[CallRecord]) -> list[str]:
    if not calls:
        return ["  no calls"]
    rows = [list(_COLUMNS), *([cell(call) for cell in _COLUMNS.values()] for call in calls)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + _row(row, widths).rstrip() for row in rows]


def _row(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = zip(_COLUMNS, row, widths, strict=True)
    return "  ".join(f"{c:<{w}}" if name in _LEFT else f"{c:>{w}}" for name, c, w in cells)


def _parted(*parts: tuple[str, int | None]) -> str:
    known = [f"{num:,} from {tier}" for tier, num in parts if num]
    return f", {', '.join(known)}" if known else ""
