"""Which models are loaded, with engines that are played: in which order, for whom, how often."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from stemma.errors import EngineError, ModelLoadError
from stemma.server.access.drain import DrainState
from stemma.server.models import model_pool, model_slot
from stemma.server.models.model_pool import ModelPool, PoolLimits
from stemma.server.models.model_slot import ModelSlot, ModelSpec, Prepared
from stemma.server.protocol.failures import Refusal
from stemma.server.supervisor import EngineState


class PlayedSupervisor:
    """An engine that is there as soon as it is started."""

    def __init__(self, launch: Any, *, timeout_s: float) -> None:
        self.num_restarts = 0
        self.state = EngineState.STARTING
        self.connection = SimpleNamespace(info={})
        self.programs: list[str] = launch()

    def start(self) -> None:
        pass

    def wait_started(self) -> None:
        if self.programs == ["broken"]:
            raise EngineError("it is broken")
        self.state = EngineState.READY

    def num_programs(self, timeout_s: float, if_silent: int = 0) -> int:
        return if_silent if self.programs == ["silent"] else len(self.programs)

    def drain(self) -> None:
        self.state = EngineState.DRAINING

    def abandon(self, reason: str) -> None:
        pass

    def stop(self) -> None:
        self.state = EngineState.STOPPED


class PoolHarness:
    """Models of a byte each, those with capital names of two; `programs` run on their engines."""

    def __init__(
        self,
        names: str,
        max_models: int,
        load_timeout_s: float = 60.0,
        max_bytes: int | None = None,
    ) -> None:
        self.programs: dict[str, list[str]] = {name: [] for name in names}
        self.slots = {name: ModelSlot(self._spec(name), 1.0) for name in names}
        self.drain_state = DrainState()
        limits = PoolLimits(max_models, max_bytes, load_timeout_s, drain_s=60.0)
        self.pool = ModelPool(list(self.slots.values()), limits, self.drain_state)

    def _spec(self, name: str) -> ModelSpec:
        prepared = Prepared(lambda: self.programs[name], 1 + name.isupper(), {})  # type: ignore[arg-type, return-value]
        return ModelSpec(name, f"ipc:///{name}", lambda: prepared)

    async def enter(
        self, name: str, patience_s: float | None = None, keep_alive_s: float | None = None
    ) -> None:
        await self.pool.enter(self.slots[name], patience_s, keep_alive_s)

    def leave(self, name: str) -> None:
        self.pool.leave(self.slots[name])

    async def use(self, name: str, keep_alive_s: float | None = None) -> None:
        await self.enter(name, keep_alive_s=keep_alive_s)
        self.leave(name)

    @property
    def loaded(self) -> str:
        return "".join(name for name, slot in self.slots.items() if slot.is_loaded)


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_slot, "EngineSupervisor", PlayedSupervisor)
    monkeypatch.setattr(model_pool, "POLL_S", 0.001)


def run(scene: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(scene())  # type: ignore[arg-type]


def test_the_one_used_least_recently_makes_room() -> None:
    async def scene() -> None:
        pool = PoolHarness("abcd", 2)
        for name, loaded in (("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "ac"), ("d", "cd")):
            await pool.use(name)
            assert pool.loaded == loaded
        assert pool.slots["a"].num_loads == pool.slots["a"].num_unloads == 1

    run(scene)


def test_requests_for_one_model_load_it_once() -> None:
    async def scene() -> None:
        pool = PoolHarness("a", 1)
        await asyncio.gather(*(pool.enter("a") for _ in range(100)))
        assert pool.slots["a"].num_loads == 1 and pool.slots["a"].num_running == 100

    run(scene)


def test_requests_for_several_models_never_wait_for_each_others() -> None:
    """Each has half of the room when it waits for the rest."""

    async def scene() -> None:
        pool = PoolHarness("abcd", 2, load_timeout_s=5.0)

        async def use_both(names: str) -> None:
            slots = [pool.slots[name] for name in names]
            await pool.pool.enter_all(slots)
            assert set(pool.loaded) == set(names)
            for name in names:
                pool.leave(name)

        await asyncio.gather(use_both("ab"), use_both("cd"), use_both("bc"))

    run(scene)


def test_who_waits_for_several_models_in_vain_holds_none_of_them() -> None:
    async def scene() -> None:
        pool = PoolHarness("abc", 2, load_timeout_s=0.2)
        await pool.enter("c")
        slots = [pool.slots["a"], pool.slots["b"]]
        waiting = [pool.pool.enter_all(slots), pool.pool.enter_all(slots)]
        told = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(each, Refusal) for each in told)
        assert [slot.num_running for slot in slots] == [0, 0]

    run(scene)


def test_a_request_for_several_models_lets_one_go_first_that_needs_their_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for the one that has left already, and is not in the other one meanwhile."""
    monkeypatch.setattr(model_pool, "TURN_S", 0.0)

    async def scene() -> None:
        pool = PoolHarness("abC", 3, load_timeout_s=5.0, max_bytes=2)
        both = [pool.slots["a"], pool.slots["b"]]
        await pool.pool.enter_all(both)
        await pool.use("a")  # so that b leaves first
        other = asyncio.create_task(pool.enter("C"))
        await until(lambda: pool.slots["b"].is_leaving)
        late = asyncio.create_task(pool.pool.enter_all(both))
        await until(lambda: pool.slots["b"].num_waiting == 1)
        for name in "ab":
            pool.leave(name)
        await other
        assert pool.loaded == "C" and not late.done()
        pool.leave("C")
        await late
        assert pool.loaded == "ab"

    run(scene)


