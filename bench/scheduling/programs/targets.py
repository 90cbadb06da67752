"""What the benchmark's figures are to reach, and whether they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from .measure import Measured, Runs
from .variants import BASE, HOST, POLICIES, VLLM


@dataclass(frozen=True, slots=True)
class Target:
    """A figure and its lower bound or, with `is_least` False, upper bound."""

    name: str
    figure: float
    wanted: float
    is_least: bool = True

    def row(self) -> dict[str, object]:
        """For the table and the report."""
        is_met = self.figure >= self.wanted if self.is_least else self.figure <= self.wanted
        sign = ">=" if self.is_least else "<="
        return {
            "target": self.name,
            "figure": self.figure,
            "wanted": f"{sign} {self.wanted:g}",
            "met": "yes" if is_met else "no",
        }


def react_targets(runs: Runs) -> list[Target]:
    """Against the best policy without leases, against vLLM, and against Belady's choice, as far as
    they were run."""
    found: list[Target] = []
    for engine, faster, fewer in ((BASE, 1.3, 2.0), (HOST, 1.5, 3.0)):
        if engine in runs and (rivals := [name for name in POLICIES if name in runs]):
            best = min(rivals, key=lambda name: _median(runs[name], _wall_s))
            least = min(_median(runs[name], _recomputed) for name in rivals)
            again = least / max(1.0, _median(runs[engine], _recomputed))
            speed = _ratio(runs[best], runs[engine], _wall_s)
            found.append(Target(f"react, {engine}: times faster than {best}", speed, faster))
            found.append(Target(f"react, {engine}: times fewer tokens again", again, fewer))
    if BASE in runs and VLLM in runs:
        speed = _ratio(runs[VLLM], runs[BASE], _wall_s)
        found.append(Target("react: times faster than vLLM per call", speed, 2.0))
    if BASE in runs:
        share = median(one.clairvoyant_share or 0.0 for one in runs[BASE])
        found.append(Target("react: share of the clairvoyant hits", share, 0.9))
    return found


def mixed_targets(runs: Runs) -> list[Target]:
    """The policy for programs against first come, first served."""
    if not {BASE, "fcfs"} <= runs.keys():
        return []
    mean = _ratio(runs["fcfs"], runs[BASE], lambda one: one.figures.mean_s)
    longest = _ratio(runs[BASE], runs["fcfs"], lambda one: one.figures.longest_s)
    return [
        Target("mixed: mean completion, times better than fcfs", mean, 2.0),
        Target("mixed: longest program, times that of fcfs", longest, 1.2, is_least=False),
    ]


def restart_target(ratio: float) -> Target:
    """The first token of a known prefix against that of a new one."""
    return Target("restart: first token, times faster than cold", ratio, 4.0)


def _median(measured: Sequence[Measured], figure: Callable[[Measured], float]) -> float:
    return median(map(figure, measured))


def _ratio(
    upper: Sequence[Measured], lower: Sequence[Measured], figure: Callable[[Measured], float]
) -> float:
    """The median over pairs of the ratio of two figures."""
    return median(figure(a) / figure(b) for a, b in zip(upper, lower, strict=True))


def _wall_s(one: Measured) -> float:
    return one.figures.wall_s


def _recomputed(one: Measured) -> float:
    return one.figures.recomputed_tokens
