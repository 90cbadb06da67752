"""A store of KV blocks, on disk or elsewhere, as the scheduler uses it: fetch before admission,
restore at it, save after it.

    arrival      the request's blocks that the store has and the pool has not are fetched; the
                 request is held back meanwhile, and holds no page
    admission    what has arrived is copied into its pages by the plan that admits it
    release      the whole blocks of what it computed are copied out by the next plan, and written

Requests that wait for the same blocks share one fetch. A request does not wait longer than a limit:
then it computes. A block that could not be read ends the restored prefix, and has no other effect.

Of a model with recurrent layers a second store keeps states, each that behind one of these blocks.
A prefix is then fetched as far as the last state that there is of it, and restored whole with that
state, or not at all.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ....errors import InvalidRequest
from ....radix.checkpoints import Checkpoint
from ...memory.copies import BlockRestore, BlockSave, StateSave
from ...memory.disk.block_file import Payload
from ...memory.disk.block_key import BLOCK_TOKENS, Block, BlockLayout, blocks_of, state_block
from ...memory.disk.block_store import BlockStore, Fetch, StoreMode
from ..request import Request

MIN_FETCHED_TOKENS = 128  # fewer are computed: a fetch costs a step's delay (guess)
MAX_FETCH_S = 5.0  # that a request waits for a fetch (guess)


@dataclass(slots=True, eq=False)
class _SharedFetch:
    """A fetch and the number of requests that use it."""

    fetch: Fetch
    num_users: int = 0


@dataclass(slots=True)
class _Wanted:
    """The blocks that a request may restore, from `first_block` on."""

    first_block: int
    places: list[tuple[_SharedFetch, int]]  # for each block: which fetch, and where in it
    give_up_s: float  # until when it waits
    state: tuple[_SharedFetch, int] | None = None  # the same of the state behind the last of them
    state_end: int = 0  # the tokens before it

    def fetches(self) -> set[_SharedFetch]:
        places = self.places if self.state is None else (*self.places, self.state)
        return {shared for shared, _ in places}

    def is_done(self) -> bool:
        return all(shared.fetch.is_done for shared in self.fetches())


class StoredPrefixes:
    """Owns the stores and the requests' fetches, and nothing of the pool."""

    def __init__(
        self,
        store: BlockStore,
        page_size: int,
        *,
        states: BlockStore | None = None,
        max_fetch_s: float = MAX_FETCH_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`states`: of a model with recurrent layers. Raises InvalidRequest unless blocks are
        whole pages."""
        if BLOCK_TOKENS % page_size:
            allowed = f"a divisor of {BLOCK_TOKENS}, the tokens of a block of the KV store"
            raise InvalidRequest.of("page_size", page_size, allowed)
        self.store = store
        self.states = states
        self.num_restored_tokens = 0
        self.num_restored_states = 0
        assert isinstance(store.layout, BlockLayout), "a store of KV"
        self._layout = store.layout
        self._page_size = page_size
        self._max_fetch_s = max_fetch_s
        self._clock = clock
        self._wanted: dict[Request, _Wanted] = {}
        self._held: dict[Request, None] = {}  # in order of arrival, and so of `give_up_s`
        self._num_fetches_seen = 0  # ended when no held request was ready
        self._arriving: dict[bytes, tuple[_SharedFetch, int]] = {}  # by key; includes arrived ones
        self._saving: set[bytes] = set()  # keys of blocks that a plan copies out
        self._saving_states: set[bytes] = set()

    # --- arrival ----------------------------------------------------------------------------------

    @property
    def num_held(self) -> int:
        """Requests that wait for their blocks."""
        return len(self._held)

    @property
    def has_ready(self) -> bool:
        """Whether `take_ready` would return any. Called between all steps, so it checks all of them
        only when a fetch has ended."""
        first = next(iter(self._held), None)
        if first is None:
            return False
        now_s, num_ended = self._clock(), self.store.num_fetches_ended
        if self.states is not None:
            num_ended += self.states.num_fetches_ended
        if num_ended == self._num_fetches_seen:
            return now_s >= self._wanted[first].give_up_s
        if any(self._is_ready(request, now_s) for request in self._held):
            return True
        self._num_fetches_seen = num_ended
        return False

    def look_up(
        self, request: Request, num_cached_tokens: int, num_known_tokens: int | None = None
    ) -> bool:
        """Fetch the request's tokens that the store has beyond those in the pool; whether the
        request must wait until `take_ready` returns it. `num_known_tokens`: as far as the pool has
        a state, too; without it as far as it has KV."""
        blocks = blocks_of(self._layout, request.namespace, request.token_ids)
        num_stored = self.store.longest(blocks)
        if self.states is not None:
            num_there = max(num_stored, num_cached_tokens // BLOCK_TOKENS)
            num_stored = self._num_with_state(blocks[:num_there], request.match_limit)
        end = min(num_stored * BLOCK_TOKENS, request.match_limit)
        known = num_cached_tokens if num_known_tokens is None else num_known_tokens
        if end - known < MIN_FETCHED_TOKENS:
            return False
        first = num_cached_tokens // BLOCK_TOKENS
        places = self._places(self.store, blocks[first:num_stored])
        wanted = _Wanted(first, places, self._clock() + self._max_fetch_s)
        if self.states is not None:
            if first + len(places) < num_stored:  # more than are fetched at a time
                num_there = first + len(places)
                num_stored = self._num_with_state(blocks[:num_there], request.match_limit)
            of_state = self._places(
                self.states, [state_block(block) for block in blocks[:num_stored][-1:]]
            )
            wanted.state = next(iter(of_state), None)
            wanted.state_end = num_stored * BLOCK_TOKENS
        if not wanted.fetches():
            return False
        self._wanted[request] = wanted
        for shared in wanted.fetches():
            shared.num_users += 1
        if wanted.is_done():
            return False
        self._held[request] = None
        return True

    def _num_with_state(self, blocks: Sequence[Block], limit: int) -> int:
        """How many of these blocks there are up to the last one, of at most `limit` tokens, whose
        state is stored."""
        assert self.states is not None
        num_blocks = min(len(blocks), limit // BLOCK_TOKENS)
        while num_blocks and not self.states.longest([state_block(blocks[num_blocks - 1])]):
            num_blocks -= 1
        return num_blocks

    def take_ready(self) -> list[Request]:
        """Requests that no longer wait, in order of arrival."""
        now_s = self._clock()
        ready = [request for request in self._held if self._is_ready(request, now_s)]
        for request in ready:
            del self._held[request]
        return ready

    def forget(self, request: Request) -> None:
        """Drop the fetches, if any, of a request that was restored or has ended."""
        self._held.pop(request, None)
        wanted = self._wanted.pop(request, None)
        for shared in () if wanted is None else wanted.fetches():
            shared.num_users -= 1
            if not shared.num_users:
                shared.fetch.release()
                for block in shared.fetch.blocks:
                    del self._arriving[block.key]

    def _is_ready(self, request: Request, now_s: float) -> bool:
        wanted = self._wanted[request]
        return wanted.is_done() or now_s >= wanted.give_up_s

    def _places(self, store: BlockStore, blocks: Sequence[Block]) -> list[tuple[_SharedFetch, int]]:
        """Where these blocks arrive, up to the first that is not fetched."""
        new = [block for block in blocks if block.key not in self._arriving]
        if new:
            shared = _SharedFetch(store.fetch(new))
            for place, block in enumerate(shared.fetch.blocks):
                self._arriving[block.key] = (shared, place)
        places = []
        for block in blocks:
            if block.key not in self._arriving:
                break
            places.append(self._arriving[block.key])
        if new and shared not in {used for used, _ in places}:
            shared.fetch.release()
            for block in shared.fetch.blocks:
                del self._arriving[block.key]
        return places

    # --- admission --------------------------------------------------------------------------------

    def restorable_end(self, request: Request, num_cached_tokens: int) -> int:
        """How many leading tokens the request has from the pool and the arrived blocks together, in
        whole pages."""
        wanted = self._wanted.get(request)
        end = num_cached_tokens
        if wanted is None or num_cached_tokens // BLOCK_TOKENS < wanted.first_block:
            return end
        skipped = num_cached_tokens // BLOCK_TOKENS - wanted.first_block
        for index, place in enumerate(wanted.places[skipped:], wanted.first_block + skipped):
            if _payload(place) is None:
                break
            end = (index + 1) * BLOCK_TOKENS
        limit = request.match_limit
        return max(num_cached_tokens, min(end, limit - limit % self._page_size))

    def restorable_state(self, request: Request) -> tuple[int, Payload] | None:
        """The state that has arrived for a request, and the number of tokens before it."""
        wanted = self._wanted.get(request)
        payload = None if wanted is None or wanted.state is None else _payload(wanted.state)
        return None if wanted is None or payload is None else (wanted.state_end, payload)

    def restore(self, request: Request, start: int, end: int) -> list[BlockRestore]:
        """The copies that put the tokens [start, end) into the request's pages; `end` is at most
        `restorable_end`. This ends the request's use of its fetches."""
        wanted = self._wanted[request]
        restores = []
        for index in range(start // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
            payload = _payload(wanted.places[index - wanted.first_block])
            assert payload is not None, f"block {index} has not arrived"
            first = max(start, index * BLOCK_TOKENS)
            last = min(end, (index + 1) * BLOCK_TOKENS)
            pages = request.pages[first // self._page_size : last // self._page_size]
            restores.append(BlockRestore(payload, first % BLOCK_TOKENS, pages))
        self.num_restored_tokens += end - start
        self.forget(request)
        return restores

    # --- release ----------------------------------------------------------------------------------

    @property
    def can_save(self) -> bool:
        """Whether the store accepts blocks."""
        return self.store.mode is StoreMode.WRITER

    def num_kept_tokens(self, namespace: Hashable, token_ids: array[int]) -> int:
        """How many tokens of a sequence are in the store, or being written."""
        return BLOCK_TOKENS * self._num_kept(blocks_of(self._layout, namespace, token_ids))

    def _num_kept(self, blocks: Sequence[Block]) -> int:
        num_blocks = self.store.note_use(blocks)
        while num_blocks < len(blocks) and blocks[num_blocks].key in self._saving:
            num_blocks += 1
        return num_blocks

    def saves(
        self, namespace: Hashable, token_ids: array[int], pages: Sequence[int]
    ) -> list[BlockSave]:
        """The copies out of a sequence's pages of the blocks that the store lacks, as many as it
        accepts."""
        blocks = blocks_of(self._layout, namespace, token_ids)
        per_block = BLOCK_TOKENS // self._page_size
        room = self.store.num_accepted() - len(self._saving)
        saves: list[BlockSave] = []
        for index in range(self.store.note_use(blocks), len(blocks)):
            if len(saves) >= room:
                break
            if blocks[index].key not in self._saving:
                own = array("i", pages[index * per_block : (index + 1) * per_block])
                saves.append(BlockSave(blocks[index], own))
        self._saving.update(save.block.key for save in saves)
        return saves

    def state_saves(
        self, namespace: Hashable, token_ids: array[int], states: Iterable[Checkpoint]
    ) -> tuple[list[StateSave], int]:
        """The copies of those of a sequence's states that the store lacks and that stand behind
        blocks which it keeps, as many as it accepts; and behind how many tokens the last one stands
        that it will have."""
        assert self.states is not None
        blocks = blocks_of(self._layout, namespace, token_ids)
        num_kept, last = self._num_kept(blocks), 0
        room = self.states.num_accepted() - len(self._saving_states)
        saves: list[StateSave] = []
        for state in states:
            num_blocks, rest = divmod(state.position, BLOCK_TOKENS)
            if rest or num_blocks > num_kept:
                continue
            block = state_block(blocks[num_blocks - 1])
            if block.key not in self._saving_states and not self.states.note_use([block]):
                if len(saves) >= room:
                    continue
                saves.append(StateSave(block, state.slot))
            last = max(last, state.position)
        self._saving_states.update(save.block.key for save in saves)
        return saves, last

    def settle_states(self, saves: Sequence[StateSave], payloads: Sequence[Payload]) -> None:
        """The same as `settle` for states."""
        if self.states is not None:
            for save, payload in zip(saves, payloads, strict=False):
                self.states.save(save.block, payload)
            self._saving_states.difference_update(save.block.key for save in saves)

    def settle(self, saves: Sequence[BlockSave], payloads: Sequence[Payload]) -> None:
        """Write the payloads that a plan copied out; no payloads: it failed."""
        for save, payload in zip(saves, payloads, strict=False):
            self.store.save(save.block, payload)
        self._saving.difference_update(save.block.key for save in saves)

    def describe(self) -> dict[str, Any]:
        """State and counters as plain data."""
        return {
            **self.store.describe(),
            "num_held_requests": len(self._held),
            "num_restored_tokens": self.num_restored_tokens,
            "num_restored_states": self.num_restored_states,
            "states": {} if self.states is None else self.states.describe(),
        }


def _payload(place: tuple[_SharedFetch, int]) -> Payload | None:
    """The payload that has arrived there, if any."""
    shared, index = place
    payloads = shared.fetch.payloads
    return payloads[index] if index < len(payloads) else None
