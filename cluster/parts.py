"""Branches of a program that run on another replica than the rest of it.

    home replica     text  fork 1 2 3 4  | 1 2 |  3 4, with what they have become |  join  ...
    a part's         text  fork 1 2 3 4  | 3 4 |

A part begins with what its branches need of the program's log, and with what that has become
(`given`). Their own ops go there alone; each goes to the home replica once it is known what it has
become there, and so is not carried out again. So joins and variables are the home replica's
business, as ever, and the program can go on there without its parts: whatever goes wrong with a
part, its branches are recalled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from ..errors import InvalidProgram
from ..frontend.protocol import wire
from ..frontend.protocol.program_log import CALLS, ProgramLog
from .placement.load import BYTES_PER_TOKEN, ProgramLoad
from .placement.spread import ForkedWork, Spread
from .prompt_text import max_tokens_of
from .replica import Part, Replica, ReplicaState, RoutedProgram

MAX_PARTS = 16  # of a program at a time
MAX_OPS = 4096  # of a program whose forks are divided: each time they are looked through,
MAX_FORKS = 64  # and so often at the most


class Parts:
    """The parts of all programs of a router; used by its thread."""

    def __init__(
        self,
        spread: Spread,
        ready: Callable[[], list[Replica]],
        cached_of: Callable[[RoutedProgram], dict[int, float]],
    ) -> None:
        """`ready`: the replicas that take programs; `cached_of`: tokens of a program's beginning by
        replicas' numbers."""
        self._spread = spread
        self._ready = ready
        self._cached_of = cached_of

    # --- ops ------------------------------------------------------------------------------------

    def send(self, program: RoutedProgram, ops: Sequence[list[Any]]) -> None:
        """A program's next ops, to where their branches run."""
        for index, op in enumerate(ops):
            part = program.away.get(op[1])
            if part is not None and not _can_take(part, op):
                self._recall(part)
                part = None
            if part is not None:
                self._send_away(part, op)
                continue
            _send(program, op)
            if op[0] == "fork":
                self._divide(program, op, ops, index + 1)
        _flush(program)

    def _send_away(self, part: Part, op: list[Any]) -> None:
        program, (kind, branch) = part.program, op[:2]
        if kind == "fork":
            for child in dict.fromkeys(op[4]):
                _add(part, child)
        part.withheld[branch].append(op)
        program.num_withheld += 1
        if part.is_open:
            _send_there(part, op)
        else:
            part.waiting.append(op)
        self._forward(part, branch)

    # --- forks ----------------------------------------------------------------------------------

    def _divide(
        self, program: RoutedProgram, fork: list[Any], ops: Sequence[list[Any]], after: int
    ) -> None:
        """Choose where the branches of a fork run; `ops` from `after` on tell what they do."""
        _, branch, seq, _, children = fork[:5]
        home, log = program.replica, program.log
        if len(children) < 2 or len(log.ops) > MAX_OPS or program.num_weighed >= MAX_FORKS:
            return
        others = [each for each in self._ready() if each is not home]
        if not others or home is None or len(program.parts) >= MAX_PARTS:
            return
        if len(set(children)) < len(children) or not _begin_at(log, children, branch, seq):
            return
        program.num_weighed += 1
        work = self._work_of(program, fork, islice(ops, after, None))
        if not any(work.rows):
            return
        parts: dict[int, Part] = {}
        for child, chosen in zip(children, self._spread(work, home, others), strict=True):
            if chosen is home:
                continue
            assert isinstance(chosen, Replica), "it is one of these"
            part = parts.get(chosen.number)
            if part is None:
                load = ProgramLoad(program.load.habits, tenant=program.load.tenant)
                part = parts[chosen.number] = Part(program, (branch, seq), chosen, load)
                part.begins_with = log.needed_for(branch, seq + 1)
                program.parts.append(part)
                missing = work.prefix_tokens - work.cached.get(chosen.number, 0.0)
                load.enter(chosen.load, max(0.0, missing))
            _add(part, child)
        for part in parts.values():
            self._open_if_known(part)

    def _work_of(
        self, program: RoutedProgram, fork: list[Any], later: Iterable[list[Any]]
    ) -> ForkedWork:
        """Of what is not known already: the program may go on here after another replica."""
        usual = program.load.habits.output_tokens
        texts = dict.fromkeys(fork[4], 0.0)
        rows = dict.fromkeys(fork[4], usual)  # where what it says has not come yet
        begun: set[int] = set()
        for op in later:
            if (branch := op[1]) not in texts:
                continue
            if branch not in begun:
                begun.add(branch)
                rows[branch] = 0.0
            if op[0] == "text":
                texts[branch] += len(str(op[4:5])) / BYTES_PER_TOKEN
            elif (branch, op[2]) in program.log.open_calls:
                rows[branch] += min(usual, max_tokens_of(op))
        return ForkedWork(
            program.log.num_bytes_before(fork[1], fork[2]) / BYTES_PER_TOKEN,
            list(texts.values()),
            list(rows.values()),
            self._cached_of(program),
        )

    def _open_if_known(self, part: Part) -> None:
        """Begin a part once it is known what the ops before its fork have become."""
        log, (branch, seq) = part.program.log, part.fork
        if part.is_open or part.replica is None or not log.is_known(branch, seq):
            return
        if part.replica.state is not ReplicaState.READY:  # any more
            self._recall(part)
            return
        part.begins_with = log.needed_for(branch, seq + 1)
        try:
            part.replica.open_part(part)
        except InvalidProgram:  # one of them has become more than a message may have
            self._recall(part)
            return
        part.is_open = True
        for op in log.ops:
            if op[2] < part.begins_with.get(op[1], 0):
                part.replica.outbox.add(part.number_there, wire.encode_op(op))
        for op in part.waiting:
            _send_there(part, op)
        part.waiting.clear()
        if log.ends_gens:
            _end_gens(part)

    # --- what becomes of them -------------------------------------------------------------------

    def note_event(self, program: RoutedProgram, branch: int, kind: str, part: Part | None) -> None:
        """Something new has become known of a branch, from a part or, None, at home."""
        if kind == wire.DELTA:
            return
        for each in list(program.parts):
            self._open_if_known(each)
        away = program.away.get(branch)
        if away is not None:
            if part is None and kind == wire.FAILED:  # a join had enough without it
                _stop(away, branch)
                if away.stopped | away.ended >= away.withheld.keys():
                    self._close(away)
            self._forward(away, branch)
        _flush(program)

    def _forward(self, part: Part, branch: int) -> None:
        """Have the home replica know of a branch what is known."""
        program = part.program
        queue, ops = part.withheld[branch], []
        while queue and program.log.has_become(queue[0]):
            ops.append(queue.popleft())
        program.num_withheld -= len(ops)
        _send_given(program, ops)
        if ops and ops[-1][0] in ("end", "drop"):
            part.ended.add(branch)
            if len(part.ended) == len(part.withheld):
                self._close(part)
                _remove(part)

    def note_idle(self, program: RoutedProgram) -> None:
        """Now and then: where no call is under way and no op will come, what a part waits for may
        never be. The home replica finds out, once it has all of the program."""
        loads = (program.load, *(part.load for part in program.parts))
        is_idle = program.log.has_ended and not any(load.num_calls for load in loads)
        for part in list(program.parts):
            part.num_idle = part.num_idle + 1 if is_idle and not part.is_open else 0
            if part.num_idle > 1:
                self.recall(part)

    # --- their end ------------------------------------------------------------------------------

    def recall(self, part: Part) -> bool:
        """Its branches go on at home, from where they are; whether one waited for a call."""
        has_waited = self._recall(part)
        _flush(part.program)
        return has_waited

    def _recall(self, part: Part) -> bool:
        """The same amid other ops, which are to follow."""
        self._close(part)
        has_waited = part.program.log.lose_branches(part.withheld)
        for queue in _remove(part):
            _send_given(part.program, queue)
        return has_waited

    def forget(self, program: RoutedProgram) -> None:
        """The program ends, or goes on elsewhere as a whole."""
        for part in list(program.parts):
            self._close(part)
        program.parts.clear()
        program.away.clear()
        program.num_withheld = 0

    def end_gens(self, program: RoutedProgram) -> None:
        """Have all gens end with what they have."""
        for part in list(program.parts):
            if part.is_open and part.replica is not None:
                part.replica.outbox.flush(part.number_there)
                _end_gens(part)

    def note_done(self, part: Part, used: Any) -> None:
        """Its replica says that it has ended: nothing of it is under way."""
        if isinstance(used, dict):
            names = ("num_requests", "prompt_tokens", "completion_tokens")
            part.used = [int(used.get(name, 0)) for name in names]
        self._close(part)

    def _close(self, part: Part) -> None:
        replica, part.replica = part.replica, None
        part.load.leave()
        if replica is None:
            return
        part.program.log.add_used(part.used)
        if replica.parts.pop(part.number_there, None) and replica.outbox.forget(part.number_there):
            replica.outbox.queue("cancel", {"program": part.number_there})