def test_neither_a_request_nor_a_program_loses_its_model() -> None:
    async def scene() -> None:
        pool = PoolHarness("abc", 2)
        await pool.enter("a")
        await pool.use("b")
        pool.programs["b"].append("a program")
        waiting = asyncio.create_task(pool.enter("c"))
        await until(lambda: pool.slots["c"] in pool.pool._seeking)
        with pytest.raises(Refusal, match="'a', 'b' have something to do") as refused:
            await pool.enter("c", 0.01)
        assert refused.value.status_code == 503
        assert pool.loaded == "ab"
        pool.programs["b"].clear()
        await waiting
        assert pool.loaded == "ac"

    run(scene)


def test_a_model_that_always_has_something_to_do_makes_room_after_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_pool, "TURN_S", 0.0)

    async def scene() -> None:
        pool = PoolHarness("ab", 1)
        await pool.enter("a")
        other = asyncio.create_task(pool.enter("b"))
        await until(lambda: pool.slots["a"].is_leaving)
        late = asyncio.create_task(pool.enter("a"))
        await until(lambda: pool.slots["a"].num_waiting == 1)
        assert pool.loaded == "a" and not other.done(), "who is in goes on"
        pool.leave("a")
        await other
        assert pool.loaded == "b" and not late.done()
        pool.leave("b")
        await late
        assert pool.loaded == "a"

    run(scene)


