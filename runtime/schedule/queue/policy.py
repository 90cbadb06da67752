"""Which waiting request is admitted next: one small function a policy.

A policy ranks requests: it gives each a key, and the smallest key is admitted first; equal keys go
in order of arrival. `WaitingQueue` decides when to ask, so that a policy costs the same with ten
waiting requests and with ten thousand.

| Name | Admits first | Source |
| --- | --- | --- |
| fcfs | who came first | |
| lpm | who has the longest cached prefix | SGLang, arXiv:2312.07104, section 3 |
| dfs-weight | the branch of shared prefixes that most requests are on, depth first | the same |
| priority | who has the highest `priority` | |
| sjf | who is expected to generate least | shortest job first |
| program | whose program has had least; see below | Autellix, arXiv:2502.13965 |

`program` ranks by the level of service that the whole program has attained; above the lowest level,
where it costs much to be in the middle of all of them at once, by which program came first; then
the call with the longest chain of calls behind it (so that a join is not late), then the longest
cached prefix. A request without a program is one of its own, so among such it is lpm.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import TypeAlias

from ....errors import InvalidRequest
from ....radix.tree import RadixTree
from ..request import Request

DEFAULT_POLICY = "program"
DFS_WINDOW = 128  # requests; SGLang's bound for what it ranks by prefix, more than a batch here
NUM_REFRESHED = 16  # keys; at 3 us a match a twentieth of a millisecond a round

_MEMORY = 64  # finished requests that a running mean remembers; with 16 it was too noisy
_PRIOR = 4  # of them at the start, which used all of max_tokens (guess)
_MAX_CLIENTS = 4096


@dataclass(slots=True)
class RunningMean:
    """The mean of the last values, those before them fading."""

    value: float = 1.0
    num_values: int = _PRIOR

    def add(self, value: float) -> None:
        self.num_values = min(self.num_values + 1, _MEMORY)
        self.value += (value - self.value) / self.num_values


class OutputShare:
    """The share of max_tokens that requests really use: a running mean a client, in (0, 1].

    Of at most 4,096 clients, the least recent forgotten; an unknown one is taken for the mean.
    """

    def __init__(self) -> None:
        self.overall = RunningMean()
        self._of_client: OrderedDict[Hashable, RunningMean] = OrderedDict()

    def of(self, client: Hashable) -> float:
        """What this client's requests use of their max_tokens."""
        return self._of_client.get(client, self.overall).value

    def note(self, request: Request) -> None:
        """A request has ended by itself."""
        if not request.samples or not request.max_output_tokens:
            return
        used = max(request.num_output_tokens, 1) / request.max_output_tokens
        if request.client not in self._of_client:
            self._of_client[request.client] = RunningMean(self.overall.value)
        self._of_client[request.client].add(used)
        self._of_client.move_to_end(request.client)
        if len(self._of_client) > _MAX_CLIENTS:
            self._of_client.popitem(last=False)
        self.overall.add(used)


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may look at besides the requests."""

    tree: RadixTree
    output_share: OutputShare


Key: TypeAlias = tuple[float, ...]  # of one policy all equally long
Rank = Callable[[Sequence[Request], PolicyContext], Sequence[Key]]


def fcfs(requests: Sequence[Request], around: PolicyContext) -> Sequence[Key]:
    """First come, first served."""
    return [()] * len(requests)


def lpm(requests: Sequence[Request], around: PolicyContext) -> Sequence[Key]:
    """Longest prefix match: what is cached is used before it is evicted."""
    length = around.tree.match_length
    return [(-length(r.namespace, r.token_ids, r.match_limit),) for r in requests]


def program(requests: Sequence[Request], around: PolicyContext) -> Sequence[Key]:
    """Least attained service of the whole program, critical path, longest prefix match; programs
    that have had some go one after the other."""
    return [
        _program_key(request, *prefix)
        for request, prefix in zip(requests, lpm(requests, around), strict=True)
    ]


def _program_key(request: Request, prefix: float) -> Key:
    program = request.program
    if program is None:
        return (0, 0, 0, prefix)
    level = program.level
    return (level, level and program.number, -request.num_calls_after, prefix)


def dfs_weight(requests: Sequence[Request], around: PolicyContext) -> Sequence[Key]:
    """Depth first through the prefixes that the requests share, the fullest branch first.

    The trie is that of the requests' own tokens, so it also has prefixes that nobody has computed
    yet; SGLang walks the cached tree instead. O(n log n) comparisons of whole prompts.
    """
    spaces: dict[Hashable, list[int]] = defaultdict(list)
    for index, request in enumerate(requests):
        spaces[request.namespace].append(index)
    keys: list[Key] = [()] * len(requests)
    place = 0
    for indices in sorted(spaces.values(), key=len, reverse=True):
        for index in _depth_first(indices, [requests[i].token_ids.tobytes() for i in indices]):
            keys[index] = (place,)
            place += 1
    return keys


def priority(requests: Sequence[Request], around: PolicyContext) -> Sequence[Key]:
    """Higher `Request.priority` first."""
    return [(-request.priority,) for request in requests]


def sjf(requests: Sequence[Request], around: PolicyContext) -> Sequence[Key]:
    """Shortest job first: by max_tokens, times the share of it that the client really uses."""
    share = around.output_share.of
    return [(request.max_output_tokens * share(request.client),) for request in requests]


@dataclass(frozen=True, slots=True)
class Policy:
    """How the waiting are ranked, and who of the running is preempted first.

    `window`: rank that many together, and the next ones when those have left; None: each by itself
    when it has arrived. `num_refreshed`: so many keys are computed again before each round.
    `has_aging`: how often anybody is overtaken has a bound (tenant_queue.py). `keep`: of the
    running, the highest is preempted first, among equals the one admitted last. `is_fair`: between
    tenants. `has_working_set`: who would break leases of others waits (working_set.py).
    `has_gangs`: a program's calls are offered behind one another (gang scheduling)."""

    name: str
    rank: Rank
    window: int | None = None
    num_refreshed: int = 0
    has_aging: bool = True
    keep: Callable[[Request], float] = lambda request: 0.0
    is_fair: bool = False
    has_working_set: bool = False
    has_gangs: bool = False


