"""Keys of KV blocks: equal for equal prefixes, and for nothing else."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_blocks import LAYOUT, PLAIN

from stemma.runtime.memory.disk.block_key import BLOCK_TOKENS, blocks_of
from stemma.runtime.memory.kv_layout import KVLayout


def keys(token_ids: list[int], namespace: str = "", layout=LAYOUT) -> list[bytes]:
    return [block.key for block in blocks_of(layout, namespace, array("i", token_ids))]


@pytest.mark.parametrize("num_tokens", [0, 1, 255, 256, 257, 511, 512, 700])
def test_only_whole_blocks_have_keys(num_tokens: int) -> None:
    blocks = blocks_of(LAYOUT, "", array("i", range(num_tokens)))
    assert len(blocks) == num_tokens // BLOCK_TOKENS
    assert b"".join(block.token_ids for block in blocks) == b"".join(
        token_id.to_bytes(4, "little") for token_id in range(len(blocks) * BLOCK_TOKENS)
    )


@pytest.mark.parametrize("place", [0, 255, 256, 600])
def test_nothing_from_an_image_on_has_a_key(place: int) -> None:
    """Its ids mean another image in another process."""
    ids = list(range(1000))
    assert keys([*ids[:place], -5, *ids[place:]]) == keys(ids[:place])


def test_a_block_names_its_parent() -> None:
    blocks = blocks_of(LAYOUT, "", array("i", range(4 * BLOCK_TOKENS)))
    assert [block.parent for block in blocks] == [None, *(block.key for block in blocks[:-1])]


@given(st.integers(0, 3 * BLOCK_TOKENS - 1), st.integers(1, 2**31 - 1))
def test_a_changed_token_changes_its_block_and_all_behind_it(place: int, token_id: int) -> None:
    before = [0] * (3 * BLOCK_TOKENS)
    after = [*before[:place], token_id, *before[place + 1 :]]
    same = [a == b for a, b in zip(keys(before), keys(after))]
    assert same == [index < place // BLOCK_TOKENS for index in range(3)]


def test_other_namespaces_and_layouts_have_other_keys() -> None:
    ids = list(range(BLOCK_TOKENS))
    layouts = [
        LAYOUT,
        replace(LAYOUT, model_revision="other"),
        replace(LAYOUT, arithmetic="float16"),
        replace(LAYOUT, kv=KVLayout(2, (PLAIN,))),
        *(
            replace(LAYOUT, kv=KVLayout(1, (part,)))
            for part in (
                replace(PLAIN, num_vectors=4),
                replace(PLAIN, width=4),
                replace(PLAIN, dtype="int8"),
                replace(PLAIN, layers=(0,)),
            )
        ),
        replace(LAYOUT, kv=KVLayout(1, (PLAIN, PLAIN))),
    ]
    found = {keys(ids, namespace, layout)[0] for namespace in "ab" for layout in layouts}
    assert len(found) == 2 * len(layouts)


def test_keys_are_the_same_in_every_version() -> None:
    """Else a store of yesterday is lost without a word: change the format's number with them."""
    assert keys([7] * BLOCK_TOKENS, "space")[0].hex() == KEY_OF_SEVENS


KEY_OF_SEVENS = "80cbef99dd88f4a77056c05545894ce60dcb1aa2b54b804bc081da4073adfd86"
