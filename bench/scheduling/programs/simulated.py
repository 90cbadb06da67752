"""The same scripts through the real scheduler over a modelled device: the same figures each time,
in seconds instead of minutes. A tool is a delay before the next call.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from ....planning import simulation
from ....planning.traces import Call, Job, Start
from ....runtime.schedule.plan import FinishedStep, StepPlan
from ....runtime.schedule.request import Request
from .figures import clairvoyant_share, figures_of
from .measure import POOL_SHARE, Measured, Runs, say
from .record import CallRecord, Counters, ProgramRecord, RunRecord
from .scripts import Script, Work
from .variants import Variant

# Where the programs were measured (docs/measure/programs.md) a prompt's token takes twice as long
# as on the modelled CPU: 2,048 tokens 1.07 s, at 416 GFLOP/s.
DEVICE = replace(simulation.CPU, prefill_token_ms=0.5, decode_row_ms=0.5)


def simulate(work: Work, variants: Sequence[Variant]) -> Runs:
    """Run the work once on each variant that this engine supports and that can be modelled."""
    pool, found = work.working_set // POOL_SHARE, Runs()
    for variant in variants:
        reason = variant.reason_against()
        if reason is None and "host_kv_tokens" in variant.options:
            reason = "the modelled device has no host tier"
        if reason is not None:
            say(f"{variant.name} is left out: {reason}")
            continue
        run = carry_out_simulated(work, variant, pool)
        share = clairvoyant_share(run, pool)
        found[variant.name] = [Measured(variant.name, 0, figures_of(run), share, 0.0, 0.0)]
    return found


def carry_out_simulated(work: Work, variant: Variant, pool: int) -> RunRecord:
    """Run all scripts with `pool` tokens of KV, from an empty cache on."""
    batch = int(str(variant.options.get("max_running_requests", DEVICE.max_running_requests)))
    device = replace(DEVICE, num_tokens=pool, max_running_requests=batch)
    run = _Run(
        device,
        policy=str(variant.options["schedule_policy"]),
        has_programs=True,
        has_leases=not variant.options.get("disable_leases", False),
    )
    jobs = [_job(script) for script in work.scripts]
    run.run([Start(s.start_s, job) for s, job in zip(work.scripts, jobs, strict=True)])
    programs = []
    for script, job in zip(work.scripts, jobs, strict=True):
        calls = run.calls[job]
        ended_s = max(call.ended_s for call in calls)
        programs.append(ProgramRecord(script, ended_s - script.start_s, tuple(calls)))
    scheduler = run.engine.scheduler
    stats, num_resident = scheduler.stats, scheduler.kv_cache.tree.num_pages
    added = Counters(stats.num_computed_tokens, stats.num_preemptions, num_resident)
    return RunRecord(work, run.now_s, tuple(programs), added)


class _Run(simulation.Simulation):
    """Records the `CallRecord` fields of each call."""

    def __init__(
        self, device: simulation.Device, *, policy: str, has_programs: bool, has_leases: bool
    ) -> None:
        super().__init__(device, policy=policy, has_programs=has_programs, has_leases=has_leases)
        self.calls: dict[Job, list[CallRecord]] = defaultdict(list)
        self._admitted_s: dict[int, float] = {}

    def submit(self, plan: StepPlan) -> FinishedStep:
        for row in plan.rows:
            self._admitted_s.setdefault(row.request_id, self.now_s)
        return super().submit(plan)

    def note_finish(self, record: simulation.CallRecord, request: Request) -> None:
        admitted_s, times = self._admitted_s.pop(request.id), record.token_times_s
        self.calls[record.job.job].append(
            CallRecord(
                prompt=record.call.prompt,
                output=record.output,
                num_cached=request.num_cached_tokens,
                sent_s=record.arrived_s,
                ended_s=self.now_s,
                queue_s=admitted_s - record.arrived_s,
                prefill_s=times[0] - admitted_s,
                decode_s=times[-1] - times[0],
            )
        )
        super().note_finish(record, request)


def _job(script: Script) -> Job:
    history = array("i")
    for turn in script.turns:
        calls = [
            Call(history + array("i", part), turn.num_output, turn.num_output, script.kind)
            for part in turn.parts
        ]
        outputs = yield [replace(call, delay_s=turn.pause_s) for call in calls]
        if len(calls) == 1:
            history = calls[0].prompt + outputs[0]
