"""The interpreter of a program's ops in the client, with a scripted caller: what each op does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from stemma.errors import EngineError
from stemma.frontend.openai.calls import Filling, OnDelta, Outcome
from stemma.frontend.openai.client_session import ClientSession
from stemma.frontend.openai.client_transcript import ClientTranscript, Prompt
from stemma.frontend.openai.speculation import Draft, Slot
from stemma.frontend.protocol import ir, wire
from stemma.frontend.protocol.ir import (
    Drop,
    End,
    Fork,
    Gen,
    Hint,
    Join,
    Op,
    Pause,
    Resume,
    RoleBegin,
    RoleEnd,
    Text,
    Var,
)


class ScriptedCaller:
    """Answers with the prompt's length in brackets once `release` is called for the gen's name
    (its first stop string); notes what was asked and what was cancelled."""

    def __init__(self, held: Sequence[str] = ()) -> None:
        self.prompts: list[Prompt] = []
        self.cancelled: list[str] = []
        self._gates = {name: asyncio.Event() for name in held}

    def release(self, name: str) -> None:
        self._gates[name].set()

    def can_continue(self, prompt: Prompt) -> bool:
        return True

    async def gen(
        self, prompt: Prompt, params: ir.GenParams, seed: int, on_delta: OnDelta | None = None
    ) -> Outcome:
        name = (params.stop or ("",))[0]
        self.prompts.append(prompt)
        try:
            if name in self._gates:
                await self._gates[name].wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        if name == "bad":
            raise EngineError("it broke")
        text = f"[{len(prompt.text)}]"
        return Outcome(text, text, {"latency_s": 0.0})

    async def select(self, prompt: Prompt, op: ir.Select) -> Outcome:
        return Outcome(op.choices[0], op.choices[0], {})

    async def hint(self, target: dict[str, str] | None, op: ir.Hint) -> dict[str, Any]:
        return {"outcome": "rejected", "target": target}

    async def draft(
        self, prompt: Prompt, params: ir.GenParams, seed: int, num_tokens: int
    ) -> tuple[Draft, dict[str, Any]]:
        raise AssertionError("nothing is speculated here")

    async def fill(
        self,
        prompt: Prompt,
        terms: list[str | Slot],
        params: ir.GenParams,
        seed: int,
        num_tokens: int,
    ) -> Filling:
        raise AssertionError("nothing is speculated here")


class Run:
    """A session and its events."""

    def __init__(self, held: Sequence[str] = ()) -> None:
        self.caller = ScriptedCaller(held)
        self.events: list[tuple[int, int, str, Any]] = []
        root = ClientTranscript(has_text=True, has_chat=True)
        self.session = ClientSession(
            self.caller, root, lambda *event: self.events.append(event), seed=1
        )

    async def send(self, *ops: Op, end: bool = False) -> None:
        self.session.receive(ops)
        self.session.flush(end=end)
        self.session.advance()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    def value(self, branch: int, seq: int) -> Any:
        return next(e[3] for e in self.events if e[:3] == (branch, seq, wire.VALUE))

    def failures(self) -> dict[tuple[int, int], str]:
        """Of those that failed, by what failed."""
        failed = [e for e in self.events if e[2] == wire.FAILED]
        return {e[:2]: e[3]["message"] for e in failed if e[3]["kind"] != wire.STOPPED}

    def stopped(self) -> set[int]:
        """Branches that were stopped, as nobody needed them."""
        return {e[0] for e in self.events if e[2] == wire.FAILED and e[3]["kind"] == wire.STOPPED}

    @property
    def is_done(self) -> bool:
        return self.events[-1:] == [(0, 0, wire.DONE, None)]


def gen(branch: int, seq: int, name: str = "") -> Gen:
    return Gen(branch, seq, "file.py:7", name or "x", ir.GenParams(stop=(name,) if name else None))


def test_ops_run_in_order_and_the_program_ends_when_all_is_done() -> None:
    async def main() -> None:
        run = Run(held=["slow"])
        await run.send(Text(0, 0, None, "ab"), gen(0, 1, "slow"), Text(0, 2, None, "cd"), gen(0, 3))
        assert run.events == []
        run.caller.release("slow")
        await run.settle()
        assert run.value(0, 1)["text"] == "[2]"
        assert run.value(0, 3)["text"] == "[7]"  # ab[2]cd
        assert not run.is_done
        await run.send(end=True)
        assert run.is_done

    asyncio.run(main())


def test_forks_run_at_once_and_a_join_appends_what_they_wrote() -> None:
    async def main() -> None:
        run = Run(held=["a", "b"])
        await run.send(
            Text(0, 0, None, "root"),
            Fork(0, 1, None, (1, 2)),
            Text(1, 0, None, "one"),
            gen(1, 1, "a"),
            End(1, 2, None),
            gen(2, 0, "b"),
            Var(2, 1, None, 1, 1),
            End(2, 2, None),
            Join(0, 2, None, (1, 2), "concate_and_append"),
            gen(0, 3),
            end=True,
        )
        assert sorted(prompt.text for prompt in run.caller.prompts) == ["root", "rootone"]
        run.caller.release("b")
        await run.settle()
        run.caller.release("a")
        await run.settle()
        assert run.value(0, 2) == {"value": None, "text": "one[7][4][7]"}
        assert run.value(0, 3)["text"] == f"[{len('rootone[7][4][7]')}]"
        assert run.is_done

    asyncio.run(main())


def test_a_join_appends_whole_messages() -> None:
    async def main() -> None:
        run = Run()
        child = [RoleBegin(1, 0, None, "user"), Text(1, 1, None, "Hi"), RoleEnd(1, 2, None)]
        await run.send(
            Fork(0, 0, None, (1,)),
            *child,
            End(1, 3, None),
            Join(0, 1, None, (1,), "concate_and_append"),
            RoleBegin(0, 2, None, "assistant"),
            gen(0, 3),
            end=True,
        )
        (prompt,) = run.caller.prompts
        assert [(m.role, m.text) for m in prompt.messages] == [("user", "Hi")]
        assert run.value(0, 1)["text"] == "USER:Hi\n"

    asyncio.run(main())


@pytest.mark.parametrize("mode", ir.JOIN_MODES)
def test_a_join_of_the_first_k_stops_the_others(mode: str) -> None:
    async def main() -> None:
        run = Run(held=["a", "b", "c"])
        ops: list[Op] = [Text(0, 0, None, "."), Fork(0, 1, None, (1, 2, 3))]
        for branch, name in ((1, "a"), (2, "b"), (3, "c")):
            ops += [Text(branch, 0, None, name), gen(branch, 1, name), End(branch, 2, None)]
        await run.send(*ops, Join(0, 2, None, (1, 2, 3), mode, 2), end=True)
        for name in ("c", "a"):
            run.caller.release(name)
            await run.settle()
        text = "a[2]c[2]" if mode == "concate_and_append" else ""
        assert run.value(0, 2) == {"value": [0, 2], "text": text}
        assert run.caller.cancelled == ["b"]
        assert run.is_done
        assert run.stopped() == {2}

    asyncio.run(main())


def test_a_join_of_the_first_k_fails_only_when_too_few_are_left() -> None:
    async def main() -> None:
        run = Run(held=["a", "bad"])
        ops: list[Op] = [Text(0, 0, None, "."), Fork(0, 1, None, (1, 2, 3))]
        for branch, name in ((1, "a"), (2, "bad"), (3, "bad")):
            ops += [gen(branch, 0, name), End(branch, 1, None)]
        await run.send(*ops, Join(0, 2, None, (1, 2, 3), "gather_variable", 2), end=True)
        run.caller.release("bad")
        await run.settle()
        assert set(run.failures()) == {(2, 0), (3, 0), (0, 2)}
        assert "it broke (at file.py:7)" in run.failures()[0, 2]

    asyncio.run(main())


def test_a_failed_branch_fails_its_join_and_what_forks_from_it() -> None:
    async def main() -> None:
        run = Run()
        await run.send(
            Text(0, 0, None, "."),
            Fork(0, 1, None, (1,)),
            gen(1, 0, "bad"),
            Fork(1, 1, None, (2,)),
            gen(2, 0),
            End(1, 2, None),
            Join(0, 2, None, (1,)),
            end=True,
        )
        assert set(run.failures()) == {(1, 0), (2, 0), (0, 2)}
        assert "it broke" in run.failures()[2, 0]
        assert run.is_done
        assert len(run.caller.prompts) == 1

    asyncio.run(main())


def test_a_dropped_branch_stops_at_once_unless_others_wait_for_it() -> None:
    async def main() -> None:
        run = Run(held=["a", "b"])
        await run.send(
            Text(0, 0, None, "."),
            Fork(0, 1, None, (1, 2)),
            gen(1, 0, "a"),
            gen(2, 0, "b"),
            Var(0, 2, None, 2, 0),
        )
        await run.send(Drop(1, 1, None), Drop(2, 1, None))
        assert run.caller.cancelled == ["a"]
        run.caller.release("b")
        await run.settle()
        assert run.value(0, 2)["text"] == "[1]"
        await run.send(Var(0, 3, None, 1, 0), end=True)
        assert "nobody reads this branch any more" in run.failures()[0, 3]
        assert run.is_done

    asyncio.run(main())


def test_the_forks_of_a_loser_stop_with_it() -> None:
    async def main() -> None:
        run = Run(held=["slow"])
        await run.send(
            Text(0, 0, None, "."),
            Fork(0, 1, None, (1, 2)),
            Fork(1, 0, None, (3,)),
            gen(3, 0, "slow"),
            Join(1, 1, None, (3,)),
            gen(2, 0),
            End(2, 1, None),
            Join(0, 2, None, (1, 2), "gather_variable", 1),
            end=True,
        )
        assert run.value(0, 2)["value"] == [1]
        assert run.caller.cancelled == ["slow"] and run.stopped() == {1, 3}
        assert run.is_done

    asyncio.run(main())


def test_siblings_of_a_failed_branch_stop_once_the_program_has_ended() -> None:
    async def main() -> None:
        run = Run(held=["slow"])
        await run.send(
            Text(0, 0, None, "."),
            Fork(0, 1, None, (1, 2)),
            gen(1, 0, "bad"),
            gen(2, 0, "slow"),
            Join(0, 2, None, (1, 2)),
        )
        assert not run.caller.cancelled, "the program may still read them"
        await run.send(end=True)
        assert run.caller.cancelled == ["slow"] and run.stopped() == {2}
        assert run.is_done

    asyncio.run(main())


def test_a_pause_passes_and_a_hint_is_about_what_the_branch_has() -> None:
    async def main() -> None:
        run = Run()
        await run.send(
            Text(0, 0, None, "."), Pause(0, 1, None, 2.0), Hint(0, 2, None, "pin"), gen(0, 3)
        )
        outcome = run.value(0, 2)["value"]
        assert outcome == {"outcome": "rejected", "target": {"prompt": "."}}
        assert run.value(0, 3)["text"] == "[1]"
        assert [event[1] for event in run.events] == [2, 3]

    asyncio.run(main())


def test_what_waits_for_nothing_fails_when_the_program_ends() -> None:
    async def main() -> None:
        run = Run()
        await run.send(Text(0, 0, None, "."), Fork(0, 1, None, (1,)), Join(0, 2, None, (1,)))
        assert run.events == []
        await run.send(end=True)
        assert run.failures() == {(0, 2): "it waits for something that never comes"}
        assert run.is_done

    asyncio.run(main())


def test_cancelling_ends_calls_and_events() -> None:
    async def main() -> None:
        run = Run(held=["a"])
        await run.send(Text(0, 0, None, "."), gen(0, 1, "a"), gen(0, 2))
        run.session.cancel()
        run.caller.release("a")
        await run.settle()
        assert run.caller.cancelled == ["a"]
        assert run.events == []

    asyncio.run(main())


def test_a_defect_of_the_caller_fails_the_branch_and_not_in_silence() -> None:
    async def main() -> None:
        run = Run()

        async def broken(*args: object) -> Outcome:
            raise KeyError("x")

        run.caller.gen = broken  # type: ignore[method-assign, assignment]
        await run.send(Text(0, 0, None, "."), gen(0, 1), end=True)
        assert run.failures() == {(0, 1): "KeyError: 'x'"}
        assert run.is_done

    asyncio.run(main())


def test_a_branch_that_failed_goes_on_from_before_the_op_that_did() -> None:
    async def main() -> None:
        run = Run()
        await run.send(Text(0, 0, None, "ab"), gen(0, 1, "bad"), Text(0, 2, None, "lost"))
        assert run.failures() == {(0, 1): "it broke"}
        await run.send(Resume(0, 3, None), Text(0, 4, None, "c"), gen(0, 5), end=True)
        assert run.caller.prompts[-1].text == "abc"
        assert run.value(0, 5)["text"] == "[3]" and run.is_done

    asyncio.run(main())


def test_a_message_that_failed_can_be_asked_for_again() -> None:
    async def main() -> None:
        run = Run()
        question = (RoleBegin(0, 0, None, "user"), Text(0, 1, None, "q"), RoleEnd(0, 2, None))
        answer = (RoleBegin(0, 3, None, "assistant"), gen(0, 4, "bad"), RoleEnd(0, 5, None))
        await run.send(*question, *answer)
        again = (RoleBegin(0, 7, None, "assistant"), gen(0, 8), RoleEnd(0, 9, None))
        await run.send(Resume(0, 6, None, drops_message=True), *again, end=True)
        assert [(m.role, m.text) for m in run.caller.prompts[-1].messages] == [("user", "q")]
        assert run.is_done and set(run.failures()) == {(0, 4)}

    asyncio.run(main())


def test_a_branch_that_was_stopped_or_never_began_fails_again() -> None:
    async def main() -> None:
        run = Run()
        await run.send(gen(0, 0, "bad"), Fork(0, 1, None, (1,)), Text(1, 0, None, "."))
        await run.send(Resume(1, 1, None), Text(1, 2, None, "."), end=True)
        assert {(1, 0), (1, 1)} <= set(run.failures()) and run.is_done

    asyncio.run(main())


def test_ops_out_of_order_are_refused() -> None:
    async def main() -> None:
        run = Run()
        with pytest.raises(ValueError, match="seq"):
            run.session.receive([Text(0, 1, None, ".")])

    asyncio.run(main())