def _add(part: Part, branch: int) -> None:
    part.withheld[branch] = deque()
    part.program.away[branch] = part


def _remove(part: Part) -> list[list[list[Any]]]:
    """Its branches run elsewhere no more; returns what was withheld of each."""
    program = part.program
    program.parts.remove(part)
    for branch in part.withheld:
        del program.away[branch]
    withheld = [list(part.withheld[branch]) for branch in sorted(part.withheld)]
    program.num_withheld -= sum(map(len, withheld))
    return withheld


def _can_take(part: Part, op: list[Any]) -> bool:
    """Whether the part's replica has, or will have, all branches that an op speaks of."""
    if part.replica is None or (op[0] == "resume" and op[1] in part.stopped):
        return False
    if op[0] == "fork":  # else it is not to be, and fails
        return _begin_at(part.program.log, op[4], op[1], op[2])
    if op[0] == "join":
        return part.withheld.keys() >= set(op[4])
    if op[0] == "var":
        return op[4] in part.withheld or op[5] < part.begins_with.get(op[4], 0)
    return True


def _begin_at(log: ProgramLog, children: Sequence[int], branch: int, seq: int) -> bool:
    return all(log.begins_at(child, branch, seq) for child in children)


def _send(program: RoutedProgram, op: list[Any]) -> None:
    """To the home replica."""
    if op[0] in CALLS and (op[1], op[2]) in program.log.open_calls:
        program.load.begin_call(max_tokens_of(op))
    assert program.replica is not None, "it is nowhere"
    program.replica.outbox.add(program.number_there, wire.encode_op(op))


