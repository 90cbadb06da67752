"""A report as one HTML file that needs no network: where the time went, and what was shared.

Branches are lanes in tree order, calls are bars split into queue, prefill and decode, pauses are
hatched; beside it the calls as a tree of prefixes, below it all numbers as a table. The page is
complete without scripts: assets/timeline.js takes what it adds (tooltips, zoom, keys) from the
table. Positions are percentages of the total time, so that zooming is one CSS variable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from .labels import ABSENT, count, percent, plural, seconds, short_source
from .records import CallRecord, LaneRecord, PauseRecord, ProgramRecord
from .run_record import RunRecord, Totals
from .timeline_prefixes import first_indices, percent_of, prefixes_of
from .timeline_table import table_of

ROW = 36  # pixels, as --row in the style sheet
_ROOM = 1.02  # the axis continues a little past the end
_CENTRE = 26  # of a lane's line, from the top of its row


def page_of(run: RunRecord) -> str:
    """The whole file."""
    names = list(dict.fromkeys(program.name for program in run.programs))
    title = escape(", ".join(names) or "no program")
    totals = run.totals
    script = _asset("timeline.js")
    assert "</script" not in script, "it would end the element that it stands in"
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title} · timeline</title>\n<style>{_asset('timeline.css')}</style></head>",
        f'<body class="no-script"><h1>{title}</h1><p>{plural(totals.num_programs, "program")}, '
        f"{plural(totals.num_calls, 'call')}, {seconds(totals.duration_s)}</p>",
        _tiles(totals),
        _where_time_went(run),
        '<div class="panes">',
        _timeline(run),
        prefixes_of(run),
        "</div>",
        table_of(run),
        '<div id="tip" role="status" hidden></div>',
        f"<script>{script}</script></body></html>\n",
    ]
    return "\n".join(parts)


def _asset(name: str) -> str:
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")


# --- at a glance ----------------------------------------------------------------------------------


def _tiles(totals: Totals) -> str:
    share = totals.critical_s / totals.slowest_s if totals.slowest_s else 0.0
    tiles = [
        ("total time", seconds(totals.duration_s), _programs(totals)),
        ("critical path", seconds(totals.critical_s), f"{share:.0%} of the slowest program"),
        ("parallelism", _ratio(totals.parallelism), "calls at once, while any ran"),
        ("hit rate", percent(totals.hit_rate), f"{count(totals.cached_tokens)} tokens reused"),
        ("prompt tokens", count(totals.prompt_tokens), _computed(totals)),
        ("generated", count(totals.generated_tokens), f"{count(totals.forced_tokens)} forced"),
        ("accepted", count(totals.accepted_tokens), f"of {count(totals.drafted_tokens)} drafted"),
        ("evicted", count(totals.evicted_tokens), f"{count(totals.preemptions)} preemptions"),
    ]
    shown = (
        f"<div><dt>{name}</dt><dd>{value}</dd><small>{more}</small></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def _programs(totals: Totals) -> str:
    failed = f", {totals.num_failed} failed" if totals.num_failed else ""
    return f"{plural(totals.num_programs, 'program')}{failed}"


def _computed(totals: Totals) -> str:
    if totals.prompt_tokens is None or totals.cached_tokens is None:
        return "not all known"
    return f"{count(totals.prompt_tokens - totals.cached_tokens)} computed"


def _where_time_went(run: RunRecord) -> str:
    """The slowest program's time along its critical path, as one bar."""
    program = max(run.programs, key=lambda p: p.duration_s, default=None)
    if program is None or not program.duration_s:
        return ""
    calls = [call for call in program.calls if call.is_critical]
    parts = {name: sum(_split(c)[name] for c in calls) for name in ("queue", "prefill", "decode")}
    parts["other"] = sum(_split(call)["other"] for call in calls)
    parts["pause"] = sum(p.end_s - p.start_s for p in program.pauses if p.is_critical)
    parts["outside"] = max(0.0, program.duration_s - sum(parts.values()))
    whole = sum(parts.values())
    shown = {name: value for name, value in parts.items() if value > 0}
    bar = "".join(
        f'<i class="{k}" style="width:{percent_of(v, whole)}"></i>' for k, v in shown.items()
    )
    key = "".join(
        f'<li><i class="{name}"></i>{_MEANINGS[name]} <b>{value / whole:.0%}</b> '
        f"{seconds(value)}</li>"
        for name, value in shown.items()
    )
    of = "" if len(run.programs) == 1 else f" of the slowest program, #{_index(run, program)}"
    return (
        f"<section><h2>Where the time{of} went: {seconds(program.duration_s)}, along its critical "
        f'path</h2><div class="split">{bar}</div><ul class="key">{key}</ul></section>'
    )


_MEANINGS = {
    "queue": "queue",
    "prefill": "prefill",
    "decode": "decode",
    "other": "call, not split",
    "pause": "pauses",
    "outside": "outside (own code, network)",
}


def _split(call: CallRecord) -> dict[str, float]:
    """A call's time by part; time that the runtime did not report on is "other"."""
    known = {
        "queue": call.queue_s or 0.0,
        "prefill": call.prefill_s or 0.0,
        "decode": call.decode_s or 0.0,
    }
    return {**known, "other": max(0.0, call.duration_s - sum(known.values()))}