def test_a_model_just_loaded_lets_those_in_first_who_waited_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However long its load took, and whoever wants its room by then."""
    monkeypatch.setattr(model_pool, "TURN_S", 0.0)
    seen: list[bool] = []

    def look(pool: PoolHarness) -> None:
        slot = pool.slots["b"]
        if slot.is_loaded and not seen:
            pool.pool._have_one_leave(pool.slots["a"])
            seen.append(slot.is_leaving)

    async def scene() -> None:
        pool = PoolHarness("ab", 1)
        tell = pool.pool.tell
        monkeypatch.setattr(pool.pool, "tell", lambda: (look(pool), tell()))
        await pool.use("b")
        assert seen == [False] and pool.slots["b"].num_loads == 1

    run(scene)


def test_a_turn_that_nobody_wants_any_more_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_pool, "TURN_S", 0.0)

    async def scene() -> None:
        pool = PoolHarness("ab", 1)
        await pool.enter("a")
        other = asyncio.create_task(pool.enter("b"))
        await until(lambda: pool.slots["a"].is_leaving)
        late = asyncio.create_task(pool.enter("a"))
        await until(lambda: pool.slots["a"].num_waiting == 1)
        other.cancel()
        await late
        assert pool.slots["a"].num_loads == 1 and pool.slots["b"].num_loads == 0

    run(scene)


def test_those_who_wait_for_a_model_that_fails_are_told_and_it_is_tried_again_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_pool, "RETRY_PAUSES_S", (0.0, 60.0))

    async def scene() -> None:
        pool = PoolHarness("ab", 2)
        await pool.use("a")
        pool.programs["b"].append("broken")
        asked = await asyncio.gather(*(pool.enter("b") for _ in range(9)), return_exceptions=True)
        assert {str(error) for error in asked} == {"model 'b' cannot be loaded: it is broken"}
        assert pool.slots["b"].num_loads == 1, "one attempt for all"
        for _ in range(3):
            with pytest.raises(ModelLoadError):
                await pool.enter("b")
        assert pool.slots["b"].num_loads == 2, "the second failure is followed by a pause"
        monkeypatch.setattr(model_pool, "_now", lambda: asyncio.get_running_loop().time() + 61)
        pool.programs["b"].clear()
        await pool.use("b")
        await until(lambda: pool.slots["b"].failure is None)
        assert pool.loaded == "ab"

    run(scene)


def test_draining_refuses_those_who_wait() -> None:
    async def scene() -> None:
        pool = PoolHarness("ab", 1)
        await pool.enter("a")
        waiting = asyncio.create_task(pool.enter("b"))
        await until(lambda: pool.slots["b"].num_waiting == 1)
        pool.drain_state.close()
        pool.pool.tell()
        with pytest.raises(Refusal, match="being stopped"):
            await waiting
        assert pool.slots["b"].num_loads == 0

    run(scene)


def test_a_closed_slot_starts_nothing() -> None:
    async def scene() -> None:
        pool = PoolHarness("a", 1)
        pool.slots["a"].close()
        with pytest.raises(ModelLoadError, match="being stopped"):
            await pool.enter("a")
        assert pool.loaded == ""

    run(scene)


def test_who_waits_while_another_model_is_being_unloaded_is_told_of_it() -> None:
    async def scene() -> None:
        pool = PoolHarness("ab", 1)
        await pool.use("a")
        pool.slots["a"].is_unloading = True  # and its engine has not ended
        with pytest.raises(Refusal, match="no room for it while 'a' have something to do"):
            await pool.enter("b", 0.01)

    run(scene)


def test_a_model_is_unloaded_once_when_several_ask_for_it_at_once() -> None:
    async def scene() -> None:
        pool = PoolHarness("a", 1)
        slot = pool.slots["a"]
        await pool.use("a")
        await asyncio.gather(*(pool.pool.unload(slot) for _ in range(4)))
        assert pool.loaded == "" and slot.num_unloads == 1
        await pool.use("a")
        assert pool.loaded == "a", "nothing of the first one is left to end it"

    run(scene)


def test_a_model_that_is_being_loaded_is_refused_to_be_unloaded_in_these_words() -> None:
    async def scene() -> None:
        pool = PoolHarness("a", 1)
        slot = pool.slots["a"]
        slot.start(slot.spec.prepare())
        with pytest.raises(Refusal, match="is being loaded"):
            await pool.pool.unload(slot)

    run(scene)


# --- how long an idle model stays -----------------------------------------------------------------


def test_a_model_leaves_after_the_last_of_its_requests_whose_keep_alive_is_0() -> None:
    async def scene() -> None:
        pool = PoolHarness("ab", 2)
        await pool.use("b")
        await pool.enter("a", keep_alive_s=0.0)
        await pool.enter("a")  # tells none: the one before holds
        pool.leave("a")
        await pool.pool._in_thread(lambda: None)
        assert pool.loaded == "ab"
        pool.leave("a")
        await until(lambda: pool.loaded == "b" and not pool.pool._expiries)
        await pool.use("a")
        await pool.pool._in_thread(lambda: None)
        assert pool.loaded == "ab" and pool.slots["a"].num_unloads == 1, "it is of one load"

    run(scene)


def test_a_model_stays_for_its_keep_alive_since_the_last_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene() -> None:
        began_s = asyncio.get_running_loop().time()
        now_s = [began_s]
        monkeypatch.setattr(model_pool, "_now", lambda: now_s[0])
        pool = PoolHarness("a", 1)
        slot = pool.slots["a"]
        await pool.use("a", 60.0)
        now_s[0] += 50
        await pool.use("a")
        assert slot.remaining_s(now_s[0]) == 60
        now_s[0] += 59
        pool.pool.tell()
        await pool.pool._in_thread(lambda: None)
        assert pool.loaded == "a" and slot.remaining_s(now_s[0]) == 1
        now_s[0] += 1
        pool.pool.tell()
        await until(lambda: pool.loaded == "")

    run(scene)


def test_a_model_with_a_program_stays_until_that_has_ended() -> None:
    async def scene() -> None:
        pool = PoolHarness("a", 1)
        pool.programs["a"].append("a program")
        await pool.use("a", 0.0)
        for _ in range(3):
            await pool.pool._in_thread(lambda: None)
        assert pool.loaded == "a"
        pool.programs["a"].clear()
        await until(lambda: pool.loaded == "")

    run(scene)


def test_an_engine_that_does_not_answer_is_not_taken_for_idle() -> None:
    async def scene() -> None:
        pool = PoolHarness("ab", 1)
        await pool.use("a")
        pool.programs["a"].append("silent")
        with pytest.raises(Refusal, match="has requests or programs"):
            await pool.pool.unload(pool.slots["a"])
        waiting = asyncio.create_task(pool.enter("b"))
        await until(lambda: pool.slots["b"] in pool.pool._seeking)
        await pool.pool._in_thread(lambda: None)
        assert pool.loaded == "a"
        pool.programs["a"].clear()
        await waiting

    run(scene)


def test_for_ever_takes_an_earlier_keep_alive_back() -> None:
    async def scene() -> None:
        pool = PoolHarness("a", 1)
        await pool.use("a", 60.0)
        await pool.use("a", math.inf)
        await until(lambda: not pool.pool._expiries)
        assert pool.loaded == "a"
        pool.pool.let_go(pool.slots["a"])
        await until(lambda: pool.loaded == "")
        pool.pool.let_go(pool.slots["a"])  # of one that is not there: nothing
        assert not pool.pool._expiries

    run(scene)
