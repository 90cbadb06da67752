"""Leases: what they keep, the order in which they are broken, and that nothing is ever lost."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stemma.radix.check import check
from stemma.radix.leases import Lease, Leases
from stemma.radix.owners import age, age_path, note_user
from stemma.radix.pages import PageAllocator
from stemma.radix.tree import Node, RadixTree

NUM_PAGES = 32


class Shed:
    """A tree of page size 1 with leases; texts are strings, and a page a character."""

    def __init__(self, num_pages: int = NUM_PAGES, max_pinned: int = 8) -> None:
        self.tree, self.allocator = RadixTree(), PageAllocator(num_pages)
        self.leases = Leases(self.tree, max_pinned)

    def cache(self, text: str, owner: object = None) -> Node:
        match = self.tree.match("", ids(text))
        pages = match.pages + self.allocator.allocate(len(text) - match.num_tokens)
        return self.tree.insert("", ids(text), pages, owner=owner).node

    def retain(self, text: str, due_s: float = 1.0, priority: int = 0, ttl: float = 99.0) -> Lease:
        node = self.tree.match("", ids(text)).node
        return self.leases.retain(node, due_s=due_s, expires_s=ttl, priority=priority)

    def evict(self, num_pages: int) -> None:
        """As one who needs pages: what is leased only if the rest is too little."""
        if num_pages > self.tree.evictable_pages:
            self.leases.give_up(num_pages)
        self.allocator.free(self.tree.evict(num_pages))
        check(self.tree, self.allocator, leases=self.leases.nodes())

    def cached(self, text: str) -> int:
        return self.tree.match_length("", ids(text))


def ids(text: str) -> array[int]:
    return array("i", map(ord, text))


def test_what_is_leased_outlives_what_was_used_later() -> None:
    shed = Shed()
    shed.cache("abcd")
    shed.cache("wxyz")
    shed.retain("abcd")
    shed.evict(4)
    assert (shed.cached("abcd"), shed.cached("wxyz")) == (4, 0)


def test_the_furthest_use_is_given_up_first_and_a_priority_outranks_it() -> None:
    shed = Shed()
    for text, due_s, priority in [("aaa", 1.0, 0), ("bbb", 9.0, 0), ("ccc", 20.0, 1)]:
        shed.cache(text)
        shed.retain(text, due_s, priority)
    order = []
    for _ in range(3):
        shed.evict(3)
        order.append([text for text in ("aaa", "bbb", "ccc") if not shed.cached(text)])
    assert order == [["bbb"], ["aaa", "bbb"], ["aaa", "bbb", "ccc"]]


def test_a_lease_loses_no_more_of_its_end_than_is_needed_and_keeps_the_rest() -> None:
    shed = Shed()
    shed.cache("abcdefgh")
    lease = shed.retain("abcdefgh")
    shed.cache("xy")
    shed.evict(3)  # "xy" and one more
    assert shed.cached("abcdefgh") == lease.num_kept_tokens == 7
    shed.cache("xy")
    shed.evict(1)
    assert (shed.cached("abcdefgh"), shed.cached("xy")) == (7, 1), "the rest is still leased"
    assert shed.leases.num_broken == 1


def test_a_prefix_that_two_lease_goes_with_the_last_of_them() -> None:
    shed = Shed()
    for text in ("abcd", "abxy"):
        shed.cache(text)
        shed.retain(text, due_s=5.0 if text == "abcd" else 1.0)
    shed.evict(2)
    assert (shed.cached("abcd"), shed.cached("abxy")) == (2, 4)


def test_pins_stay_within_their_budget_and_are_clipped_inside_a_node() -> None:
    shed = Shed(max_pinned=5)
    pin = shed.leases.pin(shed.cache("abcdefgh"), expires_s=9.0)
    assert pin is not None and pin.num_tokens == 5 and shed.tree.pinned_pages == 5
    assert shed.leases.pin(shed.cache("xy"), expires_s=9.0) is None, "nothing is left"
    again = shed.leases.pin(shed.cache("abcdefgh"), expires_s=9.0)
    assert again is not None and again.num_tokens == 5, "what is pinned already costs nothing"
    shed.evict(NUM_PAGES)
    assert shed.cached("abcdefgh") == 5
    shed.leases.expire(9.0)
    shed.evict(NUM_PAGES)
    assert shed.cached("abcdefgh") == 0 and not len(shed.leases)


def test_pins_are_broken_last_and_only_when_told_so() -> None:
    shed = Shed()
    pin = shed.leases.pin(shed.cache("abc"), expires_s=9.0)
    shed.cache("xyz")
    lease = shed.retain("xyz", priority=1000)
    shed.leases.give_up(6)
    assert pin is not None and pin.is_active and not lease.is_active
    shed.leases.give_up(6, also_pins=True)
    assert not pin.is_active and shed.tree.evictable_pages == 6


def test_a_lease_that_was_put_off_is_broken_and_expires_by_its_new_times() -> None:
    shed = Shed()
    shed.cache("aaa")
    shed.cache("bbb")
    first, second = shed.retain("aaa", due_s=1.0, ttl=5.0), shed.retain("bbb", due_s=2.0)
    shed.leases.update(first, due_s=8.0, expires_s=20.0)
    shed.leases.expire(6.0)
    assert first.is_active
    shed.evict(3)
    assert not first.is_active and second.is_active
    shed.leases.update(second, due_s=0.0, expires_s=1.0)
    shed.leases.expire(6.0)
    assert not second.is_active


def test_only_leases_that_are_due_later_give_way_when_asked_so() -> None:
    shed = Shed()
    shed.cache("aaa")
    shed.cache("bbb")
    early, late = shed.retain("aaa", due_s=1.0), shed.retain("bbb", due_s=9.0)
    shed.leases.give_up(6, due_after_s=5.0)
    assert early.is_active and not late.is_active


def test_a_lease_moves_down_and_up_and_lives_again() -> None:
    shed = Shed()
    shed.cache("ab")
    lease = shed.retain("ab")
    shed.leases.move(lease, shed.cache("abcd"))
    assert lease.num_kept_tokens == lease.num_tokens == 4
    shed.leases.release(lease)
    assert not lease.is_active
    shed.leases.move(lease, shed.tree.match("", ids("abcd")).node)
    shed.evict(2)
    check(shed.tree, shed.allocator, leases=shed.leases.nodes())
    assert lease.num_kept_tokens == 2


def test_withdrawing_ends_what_leases_keep_below_a_node() -> None:
    shed = Shed()
    shed.cache("ab")
    below, beside = shed.retain("ab"), shed.retain("ab")
    shed.leases.move(below, shed.cache("abcd"))
    node = below.node
    assert node is not None
    shed.leases.withdraw(node)
    assert below.num_kept_tokens == beside.num_kept_tokens == 2
    shed.allocator.free(shed.tree.remove(node))
    check(shed.tree, shed.allocator, leases=shed.leases.nodes())


# --- the last use -----------------------------------------------------------------------------


def test_the_own_end_of_a_program_is_evicted_before_what_is_older() -> None:
    shed = Shed()
    shed.cache("older")
    shed.cache("system")
    shed.cache("system, mine", owner="me")
    lease = shed.retain("system, mine")
    shed.leases.release(lease, is_last_use=True)
    shed.evict(6)
    assert (shed.cached("older"), shed.cached("system, mine")) == (5, 6)
    shed.evict(2)
    assert (shed.cached("older"), shed.cached("system")) == (3, 6)


def test_what_another_has_used_is_not_aged() -> None:
    shed = Shed()
    shed.cache("older")
    node = shed.cache("shared", owner="me")
    note_user(node, "you")
    mine = shed.cache("shared by us", owner="me")
    shed.leases.release(shed.retain("shared by us"), is_last_use=True)
    assert mine.last_use == 0 and node.last_use > 0
    shed.evict(11)
    assert (shed.cached("older"), shed.cached("shared by us")) == (0, 6)


def test_ageing_covers_the_forks_below_and_spares_what_is_in_use() -> None:
    shed = Shed()
    shed.cache("root", owner="me")
    left, right = shed.cache("root left", owner="me"), shed.cache("root right", owner="me")
    shed.tree.lock(right)
    age(left, shed.tree.use_order)
    check(shed.tree, shed.allocator, locks=[right])
    root = left.parent
    assert root is not None and left.last_use == 0 and root.last_use > 0
    shed.tree.unlock(right)
    age(root, shed.tree.use_order)
    check(shed.tree, shed.allocator)
    assert [node.last_use for node in shed.tree.use_order] == [0] * 3


def test_a_path_gives_way_up_to_where_it_branches() -> None:
    shed = Shed()
    shed.cache("older")
    shed.cache("root left")
    node = shed.cache("root right")
    age_path(node, shed.tree.use_order)
    check(shed.tree, shed.allocator)
    shed.evict(5)
    assert (shed.cached("root right"), shed.cached("root left"), shed.cached("older")) == (5, 9, 5)
    assert node.parent is None or node.parent.last_use > 0


def test_a_used_node_is_aged_no_more() -> None:
    shed = Shed()
    node = shed.cache("mine", owner="me")
    shed.cache("else")
    age(node, shed.tree.use_order)
    shed.tree.match("", ids("mine"))
    shed.evict(4)
    assert (shed.cached("mine"), shed.cached("else")) == (4, 0)


# --- random operations --------------------------------------------------------------------------

TEXTS = st.text("ab", min_size=1, max_size=12)
TIMES = st.integers(0, 30)


@dataclass
class Held:
    """A locked node and its path."""

    node: Node
    text: str


class LeaseMachine(RuleBasedStateMachine):
    """Requests and programs over one small pool; `check` after every step."""

    @initialize()
    def start(self) -> None:
        self.shed = Shed()
        self.tree, self.leases = self.shed.tree, self.shed.leases
        self.locks: list[Held] = []
        self.held: list[Lease] = []
        self.now = 0

    @rule(text=TEXTS, owner=st.sampled_from([None, "x", "y"]), stays=st.booleans())
    def serve(self, text: str, owner: str | None, stays: bool) -> None:
        """A request matches, makes room as the manager does, extends, and stays or finishes."""
        match = self.tree.match("", ids(text))
        self.tree.lock(match.node)
        note_user(match.node, owner)
        missing = len(text) - match.num_tokens
        self.make_room(missing)
        if self.shed.allocator.num_free < missing:
            self.tree.unlock(match.node)
            return
        pages = self.shed.allocator.allocate(missing)
        rest = ids(text[match.num_tokens :])
        inserted = self.tree.extend(match.node, rest, pages, owner=owner)
        assert not inserted.duplicate_pages
        self.tree.move_lock(match.node, inserted.node)
        self.locks.append(Held(inserted.node, text))
        if not stays:
            self.finish(len(self.locks) - 1)

    @rule(text=TEXTS, due=TIMES, ttl=TIMES, priority=st.integers(-1, 1))
    def retain(self, text: str, due: int, ttl: int, priority: int) -> None:
        node = self.tree.match("", ids(text)).node
        if not node.is_root:
            due_s, expires_s = self.now + due, self.now + ttl + 1
            lease = self.leases.retain(node, due_s=due_s, expires_s=expires_s, priority=priority)
            self.held.append(lease)

    @rule(text=TEXTS, ttl=TIMES)
    def pin(self, text: str, ttl: int) -> None:
        node = self.tree.match("", ids(text)).node
        lease = None if node.is_root else self.leases.pin(node, expires_s=self.now + ttl + 1)
        if lease is not None:
            assert text.startswith(text_of(lease.node))
            self.held.append(lease)

    @rule(data=st.data(), is_last_use=st.booleans())
    def release(self, data: st.DataObject, is_last_use: bool) -> None:
        if self.held:
            lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.leases.release(lease, is_last_use=is_last_use)
            assert not lease.is_active

    @rule(data=st.data(), due=TIMES, ttl=TIMES)
    def update(self, data: st.DataObject, due: int, ttl: int) -> None:
        if self.held:
            lease = data.draw(st.sampled_from(self.held))
            self.leases.update(lease, due_s=self.now + due, expires_s=self.now + ttl + 1)

    @rule(data=st.data(), text=TEXTS)
    def move(self, data: st.DataObject, text: str) -> None:
        retains = [lease for lease in self.held if not lease.is_pin]
        node = self.tree.match("", ids(text)).node
        if retains and not node.is_root:
            lease = data.draw(st.sampled_from(retains))
            if lease.expires_s > self.now:
                self.leases.move(lease, node)

    @rule(seconds=st.integers(1, 20))
    def expire(self, seconds: int) -> None:
        self.now += seconds
        self.leases.expire(self.now)
        assert all(lease.expires_s > self.now for lease in self.held if lease.is_active)

    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        if self.locks:
            self.finish(data.draw(st.integers(0, len(self.locks) - 1)))

    @rule(num_pages=st.integers(1, 20))
    def make_room(self, num_pages: int) -> None:
        """Exactly what is needed is given up, the right leases first, and pins never."""
        short = num_pages - self.shed.allocator.num_free
        if short <= 0:
            return
        before = self.tree.evictable_pages
        kept = {lease: lease.num_kept_tokens for lease in self.held if lease.is_active}
        can_break = {lease for lease in kept if not lease.is_pin and not lock_ref(lease)}
        available = self.num_available()
        if short > before:
            self.leases.give_up(short)
            assert self.tree.evictable_pages == min(short, available)
        broken = [lease for lease in kept if lease.num_kept_tokens < kept[lease]]
        whole = [lease for lease in can_break if lease.num_kept_tokens == kept[lease]]
        assert not any(lease.is_pin for lease in broken)
        assert all(rank(gone) <= rank(left) for gone in broken for left in whole)
        self.shed.allocator.free(self.tree.evict(short))

    @rule(num_pages=st.integers(1, 20))
    def starve(self, num_pages: int) -> None:
        """A live request may have all that nobody locks."""
        unlocked = sum(len(node.pages) for node in self.nodes() if not node.lock_ref)
        self.leases.give_up(num_pages, also_pins=True)
        assert self.tree.evictable_pages >= min(num_pages, unlocked)

    @invariant()
    def holds(self) -> None:
        locks = [held.node for held in self.locks]
        check(self.tree, self.shed.allocator, (), locks, self.leases.nodes())
        assert self.tree.pinned_pages <= self.leases.max_pinned_pages
        active = [lease for lease in self.held if lease.is_active]
        assert len(active) == len(self.leases) == len(self.leases.nodes())
        assert all(text_of(held.node) == held.text for held in self.locks)

    def teardown(self) -> None:
        if hasattr(self, "shed"):
            while self.locks:
                self.finish(0)
            for lease in self.held:
                self.leases.release(lease)
            assert self.tree.evictable_pages == self.tree.num_pages
            self.shed.allocator.free(self.tree.clear())
            assert self.shed.allocator.num_free == NUM_PAGES and not self.tree.roots

    def finish(self, index: int) -> None:
        self.tree.unlock(self.locks.pop(index).node)

    def nodes(self) -> list[Node]:
        nodes = list(self.tree.roots.values())
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes

    def num_available(self) -> int:
        return sum(len(n.pages) for n in self.nodes() if not n.lock_ref and not n.pin_ref)


def rank(lease: Lease) -> tuple[int, float]:
    return lease.priority, -lease.due_s


def lock_ref(lease: Lease) -> int:
    assert lease.node is not None
    return lease.node.lock_ref


def text_of(node: Node | None) -> str:
    parts: list[Sequence[int]] = []
    while node is not None:
        parts.append(node.token_ids)
        node = node.parent
    return "".join(chr(token) for run in reversed(parts) for token in run)


TestRandomLeases = LeaseMachine.TestCase
TestRandomLeases.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
