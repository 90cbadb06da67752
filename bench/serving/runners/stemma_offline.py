"""Stemma as a program's author uses it: an `Engine` process, and one program a tree of requests."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .... import __version__
from ....errors import EngineError
from ....frontend.backend import Engine
from ....frontend.client.backend import Backend
from ....frontend.dsl.expr import tokens
from ....frontend.dsl.function import function
from ....frontend.dsl.generation import gen
from ....frontend.dsl.state import ProgramState
from ...harness.step_watch import StepWatch
from ...harness.workloads import PromptBook, WorkItem, Workload
from .protocol import main

_LOOK_S = 0.05  # 192 steps are told of at a time

Children = dict[int | None, list[WorkItem]]
States = dict[int, ProgramState]


@function
def _tree(
    s: ProgramState, root: WorkItem, workload: Workload, children: Children, states: States
) -> None:
    """Runs `root` and all below it; `states` gets the branch of each request."""
    _grow(s, root, workload, children, states)


def _grow(
    s: ProgramState, item: WorkItem, workload: Workload, children: Children, states: States
) -> None:
    s += tokens(item.tokens)
    s += gen(
        str(item.id),
        max_tokens=item.max_tokens,
        temperature=0,
        ignore_eos=workload.ignore_eos,
        json_schema=workload.json_schema,
    )
    states[item.id] = s
    below = children.get(item.id, [])
    branches = s.fork(len(below)) if len(below) > 1 else [s] * len(below)
    for branch, child in zip(branches, below, strict=True):
        _grow(branch, child, workload, children, states)


class StemmaOffline:
    """Owns the engine's process."""

    engine = "stemma"
    version = __version__
    mode = "offline"

    def __init__(self, args: argparse.Namespace) -> None:
        options = {"num_threads": args.threads, "max_total_tokens": args.kv_tokens}
        if args.speculate is not None:
            options["speculate"] = args.speculate
        if args.draft_model is not None:
            options["draft_model"] = args.draft_model
        self._engine = Engine(args.model, **options)

    def run(self, workload: Workload) -> PromptBook:
        return run_workload(workload, self._engine)

    def log(self, workload: Workload) -> list[dict[str, Any]]:
        """All steps of the workload; raises EngineError where some were missed."""
        steps: list[dict[str, Any]] = []

        def take(_: int, newer: list[dict[str, Any]], num_missed: int) -> None:
            if num_missed:
                raise EngineError(f"{num_missed} steps were missed: they are too short to log")
            steps.extend(newer)

        with StepWatch(self._engine, None, take, _LOOK_S):
            self.run(workload)
        return steps

    def close(self) -> None:
        self._engine.shutdown()


def run_workload(workload: Workload, backend: Backend) -> PromptBook:
    """One program per tree, all at once."""
    children, states = workload.children(), States()
    rows = [{"root": root} for root in children[None]]
    _tree.run_batch(rows, workload=workload, children=children, states=states, backend=backend)
    book = PromptBook()
    for item in workload.requests:
        book.prompt(item)
        book.outputs[item.id] = states[item.id].get_meta_info(str(item.id))["output_ids"]
    return book


if __name__ == "__main__":
    sys.exit(main(StemmaOffline))
