from __future__ import annotations

from array import array

import pytest

from stemma.frontend.protocol.kv_policy import KVPolicy, snapkv, streaming
from stemma.runtime.programs.branch_kv import BranchKV
from stemma.runtime.schedule.compression import CompressedPrefixes

TEXT = array("i", [index * 31 % 257 for index in range(400)])
STREAM = streaming(24, sinks=3)


class CountedPrefixes(CompressedPrefixes):
    num_named = 0

    def _id_of(self, digest: bytes) -> int:
        self.num_named += 1
        return super()._id_of(digest)


@pytest.mark.parametrize("policy", [STREAM, KVPolicy("window", 16, sinks=0)])
def test_a_stream_goes_on_from_what_it_has_kept(policy: KVPolicy) -> None:
    prefixes = CountedPrefixes(window=KVPolicy("window", 16, sinks=0))
    kept, forked = BranchKV(), None
    for end in range(1, 400, 7):
        shown = kept.with_policy(TEXT[:end], policy, prefixes)
        expected = BranchKV().with_policy(TEXT[:end], policy, CompressedPrefixes(window=policy))
        assert (shown.ids, shown.num_replaced) == (expected.ids, expected.num_replaced)
        if end > 200 and forked is None:
            forked = kept.copy()
    assert prefixes.num_named <= 400 // policy.num_dropped_at_once
    assert forked is not None
    other = array("i", [*TEXT[:100], *TEXT[:200]])
    for branch in (kept, forked):  # a text that was written anew, and one that is shorter
        for ids in (other, TEXT[:90]):
            expected = BranchKV().with_policy(ids, policy, prefixes)
            assert branch.with_policy(ids, policy, prefixes).ids == expected.ids


def test_what_a_stream_has_kept_is_of_that_policy_and_of_what_the_branch_had() -> None:
    prefixes, kept = CompressedPrefixes(), BranchKV()
    kept.with_policy(TEXT[:300], STREAM, prefixes)
    for policy in (streaming(32, sinks=3), snapkv(0.5, window=8)):
        expected = BranchKV().with_policy(TEXT, policy, prefixes).ids
        assert kept.with_policy(TEXT, policy, prefixes).ids == expected
    kept.with_policy(TEXT[:300], STREAM, prefixes)
    kept.compress(TEXT[:120], streaming(40, sinks=3), prefixes)
    afresh = BranchKV()
    afresh.compress(TEXT[:120], streaming(40, sinks=3), prefixes)
    assert kept.with_policy(TEXT, STREAM, prefixes).ids == (
        afresh.with_policy(TEXT, STREAM, prefixes).ids
    )
