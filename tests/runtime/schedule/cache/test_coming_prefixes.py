"""Which prompts are computed elsewhere, and who waits for them; what is sent is in
tests/runtime/memory/peers/."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from fakes import make_request
from kv_blocks import LAYOUT

from stemma.runtime.memory.peers import wire
from stemma.runtime.memory.peers.kv_receiver import ComingPrefix, Peer
from stemma.runtime.schedule.cache.coming_prefixes import (
    MIN_ASKED_TOKENS,
    ComingPrefixes,
    Here,
)

TOKEN_S = 0.001


@dataclass
class FakeReceiver:
    """One peer, and the prefixes that were asked of it."""

    queue_s: float = 0.0
    byte_s: float = 0.0
    is_there: bool = True
    num_ended: int = 0
    asked: list[ComingPrefix] = field(default_factory=list)
    released: list[ComingPrefix] = field(default_factory=list)
    layout = LAYOUT

    def best_peer(self) -> Peer | None:
        pong = wire.Pong("one", "", True, self.queue_s, TOKEN_S)
        return Peer("ipc://x", pong) if self.is_there else None

    def ask(
        self, peer: Peer, namespace: str, token_ids: array[int], start: int, expected_s: float
    ) -> ComingPrefix:
        blocks = [np.zeros(LAYOUT.block_bytes, np.uint8) for _ in range(start, len(token_ids), 256)]
        made = ComingPrefix(namespace, token_ids, start, blocks, start, 1.0, 0.0, "one")
        self.asked.append(made)
        return made

    def release(self, prefix: ComingPrefix) -> None:
        self.released.append(prefix)

    def end(self, prefix: ComingPrefix, num_there: int) -> None:
        prefix.num_there, prefix.is_done = num_there, True
        self.num_ended += 1


def coming(page_size: int = 1, **fields: Any) -> tuple[ComingPrefixes, FakeReceiver]:
    receiver = FakeReceiver(**fields)
    return ComingPrefixes(receiver, page_size), receiver  # type: ignore[arg-type]


def request_of(*token_ids: int, **fields: object) -> Any:
    return make_request(1, list(token_ids), **fields)


@pytest.mark.parametrize(
    ("here", "queue_s", "byte_s", "is_asked"),
    [
        (Here(TOKEN_S), 0.0, 0.0, True),
        (Here(TOKEN_S), 0.5, 0.0, False),  # 400 tokens take 0.4 s here
        (Here(TOKEN_S, num_ahead_tokens=200), 0.5, 0.0, True),
        (Here(TOKEN_S, num_running=1), 0.5, 0.0, True),  # who would wait as long
        (Here(TOKEN_S), 0.0, 0.001, False),  # 8 bytes a token
        (Here(TOKEN_S, num_running=8), 0.0, 0.001, True),
        (Here(None), 0.3, 0.0, True),  # by what the other engine knows
        (Here(None), 0.5, 0.0, False),
    ],
)
def test_a_prompt_goes_where_fewer_seconds_are_waited(
    here: Here, queue_s: float, byte_s: float, is_asked: bool
) -> None:
    prefixes, receiver = coming(queue_s=queue_s, byte_s=byte_s)
    assert prefixes.look_up(request_of(*range(401)), 0, here) == is_asked
    assert len(receiver.asked) == prefixes.num_held == is_asked


def test_only_what_is_not_cached_is_asked_for() -> None:
    prefixes, receiver = coming()
    assert prefixes.look_up(request_of(*range(601)), 300, Here())
    (prefix,) = receiver.asked
    assert (prefix.start, prefix.end, list(prefix.token_ids)) == (256, 600, list(range(600)))


@pytest.mark.parametrize("num_tokens", [1, MIN_ASKED_TOKENS])
def test_short_prompts_stay(num_tokens: int) -> None:
    prefixes, receiver = coming()
    assert not prefixes.look_up(request_of(*range(num_tokens)), 0, Here())
    assert not prefixes.look_up(request_of(*range(401)), 300, Here())
    assert not receiver.asked


def test_without_a_peer_or_in_the_other_role_all_is_computed_here() -> None:
    prefixes, receiver = coming(is_there=False)
    assert not prefixes.look_up(request_of(*range(401)), 0, Here())
    receiver.is_there, prefixes.is_on = True, False
    assert not prefixes.look_up(request_of(*range(401)), 0, Here())
    prefixes.is_on = True
    assert not prefixes.look_up(request_of(*range(401), namespace=("a", "b")), 0, Here())
    assert prefixes.look_up(request_of(*range(401)), 0, Here())


def test_requests_that_begin_alike_wait_for_one_stream_and_it_ends_with_the_last() -> None:
    prefixes, receiver = coming(page_size=4)
    first = request_of(*range(401))
    alike = request_of(*range(203), *range(7, 207))
    other = request_of(*range(1, 402))
    elsewhere = request_of(*range(401), namespace="mine")
    requests = [first, alike, other, elsewhere]
    assert all(prefixes.look_up(each, 0, Here()) for each in requests)
    assert len(receiver.asked) == 3 and prefixes.num_held == 4 and not prefixes.has_ready
    receiver.end(receiver.asked[0], 390)
    assert prefixes.has_ready and prefixes.take_ready() == [first, alike]
    assert not prefixes.has_ready
    assert prefixes.restorable_end(first, 0) == 388  # whole pages of what is proved
    assert prefixes.restorable_end(alike, 0) == 200  # and of what both have
    assert prefixes.restorable_end(alike, 240) == 240
    assert prefixes.restorable_end(other, 0) == 0
    first.pages = array("i", range(100))
    restores = prefixes.restore(first, 128, 388)
    assert [(each.first_token, list(each.pages)) for each in restores] == [
        (128, list(range(32, 64))),
        (0, list(range(64, 97))),
    ]
    assert not receiver.released
    for each in (alike, other, elsewhere):
        prefixes.forget(each)
    assert receiver.released == receiver.asked and not prefixes.num_held
