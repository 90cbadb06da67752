"""From a run's records to figures: what was computed again, who waited for what, how good the cache
was beside one that never evicts and one that knows the future."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ....radix.tree import RadixTree
from ...harness.report import percentile
from ..clairvoyant import Use, num_hits
from .record import CallRecord, ProgramRecord, RunRecord


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one run. Seconds per program add up to its completion, except for the client's own
    time; of parallel calls, the one that ended last counts."""

    wall_s: float
    hit_rate: float  # of all prompt tokens
    infinite_hit_rate: float  # of a cache that never evicts
    recomputed_tokens: int  # prompt tokens computed beyond those that such a cache computes
    preemptions: int | None
    displaced_tokens: int | None  # computed, and no longer in the device's pool
    mean_s: float  # completion of programs
    p50_s: float
    p99_s: float
    longest_s: float
    idle_share: float  # of the wall time, in which no call was open
    paused_s: float  # per program, on average
    queued_s: float | None
    prefill_s: float | None
    decode_s: float | None


def figures_of(run: RunRecord) -> Figures:
    """All but the clairvoyant cache's share, which takes seconds to compute."""
    calls = run.calls
    num_prompt = sum(len(call.prompt) for call in calls)
    num_cached = sum(call.num_cached for call in calls)
    num_known = _infinite_hits(calls)
    num_computed = _num_prompt_computed(run, num_prompt - num_cached)
    computed, resident = run.added.num_computed, run.added.num_resident
    ends = sorted(program.completion_s for program in run.programs)
    return Figures(
        wall_s=run.wall_s,
        hit_rate=num_cached / num_prompt,
        infinite_hit_rate=num_known / num_prompt,
        recomputed_tokens=max(0, num_computed - (num_prompt - num_known)),
        preemptions=run.added.num_preemptions,
        displaced_tokens=None if computed is None or resident is None else computed - resident,
        mean_s=fmean(ends),
        p50_s=percentile(ends, 50),
        p99_s=percentile(ends, 99),
        longest_s=ends[-1],
        idle_share=1 - _busy_s(calls) / run.wall_s,
        paused_s=fmean(sum(t.pause_s for t in p.script.turns) for p in run.programs),
        queued_s=_mean_of(run.programs, "queue_s"),
        prefill_s=_mean_of(run.programs, "prefill_s"),
        decode_s=_mean_of(run.programs, "decode_s"),
    )


def clairvoyant_share(run: RunRecord, num_tokens: int) -> float:
    """The run's hits as a share of those of Belady's choice, for the same calls at the same times
    and room for `num_tokens`."""
    calls = run.calls
    uses = [Use(c.prompt, c.output[:-1], c.admitted_s, c.ended_s) for c in calls]
    return sum(call.num_cached for call in calls) / max(1, num_hits(uses, num_tokens))


def _infinite_hits(calls: Sequence[CallRecord]) -> int:
    """Prompt tokens that a never-evicting cache would hold; the last one is always computed."""
    tree, hits = RadixTree(), 0
    for call in calls:
        hits += tree.match_length("", call.prompt, len(call.prompt) - 1)
        known = call.prompt + call.output[:-1]
        tree.insert("", known, known)
    return hits


def _num_prompt_computed(run: RunRecord, num_missed: int) -> int:
    """Prompt tokens computed, by the engine's own count if it has one, so that preemption's cost is
    included: minus the inputs of decode steps, which are all tokens of an output but the last."""
    if run.added.num_computed is None:
        return num_missed
    return run.added.num_computed - sum(len(call.output) - 1 for call in run.calls)


def _busy_s(calls: Sequence[CallRecord]) -> float:
    """Seconds in which at least one call was open."""
    busy_s = until_s = 0.0
    for sent_s, ended_s in sorted((call.sent_s, call.ended_s) for call in calls):
        busy_s += max(0.0, ended_s - max(sent_s, until_s))
        until_s = max(until_s, ended_s)
    return busy_s


def _mean_of(programs: Sequence[ProgramRecord], phase: str) -> float | None:
    """Mean over programs of the seconds that their calls spent in a phase."""
    found = [[getattr(call, phase) for call in _critical(program)] for program in programs]
    if any(seconds is None for one in found for seconds in one):
        return None
    return fmean(sum(one) for one in found)


def _critical(program: ProgramRecord) -> list[CallRecord]:
    """The call of each turn that ended last."""
    calls = iter(program.calls)
    turns = ([next(calls) for _ in turn.parts] for turn in program.script.turns)
    return [max(turn, key=lambda call: call.ended_s) for turn in turns]
