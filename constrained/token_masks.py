"""Masks of automaton states: which tokens can be written from a state without leaving the language.

A walk of the vocabulary's trie over the transition table (Willard & Louf 2023, section 4, with a
trie in place of a loop over the tokens). In states inside free text nearly all tokens are allowed;
there the mask is put together from precomputed ones (`vocabulary.Slices`) and a walk of the few
tokens that are not plain text. `native/src/masks.cpp` does this; without a compiler numpy walks the
whole trie, level by level, which is also what the tests hold the C++ to.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .matcher import Mask
from .native.bindings import library
from .regular.dfa import Dfa
from .token_trie import Ints, Trie
from .vocabulary import Vocabulary

Walk = Callable[[int, Mask], None]


def walk_of(dfa: Dfa, vocabulary: Vocabulary) -> Walk:
    """`walk(state, out)` sets `out` [num_words] to the tokens that may follow in a state."""
    native = library()
    if native is None:
        return numpy_walk(dfa, vocabulary)
    return native_walk(native, dfa, vocabulary)


def numpy_walk(dfa: Dfa, vocabulary: Vocabulary) -> Walk:
    """Level by level: the states of all nodes of one depth at a time."""
    trie = vocabulary.trie
    levels = _levels(trie)
    node_of_token = np.repeat(np.arange(trie.num_nodes), np.diff(trie.first))
    flat, num_classes = dfa.transitions.ravel(), dfa.transitions.shape[1]
    edges = dfa.class_of[trie.byte].astype(np.int64)

    def walk(state: int, out: Mask) -> None:
        states = np.zeros(trie.num_nodes, np.int64)
        states[0] = state
        for nodes, parents in levels:
            states[nodes] = flat[states[parents] * num_classes + edges[nodes]]
        out[:] = vocabulary.mask_of(trie.token_ids[states[node_of_token] != 0])

    return walk


def _levels(trie: Trie) -> list[tuple[Ints, Ints]]:
    """(nodes, their parents) of every depth from 1."""
    by_depth = np.argsort(trie.depth, kind="stable").astype(np.int32)
    bounds = np.searchsorted(trie.depth[by_depth], np.arange(trie.depth.max() + 2))
    levels, above = [], by_depth[:1]
    for low, high in itertools.pairwise(bounds[1:]):
        nodes = by_depth[low:high]
        levels.append((nodes, above[np.searchsorted(above, nodes) - 1]))
        above = nodes
    return levels


class _NativeDfa(ctypes.Structure):
    _fields_ = (
        ("class_of", ctypes.c_void_p),
        ("transitions", ctypes.c_void_p),
        ("num_classes", ctypes.c_int64),
        ("runs", ctypes.c_void_p),
    )


class _NativeTrie(ctypes.Structure):
    _fields_ = (
        ("nodes", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("num_nodes", ctypes.c_int64),
        ("max_depth", ctypes.c_int64),
    )


class _NativeTokens(ctypes.Structure):
    _fields_ = (
        ("all", _NativeTrie),
        ("other", _NativeTrie),
        ("plain", _NativeTrie),
        ("upto", ctypes.c_void_p),
        ("max_run", ctypes.c_int64),
        ("num_words", ctypes.c_int64),
    )


def native_walk(native: ctypes.CDLL, dfa: Dfa, vocabulary: Vocabulary) -> Walk:
    """The walk in C++, with the precomputed masks of plain text."""
    tokens, kept_tokens = _native_tokens(vocabulary)
    runs = np.full(dfa.num_states, -1, np.int16)
    kept = (dfa.class_of, np.ascontiguousarray(dfa.transitions), runs, kept_tokens)
    automaton = _NativeDfa(
        kept[0].ctypes.data, kept[1].ctypes.data, dfa.transitions.shape[1], runs.ctypes.data
    )
    call, at_dfa, at_tokens = (
        native.stemma_token_mask,
        ctypes.addressof(automaton),
        ctypes.addressof(tokens),
    )

    def walk(state: int, out: Mask, _kept: object = (kept, automaton, tokens)) -> None:
        call(at_dfa, at_tokens, state, out.ctypes.data)

    return walk


@functools.lru_cache(maxsize=8)
def _native_tokens(vocabulary: Vocabulary) -> tuple[_NativeTokens, object]:
    """The structure that C++ reads, and the arrays that it points into."""
    slices = vocabulary.slices
    packed = [
        (_packed(vocabulary.trie, None), vocabulary.trie),
        (_packed(slices.other, None), slices.other),
        (_packed(slices.plain, slices.longest), slices.plain),
    ]
    tries = [
        _NativeTrie(
            nodes.ctypes.data, trie.token_ids.ctypes.data, trie.num_nodes, int(trie.depth.max())
        )
        for nodes, trie in packed
    ]
    tokens = _NativeTokens(*tries, slices.upto.ctypes.data, slices.max_run, vocabulary.num_words)
    return tokens, (packed, slices)


def _packed(trie: Trie, longest: Ints | None) -> npt.NDArray[np.int32]:
    """[num_nodes + 1, 4]: end, first, depth * 256 + byte, longest; a node in one cache line."""
    nodes = np.zeros((trie.num_nodes + 1, 4), np.int32)
    nodes[:-1, 0] = trie.end
    nodes[:, 1] = trie.first
    nodes[:-1, 2] = trie.depth * 256 + trie.byte
    if longest is not None:
        nodes[:-1, 3] = longest
    return nodes