def _send_given(program: RoutedProgram, ops: Sequence[list[Any]]) -> None:
    """To the home replica, with what they have become, as far as that is known."""
    if not ops:
        return
    assert program.replica is not None, "it is nowhere"
    for given in program.log.given({(op[1], op[2]) for op in ops}):
        program.replica.outbox.give(program.number_there, given)
    for op in ops:
        is_done = op[0] == "hint" and program.log.is_answered(op)  # of KV that is elsewhere
        _send(program, ["pause", *op[1:3], None, None, ""] if is_done else op)


def _send_there(part: Part, op: list[Any]) -> None:
    kind, branch, seq = op[:3]
    log = part.program.log
    if branch in part.stopped or part.replica is None:
        return
    if kind == "drop" and branch in log.wanted:  # which its own replica does not know
        return
    if kind in CALLS and (branch, seq) in log.open_calls:
        part.load.begin_call(max_tokens_of(op))
    if log.knows((branch, seq)):  # from another replica
        for given in log.given({(branch, seq)}):
            part.replica.outbox.give(part.number_there, given)
    part.replica.outbox.add(part.number_there, wire.encode_op(op))


def _stop(part: Part, branch: int) -> None:
    """Nobody waits for a branch any more."""
    if branch in part.stopped or not part.is_open or part.replica is None:
        return
    part.stopped.add(branch)
    part.replica.outbox.flush(part.number_there)
    part.replica.outbox.queue("cancel", {"program": part.number_there, "branch": branch})


def _end_gens(part: Part) -> None:
    assert part.replica is not None, "it is nowhere"
    part.replica.outbox.queue("cancel", {"program": part.number_there, "keep": True})


def _flush(program: RoutedProgram) -> None:
    """Send what was queued: no op follows once all of it was sent."""
    assert program.replica is not None, "it is nowhere"
    has_ended = program.log.has_ended
    is_all = has_ended and not program.num_withheld
    program.replica.outbox.flush(program.number_there, end=is_all)
    for part in list(program.parts):
        if part.is_open and part.replica is not None:
            part.replica.outbox.flush(part.number_there, end=has_ended)
