"""Random operations against a plain model, with `check` after every one.

The model knows no tree: it maps each prefix that ends at a page to that page and to its last use.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stemma.radix.check import check
from stemma.radix.pages import PageAllocator
from stemma.radix.tree import Inserted, Node, RadixTree

Prefix = tuple[str, tuple[int, ...]]

NAMESPACES = st.sampled_from(["", "lora"])
SYMBOLS = st.lists(st.integers(0, 2), max_size=10)
NUM_PAGES = 40


@dataclass
class Entry:
    """What the model knows of one cached page."""

    page: int
    last_use: int


@dataclass
class Handle:
    """A locked node and the path that it must go on meaning."""

    node: Node
    namespace: str
    tokens: tuple[int, ...]


class RadixMachine(RuleBasedStateMachine):
    """Requests that match, lock, insert, extend, finish and fail, over one small pool."""

    page_size = 1

    @initialize()
    def start(self) -> None:
        self.tree = RadixTree(self.page_size)
        self.allocator = PageAllocator(NUM_PAGES)
        self.model: dict[Prefix, Entry] = {}
        self.clock = 0
        self.handles: list[Handle] = []
        self.held: list[array[int]] = []

    @rule(namespace=NAMESPACES, symbols=SYMBOLS, odd=st.integers(0, 20), limit=st.integers(0, 60))
    def match(self, namespace: str, symbols: list[int], odd: int, limit: int) -> None:
        tokens = self.tokens(symbols, odd)
        expected = self.known(namespace, tokens[:limit])
        assert self.tree.match_length(namespace, tokens, limit) == len(expected) * self.page_size
        match = self.tree.match(namespace, tokens, limit)
        assert list(match.pages) == [self.model[prefix].page for prefix in expected]
        assert match.num_tokens == match.node.end == len(expected) * self.page_size
        assert path_of(match.node) == tuple(tokens[: match.num_tokens])
        self.use(expected)

    @rule(namespace=NAMESPACES, symbols=SYMBOLS, odd=st.integers(0, 20), finishes=st.booleans())
    def serve(self, namespace: str, symbols: list[int], odd: int, finishes: bool) -> None:
        """A request: match, lock, insert the whole prompt, and stay or finish."""
        handle = self.begin(namespace, self.tokens(symbols, odd))
        self.handles.append(handle)
        self.insert(handle, self.tokens(symbols, odd))
        if finishes:
            self.finish(len(self.handles) - 1)

    @rule(namespace=NAMESPACES, symbols=SYMBOLS)
    def insert_without_a_match(self, namespace: str, symbols: list[int]) -> None:
        """All pages are the caller's own, so what is known comes back as duplicates."""
        tokens = self.tokens(symbols)
        own = self.allocate(len(symbols))
        if own is None:
            return
        known = self.known(namespace, tokens)
        inserted = self.tree.insert(namespace, tokens, list(own))
        assert inserted.duplicate_pages == own[: len(known)]
        assert list(inserted.adopted_pages) == [self.model[prefix].page for prefix in known]
        self.held.append(inserted.duplicate_pages)
        self.learn(namespace, tokens, own)

    @rule(data=st.data(), symbols=SYMBOLS)
    def extend(self, data: st.DataObject, symbols: list[int]) -> None:
        if self.handles:
            handle = data.draw(st.sampled_from(self.handles))
            self.extend_handle(handle, symbols)

    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        if self.handles:
            self.finish(data.draw(st.integers(0, len(self.handles) - 1)))

    @rule(num_pages=st.integers(0, 12))
    def evict(self, num_pages: int) -> None:
        self.evict_checked(num_pages)

    @rule()
    def free_held(self) -> None:
        while self.held:
            self.allocator.free(self.held.pop())

    @rule(data=st.data(), prompts=st.lists(SYMBOLS, max_size=3), more=SYMBOLS)
    def fail_a_step(self, data: st.DataObject, prompts: list[list[int]], more: list[int]) -> None:
        """New and running requests insert, the step fails, all of it is unpublished."""
        inserts: list[Inserted | None] = []
        step: list[Handle] = []
        if self.handles:
            index = data.draw(st.integers(0, len(self.handles) - 1))
            step.append(self.handles.pop(index))  # not remove(): two handles may be equal
        new = [self.begin("", self.tokens(symbols)) for symbols in prompts]
        survivors = set(self.model)  # nothing is evicted from here on
        for handle, symbols in zip(new, prompts, strict=True):
            step.append(handle)
            inserts.append(self.insert(handle, self.tokens(symbols), may_evict=False))
        for handle in step:
            inserts.append(self.extend_handle(handle, more, may_evict=False))
        for handle in step:
            self.tree.unlock(handle.node)
            self.use(self.known(handle.namespace, handle.tokens))
        for inserted in data.draw(st.permutations(inserts)):
            if inserted is not None:
                self.forget(self.tree.remove(inserted.node, inserted.added_from))
        assert set(self.model) == survivors

    @rule(namespace=st.sampled_from(["", "lora", None]))
    def clear(self, namespace: str | None) -> None:
        self.forget(self.tree.clear(namespace))
        left = {prefix for prefix in self.model if namespace in (None, prefix[0])}
        assert left <= self.locked()

    @invariant()
    def holds(self) -> None:
        check(self.tree, self.allocator, self.held, [handle.node for handle in self.handles])
        assert self.tree.num_pages == len(self.model)
        assert self.tree.evictable_pages == len(self.model.keys() - self.locked())
        for handle in self.handles:
            assert path_of(handle.node) == handle.tokens
            assert handle.node.namespace == handle.namespace

    def teardown(self) -> None:
        if hasattr(self, "tree"):
            while self.handles:
                self.finish(0)
            self.free_held()
            self.forget(self.tree.clear())
            assert self.allocator.num_free == NUM_PAGES and not self.tree.roots

    def tokens(self, symbols: list[int], odd: int = 0) -> list[int]:
        """A page a symbol, pages differing in their last token, and `odd` more tokens."""
        tokens = [t for symbol in symbols for t in [7] * (self.page_size - 1) + [symbol]]
        return tokens + [7] * (odd % self.page_size)

    def begin(self, namespace: str, tokens: Sequence[int]) -> Handle:
        """Matches and locks."""
        match = self.tree.match(namespace, tokens)
        self.use(self.known(namespace, tokens))
        self.tree.lock(match.node)
        return Handle(match.node, namespace, tuple(tokens[: match.num_tokens]))

    def insert(
        self, handle: Handle, tokens: Sequence[int], may_evict: bool = True
    ) -> Inserted | None:
        """From the root, with the pages of the prefix as the request matched them."""
        whole = tokens[: len(tokens) // self.page_size * self.page_size]
        num_matched = len(handle.tokens)
        own = self.allocate((len(whole) - num_matched) // self.page_size, may_evict)
        if own is None:
            return None
        pages = array("i")
        for prefix in self.known(handle.namespace, handle.tokens):
            pages.append(self.model[prefix].page)
        known = self.known(handle.namespace, whole)
        inserted = self.tree.insert(handle.namespace, tokens, pages + own)
        assert inserted.num_existing == inserted.added_from == len(known) * self.page_size
        self.held.append(inserted.duplicate_pages)
        self.learn(handle.namespace, whole, pages + own)
        self.tree.move_lock(handle.node, inserted.node)
        handle.node, handle.tokens = inserted.node, tuple(whole)
        return inserted

    def extend_handle(
        self, handle: Handle, symbols: list[int], may_evict: bool = True
    ) -> Inserted | None:
        own = self.allocate(len(symbols), may_evict)
        if own is None:
            return None
        whole = (*handle.tokens, *self.tokens(symbols))
        known = self.known(handle.namespace, whole)
        inserted = self.tree.extend(handle.node, self.tokens(symbols), own)
        assert inserted.added_from == len(known) * self.page_size
        assert inserted.num_existing == inserted.added_from - len(handle.tokens)
        self.held.append(inserted.duplicate_pages)
        already = [-1] * (len(handle.tokens) // self.page_size)
        self.learn(handle.namespace, whole, [*already, *own])
        self.tree.move_lock(handle.node, inserted.node)
        handle.node, handle.tokens = inserted.node, whole
        return inserted

    def finish(self, index: int) -> None:
        handle = self.handles.pop(index)
        self.tree.unlock(handle.node)
        self.use(self.known(handle.namespace, handle.tokens))

    def allocate(self, num_pages: int, may_evict: bool = True) -> array[int] | None:
        if may_evict and num_pages > self.allocator.num_free:
            self.evict_checked(num_pages - self.allocator.num_free)
        if num_pages > self.allocator.num_free:
            return None
        return self.allocator.allocate(num_pages)

    def evict_checked(self, num_pages: int) -> None:
        """Evicts; the model says how many must go and that nothing younger than what stays may."""
        evictable = self.model.keys() - self.locked()
        by_page = {self.model[prefix].page: self.model[prefix] for prefix in evictable}
        freed = self.tree.evict(num_pages)
        assert len(freed) == min(num_pages, len(evictable))
        assert set(freed) <= by_page.keys()
        left = [by_page[page].last_use for page in by_page.keys() - set(freed)]
        if freed and left:
            assert max(by_page[page].last_use for page in freed) <= min(left)
        self.forget(freed)

    def known(self, namespace: str, tokens: Sequence[int]) -> list[Prefix]:
        """The cached prefixes of `tokens`, shortest first."""
        prefixes: list[Prefix] = []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            prefix = (namespace, tuple(tokens[:end]))
            if prefix not in self.model:
                break
            prefixes.append(prefix)
        return prefixes

    def use(self, prefixes: Iterable[Prefix]) -> None:
        self.clock += 1
        for prefix in prefixes:
            self.model[prefix].last_use = self.clock

    def learn(self, namespace: str, tokens: Sequence[int], pages: Sequence[int]) -> None:
        for index, page in enumerate(pages):
            prefix = (namespace, tuple(tokens[: (index + 1) * self.page_size]))
            self.model.setdefault(prefix, Entry(page, 0))
        self.use(self.known(namespace, tokens))

    def forget(self, pages: array[int]) -> None:
        gone = set(pages)
        self.model = {k: entry for k, entry in self.model.items() if entry.page not in gone}
        self.allocator.free(pages)

    def locked(self) -> set[Prefix]:
        return {p for h in self.handles for p in self.known(h.namespace, h.tokens)}


def path_of(node: Node) -> tuple[int, ...]:
    tokens: list[int] = []
    step: Node | None = node
    while step is not None:
        tokens[:0] = step.token_ids
        step = step.parent
    return tuple(tokens)


class RadixMachine16(RadixMachine):
    page_size = 16


BOUNDS = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestRandomOperationsPageSize1 = RadixMachine.TestCase
TestRandomOperationsPageSize1.settings = BOUNDS
TestRandomOperationsPageSize16 = RadixMachine16.TestCase
TestRandomOperationsPageSize16.settings = BOUNDS
