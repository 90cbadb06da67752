"""Goodput of engines with roles apart against engines that do both: the largest rate of calls at
which most of them meet a limit of their first token's time and of each further token's.

(Goodput as in DistServe, Zhong et al., OSDI 2024.) Real schedulers and trees over the roofline
model's steps, on a simulated clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import floor, log2

from ..cluster.placement.policies import policy_of
from ..runtime.memory.disk.block_key import BlockLayout
from ..runtime.memory.kv_layout import KVLayout
from .devices import Link
from .fleet_simulation import CallTimes, FleetSimulation, Routing
from .mixes import Mix
from .roofline_device import RooflineDevice
from .simulated_engine import DEFAULT_CHUNKING, Chunking, SimulatedEngine
from .simulated_streams import Apart, SimulatedStreams

_WARM_SHARE = 0.4  # of a run, whose calls do not count: the fleet fills
_PATIENCE = 1.5  # times a run's duration, until which calls must have ended
_STEPS = 4  # rates that are tried between one and its double
_MAX_DOUBLINGS = 8  # either way from the first rate
_ROUTING = Routing(lambda: policy_of("program"))


@dataclass(frozen=True, slots=True)
class Limits:
    """When a call is good."""

    ttft_s: float
    tpot_s: float

    def share(self, run: Run) -> float:
        """Of calls that are; 1 where there were none."""
        good = sum(t.ttft_s <= self.ttft_s and t.tpot_s <= self.tpot_s for t in run.times)
        return good / run.num_calls if run.num_calls else 1.0


@dataclass(frozen=True, slots=True)
class Layout:
    """How the engines are used. `num_prefill`: of them; 0: each does both, prompts in chunks."""

    name: str
    num_prefill: int = 0
    chunking: Chunking = DEFAULT_CHUNKING


def layouts(num_engines: int) -> list[Layout]:
    """Those that are compared: two settings of engines that do both, and every ratio."""
    apart = [
        Layout(f"{num} prefill, {num_engines - num} decode", num) for num in range(1, num_engines)
    ]
    return [Layout("together"), Layout("together, steps of 512", 0, Chunking(512, 0.0)), *apart]


@dataclass(frozen=True, slots=True)
class Fleet:
    """So many engines, each a model on a device, and the links between them."""

    device: RooflineDevice
    num_engines: int
    link: Link
    host_tokens: int = 0  # KV of each engine's host tier
    acceptance: float = 0.0  # see SimulatedEngine

    def engine(self, layout: Layout) -> SimulatedEngine:
        """Each of them."""
        return SimulatedEngine(self.device, layout.chunking, self.host_tokens, self.acceptance)

    def run(self, layout: Layout, mix: Mix, rate: float, *, seed: int, duration_s: float) -> Run:
        """Calls of so many seconds."""
        model = self.device.costs.model
        streams = None
        if layout.num_prefill:
            kv = KVLayout.of(model.config, model.format.dtype)
            apart = Apart(layout.num_prefill, self.link, BlockLayout("", "", kv))
            streams = SimulatedStreams(apart, self.num_engines)
        fleet = FleetSimulation(
            [self.engine(layout)] * self.num_engines,
            _ROUTING,
            seed=seed,
            streams=streams,
        )
        starts = mix.starts(seed, rate, duration_s)
        fleet.run(starts, _PATIENCE * duration_s, counted_s=duration_s)
        begin_s = _WARM_SHARE * duration_s
        num_asked = sum(begin_s <= asked_s < duration_s for asked_s in fleet.asked_s)
        return Run(
            num_asked / (duration_s - begin_s),
            fleet.num_calls,
            num_asked,
            [each for each in fleet.times if begin_s <= each.asked_s < duration_s],
            [replica.busy_s / fleet.now_s for replica in fleet.replicas],
            0 if streams is None else streams.num_asked,
            None if streams is None else streams.hidden_share,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a rate."""

    rate: float  # calls a second that were sent after the fleet had filled
    num_all: int  # calls
    num_calls: int  # that were sent after the fleet had filled
    times: list[CallTimes]  # of those of them that ended in time
    busy: list[float]  # share of the time, of each engine
    num_asked: int  # prompts computed elsewhere
    hidden: float | None  # of sending; None: nothing was sent


@dataclass(frozen=True, slots=True)
class Goodput:
    """The largest rate that was good enough; `run`: of the rate below it, None if none was."""

    rate: float
    run: Run | None


@dataclass(frozen=True, slots=True)
class RoughTimes:
    """Of a call on one of a fleet's engines, from which a search may start."""

    alone_s: float  # with nobody beside it
    share_s: float  # of an engine's time, in a batch

    @classmethod
    def of(cls, device: RooflineDevice, prompt_tokens: int, output_tokens: int) -> RoughTimes:
        """`prompt_tokens`: that are not cached."""
        costs, num_rows = device.costs, min(32, device.max_running_requests)
        prompt_s = costs.step_time([(prompt_tokens, 0)], 1).total_s
        row = (1, prompt_tokens)
        batch_s = costs.step_time([row] * num_rows, num_rows).total_s
        alone_s = prompt_s + output_tokens * costs.step_time([row], 1).total_s
        return cls(alone_s, prompt_s + output_tokens * batch_s / num_rows)


class Search:
    """Of one layout under one mix. Each rate is simulated once, whatever limits are asked for.

    Rates are powers of 2 ** (1 / _STEPS). The time of a simulation grows with its rate, up to what
    the engines can do: a search goes away from where it begins by steps that double, and begins
    where the one before has ended.
    """

    def __init__(
        self,
        fleet: Fleet,
        layout: Layout,
        mix: Mix,
        *,
        first_rate: float,
        seed: int = 0,
        duration_s: float,
        num_calls: int = 0,
    ) -> None:
        """A rate is simulated for so long at least, and for about so many calls."""
        self._try = partial(fleet.run, layout, mix, seed=seed)
        self._duration_s = duration_s
        self._num_calls = num_calls
        self._runs: dict[int, Run] = {}  # by power
        self._first = self._begin = round(_STEPS * log2(first_rate))

    def goodput(self, limits: Limits, share: float, least: float = 0.0) -> Goodput:
        """The rate in calls a second of which `share` are within limits: between the two rates
        tried that lie around it, by its logarithm. Raises no error where there is none: 0. Nor is
        one below `least` searched for: one run mostly tells that it is, and the rate is 0."""

        def is_good(power: int) -> bool:
            return limits.share(self._run(power)) >= share

        if least:
            self._first = self._begin = floor(_STEPS * log2(least))
            if not is_good(self._begin):
                return Goodput(0.0, None)
        there, step = self._begin, 1 if is_good(self._begin) else -1
        while is_good(there + step) == (step > 0):
            there, step = there + step, 2 * step
            if abs(there + step - self._first) > _MAX_DOUBLINGS * _STEPS:
                run = self._run(there)
                return Goodput(run.rate, run) if step > 0 else Goodput(0.0, None)
        low, high = sorted((there, there + step))
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if is_good(middle) else (low, middle)
        self._begin = low
        run = self._run(low)
        within, beyond = limits.share(run), limits.share(self._run(high))
        part = (within - share) / max(1e-9, within - beyond)
        return Goodput(run.rate * 2 ** (part / _STEPS), run)

    def _run(self, power: int) -> Run:
        if power not in self._runs:
            rate = 2 ** (power / _STEPS)
            duration_s = max(self._duration_s, self._num_calls / rate)
            self._runs[power] = self._try(rate, duration_s=duration_s)
        return self._runs[power]
