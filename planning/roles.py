"""Goodput of engines with roles apart against engines that do both: the largest rate of calls at
which most of them meet a limit of their first token's time and of each further token's.

(Goodput as in DistServe, Zhong et al., OSDI 2024.) Real schedulers and trees over the roofline
model's steps, on a simulated clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..cluster.placement.policies import policy_of
from ..runtime.memory.copies import BlockRestore
from ..runtime.memory.disk.block_key import BlockLayout
from ..runtime.memory.kv_layout import KVLayout
from ..runtime.schedule.plan import StepPlan
from .fleet_simulation import CallTimes, Chunking, FleetSimulation, Routing
from .mixes import Mix
from .roofline import CostModel
from .simulated_streams import Apart, Link

_WARM_SHARE = 0.25  # of a run, whose calls do not count: the fleet fills
STEP = 1.25  # between two rates that are tried
_ROUTING = Routing(lambda: policy_of("program"))


@dataclass(frozen=True, slots=True)
class Limits:
    """When a call is good."""

    ttft_s: float
    tpot_s: float

    def share(self, times: Sequence[CallTimes]) -> float:
        """Of calls that are; 0 for none."""
        good = sum(t.ttft_s <= self.ttft_s and t.tpot_s <= self.tpot_s for t in times)
        return good / len(times) if times else 0.0


@dataclass(frozen=True, slots=True)
class Layout:
    """How the engines are used. `num_prefill`: of them; 0: each does both, prompts in chunks."""

    name: str
    num_prefill: int = 0
    chunking: Chunking = Chunking()


def layouts(num_engines: int) -> list[Layout]:
    """Those that are compared: two settings of engines that do both, and every ratio."""
    together = [
        Layout("together", 0),
        Layout("together, steps of 512", 0, Chunking(512, 0.0)),
    ]
    apart = range(1, num_engines)
    return together + [Layout(f"{n} prefill, {num_engines - n} decode", n) for n in apart]


@dataclass(frozen=True, slots=True)
class RooflineDevice:
    """What each engine computes on."""

    costs: CostModel
    num_tokens: int
    max_running_requests: int

    @property
    def prefill_token_ms(self) -> float:
        """Of a prompt that is long enough for the arithmetic to be the limit."""
        return 1e3 * self.costs.step_time([(2048, 0)], 1).total_s / 2048

    def step_s(self, plan: StepPlan) -> float:
        """Its rows, and the copies of what has come from elsewhere into its pages."""
        rows = [(len(row.input_ids), row.start) for row in plan.rows]
        num_sampled = sum(row.sampling is not None for row in plan.rows)
        copied = sum(len(each.pages) for each in plan.transfers if isinstance(each, BlockRestore))
        copy_s = 2 * copied * self.costs.model.kv_bytes_per_token / self.costs.device.kv_bytes_s
        return self.costs.step_time(rows, num_sampled).total_s + copy_s


@dataclass(frozen=True, slots=True)
class Fleet:
    """So many engines, each a model on a device, and the links between them."""

    device: RooflineDevice
    num_engines: int
    link: Link

    def run(self, layout: Layout, mix: Mix, rate: float, *, seed: int, duration_s: float) -> Run:
        """Calls of so many seconds."""
        model = self.device.costs.model
        apart = None
        if layout.num_prefill:
            kv = KVLayout.of(model.config, model.format.dtype)
            apart = Apart(layout.num_prefill, self.link, BlockLayout("", "", kv))
        fleet = FleetSimulation(
            self.device,
            self.num_engines,
            _ROUTING,
            seed=seed,
            chunking=layout.chunking,
            apart=apart,
        )
        fleet.run(mix.starts(seed, rate, duration_s))
        begin_s = _WARM_SHARE * duration_s
        times = [each for each in fleet.times if begin_s <= each.asked_s < duration_s]
        busy = [replica.busy_s / fleet.now_s for replica in fleet.replicas]
        streams = fleet.streams
        return Run(
            rate,
            times,
            busy,
            0 if streams is None else streams.num_asked,
            1.0 if streams is None else streams.hidden_share,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a rate."""

    rate: float
    times: list[CallTimes]  # of calls that were sent after the fleet had filled
    busy: list[float]  # share of the time, of each engine
    num_asked: int  # prompts computed elsewhere
    hidden: float  # of sending


def sweep(
    fleet: Fleet,
    layout: Layout,
    mix: Mix,
    all_limits: Sequence[Limits],
    *,
    share: float,
    first_rate: float,
    seed: int = 0,
    duration_s: float = 40.0,
) -> list[Run]:
    """Runs at rising rates, until no limit is met any more by `share` of the calls, and at falling
    ones until each is, or the rate is tiny."""
    runs: list[Run] = []

    def tried(rate: float) -> bool:
        run = fleet.run(layout, mix, rate, seed=seed, duration_s=duration_s)
        runs.append(run)
        return any(limits.share(run.times) >= share for limits in all_limits)

    rate = first_rate
    while tried(rate):
        rate *= STEP
    rate = first_rate
    while rate > first_rate / 64 and any(
        all(limits.share(run.times) < share for run in runs) for limits in all_limits
    ):
        rate /= STEP
        tried(rate)
    return sorted(runs, key=lambda run: run.rate)


def goodput(runs: Sequence[Run], limits: Limits, share: float) -> float:
    """Calls a second of which `share` are good, between the two rates around it by the logarithm
    of the rate; 0 where the lowest one misses already."""
    shares = [limits.share(run.times) for run in runs]
    good = [index for index, each in enumerate(shares) if each >= share]
    if not good:
        return 0.0
    last = good[-1]
    if last + 1 == len(runs):
        return runs[last].rate
    part = (shares[last] - share) / (shares[last] - shares[last + 1])
    return runs[last].rate * math.exp(part * math.log(runs[last + 1].rate / runs[last].rate))