def level_of(request: Request) -> int:
    """How much its program has had, coarsely."""
    return 0 if request.program is None else request.program.level


_POLICIES = {
    policy.name: policy
    for policy in (
        Policy("fcfs", fcfs),
        Policy("lpm", lpm, num_refreshed=NUM_REFRESHED),
        Policy("dfs-weight", dfs_weight, window=DFS_WINDOW),
        Policy("priority", priority, has_aging=False, keep=lambda request: -request.priority),
        Policy("sjf", sjf, keep=attrgetter("max_output_tokens")),
        Policy(
            "program",
            program,
            num_refreshed=NUM_REFRESHED,
            keep=level_of,
            is_fair=True,
            has_working_set=True,
            has_gangs=True,
        ),
    )
}
POLICY_NAMES = tuple(_POLICIES)


def policy_of(name: str) -> Policy:
    """Raises InvalidRequest that lists the names."""
    policy = _POLICIES.get(name)
    if policy is None:
        raise InvalidRequest.of("schedule_policy", name, f"one of {POLICY_NAMES}")
    return policy


def _depth_first(indices: Sequence[int], runs: Sequence[bytes]) -> Iterator[int]:
    """`indices` in depth-first order of their runs' trie, the branch with most runs first."""
    order = sorted(range(len(runs)), key=runs.__getitem__)
    shared = [0, *(_common_length(runs[a], runs[b]) for a, b in pairwise(order))]
    spans = [(0, len(order))]
    while spans:
        low, high = spans.pop()
        if high - low == 1:
            yield indices[order[low]]
            continue
        fork = min(shared[low + 1 : high])
        cuts = [low, *(i for i in range(low + 1, high) if shared[i] == fork), high]
        # The stack hands out the last span first: the fullest branch, and the earliest of equals.
        spans += sorted(pairwise(cuts), key=lambda span: (span[1] - span[0], -span[0]))


def _common_length(a: bytes, b: bytes) -> int:
    """Leading tokens (of 4 bytes) that both have; by bisection, so blocks are compared."""
    low, high = 0, min(len(a), len(b)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if a[4 * low : 4 * middle] == b[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
