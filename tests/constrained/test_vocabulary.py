"""The flat trie and the slices of plain text."""

from __future__ import annotations

import numpy as np
import pytest
from grammars import ids_of, vocabularies, vocabulary_of
from hypothesis import given, settings
from hypothesis import strategies as st

from stemma.constrained.native.bindings import library, why_not_native
from stemma.constrained.token_trie import Trie, native_trie, numpy_trie
from stemma.constrained.vocabulary import Vocabulary, plain_length


def keys_by_walking(trie: Trie) -> dict[bytes, list[int]]:
    """Tokens by the bytes on the path to their node."""
    path = bytearray()
    found: dict[bytes, list[int]] = {}
    for node in range(trie.num_nodes):
        del path[max(int(trie.depth[node]) - 1, 0) :]
        if node:
            path.append(int(trie.byte[node]))
        here = trie.token_ids[trie.first[node] : trie.first[node + 1]]
        if len(here):
            found[bytes(path)] = sorted(here.tolist())
    return found


@settings(max_examples=40, deadline=None)
@given(vocabularies())
def test_the_trie_holds_every_token_at_the_end_of_its_bytes(vocabulary: Vocabulary) -> None:
    expected: dict[bytes, list[int]] = {}
    for token, data in enumerate(vocabulary.token_bytes):
        if data:
            expected.setdefault(data, []).append(token)
    assert keys_by_walking(vocabulary.trie) == expected


@settings(max_examples=40, deadline=None)
@given(vocabularies(), st.data())
def test_the_compiled_trie_is_that_of_numpy(vocabulary: Vocabulary, data: st.DataObject) -> None:
    native = library()
    if native is None:
        pytest.skip(f"no compiled code: {why_not_native()}")
    ids = sorted(data.draw(st.sets(st.sampled_from(vocabulary.written_ids))))
    fast = native_trie(native, vocabulary.token_bytes, ids)
    slow = numpy_trie(vocabulary.token_bytes, ids)
    for field in ("byte", "depth", "end", "first", "token_ids", "keys"):
        assert np.array_equal(getattr(fast, field), getattr(slow, field)), field


@settings(max_examples=40, deadline=None)
@given(vocabularies())
def test_a_subtree_ends_where_the_next_node_is_no_deeper(vocabulary: Vocabulary) -> None:
    trie = vocabulary.trie
    for node in range(trie.num_nodes):
        later = np.flatnonzero(trie.depth[node + 1 :] <= trie.depth[node])
        expected = node + 1 + int(later[0]) if len(later) else trie.num_nodes
        assert trie.end[node] == expected


@settings(max_examples=40, deadline=None)
@given(
    vocabularies(), st.binary(max_size=3) | st.sampled_from([b"a", b"aa", b"aab", b'":', b"\xe6"])
)
def test_find_leads_to_all_tokens_with_a_prefix(vocabulary: Vocabulary, prefix: bytes) -> None:
    node = vocabulary.trie.find(prefix)
    tokens = [] if node is None else vocabulary.trie.tokens_below(node).tolist()
    data = vocabulary.token_bytes
    assert sorted(tokens) == [i for i, d in enumerate(data) if d and d.startswith(prefix)]


@settings(max_examples=40, deadline=None)
@given(vocabularies())
def test_slices_part_the_vocabulary_by_length_of_plain_text(vocabulary: Vocabulary) -> None:
    slices = vocabulary.slices
    lengths = {i: plain_length(data) for i, data in enumerate(vocabulary.token_bytes)}
    for most, mask in enumerate(slices.upto):
        assert ids_of(mask) == {i for i, length in lengths.items() if 0 < length <= most}
    assert set(slices.plain.token_ids.tolist()) == {i for i, length in lengths.items() if length}
    assert set(slices.other.token_ids.tolist()) == set(vocabulary.written_ids) - {
        i for i, length in lengths.items() if length
    }
    for node in range(slices.plain.num_nodes):
        below = [lengths[i] for i in slices.plain.tokens_below(node).tolist()]
        assert slices.longest[node] == max(below, default=0)


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (b"abc", 3), ("é東".encode(), 2), (b'a"', 0), (b"\\n", 0), (b"a\n", 0), (b"\xe6\x9d", 0),
        (b"\x7f", 1), (b"", 0), (b"\xff", 0), (b"\xed\xa0\x80", 0),
    ],
)  # fmt: skip
def test_plain_text_is_whole_characters_without_quote_backslash_or_control(
    data: bytes, length: int
) -> None:
    assert plain_length(data) == length


def test_ids_that_write_nothing_are_in_no_trie() -> None:
    vocabulary = vocabulary_of([b"a", None, b"", b"b"], padding=5)
    assert vocabulary.written_ids == (0, 3)
    assert vocabulary.vocab_size == 9 and vocabulary.num_words == 1
    assert sorted(vocabulary.trie.token_ids.tolist()) == [0, 3]