# --- lanes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rows:
    """The row of each lane, and conversion to percentages of the whole."""

    total_s: float
    of_lane: Mapping[tuple[int, int], int]  # (program, branch) -> row
    of_program: Mapping[int, int]
    num: int

    def place(self, row: int, start_s: float, end_s: float) -> str:
        width = percent_of(max(0.0, end_s - start_s), self.total_s)
        return f"top:{row * ROW}px;left:{percent_of(start_s, self.total_s)};width:{width}"


def _rows(run: RunRecord) -> _Rows:
    of_lane: dict[tuple[int, int], int] = {}
    of_program: dict[int, int] = {}
    row = 0
    for index, program in enumerate(run.programs):
        if len(run.programs) > 1:
            of_program[index] = row
            row += 1
        for lane in program.lanes:
            of_lane[index, lane.branch] = row
            row += 1
    return _Rows(_ROOM * (run.totals.duration_s or 1e-9), of_lane, of_program, row)


def _timeline(run: RunRecord) -> str:
    rows = _rows(run)
    labels, track = [], []
    for index, program in enumerate(run.programs):
        if index in rows.of_program:
            name = escape(f"#{index} {program.name}")
            labels.append(f'<div class="program" title="{name}">{name}</div>')
            top = rows.of_program[index] * ROW
            track.append(f'<div class="band program" style="top:{top}px"></div>')
        labels += [_label(lane) for lane in program.lanes]
        track += _lanes(index, program, rows)
    first = first_indices(run)
    for index, program in enumerate(run.programs):
        track += [_pause(index, pause, rows) for pause in program.pauses]
        ran = ((first[index] + i, call) for i, call in enumerate(program.calls))
        track += [_bar(number, call, rows) for number, call in ran if call.start_s is not None]
    legend = "".join(
        f'<li><i class="{name}"></i>{meaning}</li>'
        for name, meaning in _MEANINGS.items()
        if name != "outside"
    )
    height = rows.num * ROW
    return (
        '<section aria-label="timeline"><div class="bar"><h2>Timeline</h2>'
        "<span>Ctrl + wheel zooms; + - 0, arrows</span>"
        '<button id="out" aria-label="zoom out">−</button>'
        '<button id="in" aria-label="zoom in">+</button><button id="all">all</button></div>'
        '<div class="scroll" tabindex="-1"><div class="chart">'
        f'<div class="labels">{"".join(labels)}</div>'
        f'<div class="track" data-total-s="{rows.total_s:.6f}"><div class="ticks"></div>'
        f'<div class="rows" style="height:{height}px">{"".join(track)}</div></div></div></div>'
        f'<ul class="key">{legend}<li>outlined: on the critical path</li></ul></section>'
    )


def _label(lane: LaneRecord) -> str:
    indent = 8 + 10 * min(lane.depth, 6)
    name = escape(lane.path)
    shown = f".{name.rpartition('.')[2]}" if lane.depth else name
    return f'<div style="padding-left:{indent}px" title="{name}">{shown}</div>'


def _lanes(index: int, program: ProgramRecord, rows: _Rows) -> Iterator[str]:
    """The line of each branch, and its connections from and to its parent."""
    for lane in program.lanes:
        row = rows.of_lane[index, lane.branch]
        yield f'<div class="life" style="{rows.place(row, lane.start_s, lane.end_s)}"></div>'
        if lane.parent is None:
            continue
        above = rows.of_lane[index, lane.parent] * ROW + _CENTRE
        span = f"top:{above}px;height:{row * ROW + _CENTRE - above + 2}px"
        left = percent_of(lane.start_s, rows.total_s)
        yield f'<div class="link" style="{span};left:{left}"></div>'
        if lane.joins:
            left = percent_of(lane.end_s, rows.total_s)
            yield f'<div class="link join" style="{span};left:{left}"></div>'


def _bar(number: int, call: CallRecord, rows: _Rows) -> str:
    assert call.start_s is not None and call.end_s is not None
    row = rows.of_lane[call.program, call.branch]
    kinds = f"call{' critical' * call.is_critical}{' failed' * (call.error is not None)}"
    split = _split(call)
    whole = sum(split.values()) or 1.0
    inside = "".join(
        f'<i class="{name}" style="width:{percent_of(part, whole)}"></i>'
        for name, part in split.items()
        if part > 0.0005 * whole
    )
    name = escape(call.name or call.kind)
    label = escape(f"{call.name or call.kind} on {call.path}: {seconds(call.duration_s)}")
    return (
        f'<a class="{kinds}" href="#c{number}" style="{rows.place(row, call.start_s, call.end_s)}" '
        f'aria-label="{label}"><span>{name}</span><em>{inside}</em></a>'
    )


def _pause(index: int, pause: PauseRecord, rows: _Rows) -> str:
    row = rows.of_lane[index, pause.branch]
    name = escape(pause.label or "pause")
    lasted = seconds(pause.end_s - pause.start_s)
    more = f"expected {seconds(pause.expected_s)}, at {short_source(pause.source)}"
    return (
        f'<a class="pausing" tabindex="0" data-more="{escape(more)}" '
        f'aria-label="{name} on {escape(pause.path)}: {lasted}" '
        f'style="{rows.place(row, pause.start_s, pause.end_s)}"><span>{name}</span>'
        '<em class="pause"></em></a>'
    )


# --- small things ---------------------------------------------------------------------------------


def _index(run: RunRecord, program: ProgramRecord) -> int:
    return next(i for i, known in enumerate(run.programs) if known is program)


def _ratio(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.1f}"
