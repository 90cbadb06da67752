"""Masks of automaton states: which tokens can be written from a state without leaving the language.

A walk of the vocabulary's trie over the transition table (Willard & Louf 2023, section 4, with a
trie in place of a loop over the tokens). In states inside free text nearly all tokens are allowed;
there the mask is composed of precomputed ones (`vocabulary.Slices`) and a walk of the few tokens
that are not plain text; where only some characters follow each other freely, of a mask of the
tokens of just these (`_MasksOfRuns`). `native/src/masks.cpp` does this; without a compiler numpy
walks the whole trie, level by level, which the tests also use as the reference for the C++.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from .matcher import Mask
from .native.bindings import library
from .regular.dfa import Dfa
from .token_trie import Ints, Trie
from .vocabulary import Vocabulary

Walk = Callable[[int, Mask], None]
MAX_MASKS_OF_RUNS = 256  # 4 MB at 128k tokens


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
        ("lazy", ctypes.c_void_p),
        ("limit", ctypes.c_int64),
    )


class _NativeTrie(ctypes.Structure):
    _fields_ = (
        ("nodes", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("roots", ctypes.c_void_p),
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
        ("below", ctypes.c_void_p),
    )


class _Run(ctypes.Structure):
    """All texts of at most `length` bytes over a set of characters: they may follow in a state."""

    _fields_ = (("bytes", ctypes.c_uint64 * 2), ("length", ctypes.c_int64))


class _MasksOfRuns:
    """Masks of the tokens that are such texts, computed once for all grammars of a vocabulary."""

    def __init__(self, native: ctypes.CDLL, tokens: _NativeTokens) -> None:
        self._native, self._tokens = native, tokens
        self._masks: OrderedDict[tuple[int, int, int], Mask] = OrderedDict()
        self._lock = threading.Lock()

    def mask(self, run: _Run) -> Mask:
        """[num_words]"""
        key = (run.bytes[0], run.bytes[1], run.length)
        with self._lock:
            mask = self._masks.get(key)
            if mask is None:
                mask = self._masks[key] = np.empty(self._tokens.num_words, np.uint32)
                self._native.stemma_mask_of_run(
                    ctypes.addressof(self._tokens), ctypes.addressof(run), mask.ctypes.data
                )
                if len(self._masks) > MAX_MASKS_OF_RUNS:
                    self._masks.popitem(last=False)
            self._masks.move_to_end(key)
        return mask


def native_walk(native: ctypes.CDLL, dfa: Dfa, vocabulary: Vocabulary) -> Walk:
    """The walk in C++, with the precomputed masks of plain text."""
    runs = np.full(dfa.num_states, -1, np.int16)
    kept = (dfa.class_of, np.ascontiguousarray(dfa.transitions), runs)
    automaton = _NativeDfa(
        kept[0].ctypes.data, kept[1].ctypes.data, dfa.transitions.shape[1], runs.ctypes.data
    )
    return table_walk(native, ctypes.addressof(automaton), vocabulary, (automaton, kept))


def table_walk(native: ctypes.CDLL, at_dfa: int, vocabulary: Vocabulary, kept: object) -> Walk:
    """The same over the table at this address; `kept` holds what it points into."""
    tokens, of_runs, kept_tokens = _native_tokens(vocabulary)
    run = _Run()
    addressof, first_of = ctypes.addressof, ctypes.c_uint32.from_buffer
    call, beyond = native.stemma_token_mask, native.stemma_token_mask_beyond
    at_tokens, at_run = map(ctypes.addressof, (tokens, run))

    def walk(state: int, out: Mask, _kept: object = (kept, kept_tokens, tokens)) -> None:
        at_out = addressof(first_of(out.data))  # out.ctypes.data takes three times as long
        if call(at_dfa, at_tokens, state, at_run, at_out):
            beyond(at_dfa, at_tokens, state, at_run, of_runs.mask(run).ctypes.data, at_out)

    return walk


@functools.lru_cache(maxsize=8)
def _native_tokens(vocabulary: Vocabulary) -> tuple[_NativeTokens, _MasksOfRuns, object]:
    """The structure that C++ reads, masks of runs, and the arrays that it points into."""
    native = library()
    assert native is not None
    slices = vocabulary.slices
    packed = [
        (_packed(vocabulary.trie, None), vocabulary.trie),
        (_packed(slices.other, None), slices.other),
        (_packed(slices.plain, slices.longest), slices.plain),
    ]
    roots = [_roots(trie) for _, trie in packed]
    tries = [
        _NativeTrie(
            nodes.ctypes.data,
            trie.token_ids.ctypes.data,
            own.ctypes.data,
            trie.num_nodes,
            int(trie.depth.max()),
        )
        for (nodes, trie), own in zip(packed, roots, strict=True)
    ]
    all_nodes = packed[0][0]
    below = np.zeros((len(all_nodes), 2), np.uint64)
    native.stemma_note_subtrees(all_nodes.ctypes.data, vocabulary.trie.num_nodes, below.ctypes.data)
    tokens = _NativeTokens(
        *tries, slices.upto.ctypes.data, slices.max_run, vocabulary.num_words, below.ctypes.data
    )
    return tokens, _MasksOfRuns(native, tokens), (packed, roots, slices, below)


def _roots(trie: Trie) -> Ints:
    """[256]: the node of each first byte; 0 where no token begins with it."""
    roots = np.zeros(256, np.int32)
    first = np.flatnonzero(trie.depth == 1)
    roots[trie.byte[first]] = first
    return roots


def _packed(trie: Trie, longest: Ints | None) -> npt.NDArray[np.int32]:
    """[num_nodes + 1, 4]: end, first, depth * 256 + byte, longest; a node in one cache line."""
    nodes = np.zeros((trie.num_nodes + 1, 4), np.int32)
    nodes[:-1, 0] = trie.end
    nodes[:, 1] = trie.first
    nodes[:-1, 2] = trie.depth * 256 + trie.byte
    if longest is not None:
        nodes[:-1, 3] = longest
    return nodes
