"""Kernels of recurrent layers: in batches and chunks they say what token by token says.

Those of a GPU run in Triton's interpreter, so with few tokens, in float32 and float16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from stemma.kernels.cpu.recurrence import CHUNK_TOKENS
from stemma.kernels.cpu.recurrence import RECURRENCE as CPU
from stemma.kernels.ops import DevicePlan, Recurrence
from stemma.kernels.reference.recurrence import RECURRENCE as REFERENCE
from stemma.kernels.state_rows import StateRows
from stemma.kernels.triton.recurrence import RECURRENCE as GPU

GROUPS, HEADS, KEY_DIM, VALUE_DIM, CHANNELS, KERNEL, SLOTS = 2, 4, 12, 20, 10, 4, 9
EDGES = (1, 2, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 2 * CHUNK_TOKENS + 3)
LENGTHS = [(1,), (5,), (1, 1, 1), (1, 70, 1, 3), EDGES]
Op = Callable[[Recurrence, Tensor, Tensor, object], Tensor]


def _bound(rows: StateRows, padded_tokens: int | None = None) -> object:
    plan = GPU.plan(rows, padded_tokens)
    assert isinstance(plan, DevicePlan)
    arrays = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
    return plan.bind(arrays, torch.empty(0))


TRITON = replace(GPU, plan=_bound)
KERNELS = {"reference": REFERENCE, "cpu": CPU, "triton": TRITON}
EXACT = {"reference": 1e-11, "cpu": 1e-11, "triton": 2e-5}


def _dtype(kernels: Recurrence) -> torch.dtype:
    """The widest."""
    return torch.float32 if kernels is TRITON else torch.float64


def _draw(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _convolve(kernels: Recurrence, x: Tensor, pool: Tensor, plan: object) -> Tensor:
    bias = _draw(2, CHANNELS).to(x.dtype)
    taps = _draw(1, KERNEL, CHANNELS).to(torch.promote_types(x.dtype, torch.float32))
    inputs = x[:, :CHANNELS].contiguous()
    return kernels.short_convolution(inputs, taps, bias, pool, plan, has_silu=True)


def _delta(kernels: Recurrence, x: Tensor, pool: Tensor, plan: object) -> Tensor:
    q, k, v, rates = _parts(x)
    decay = -torch.nn.functional.softplus(rates[:, :HEADS].to(pool.dtype))
    beta = rates[:, HEADS:].to(pool.dtype).sigmoid()
    return kernels.gated_delta_rule(q, k, v, decay, beta, pool, plan)


def _channel_delta(kernels: Recurrence, x: Tensor, pool: Tensor, plan: object) -> Tensor:
    """A decay for each number of a key, some of them strong enough to forget at once."""
    q, k, v, rates = _parts(x)
    decay = -torch.nn.functional.softplus(v.flatten(1)[:, : HEADS * KEY_DIM].to(pool.dtype))
    beta = rates[:, HEADS:].to(pool.dtype).sigmoid()
    by_channel = (20 * decay).view(len(x), HEADS, KEY_DIM)
    return kernels.gated_delta_rule(q, k, v, by_channel, beta, pool, plan)


def _scan(kernels: Recurrence, x: Tensor, pool: Tensor, plan: object) -> Tensor:
    q, k, v, rates = _parts(x)
    steps = torch.nn.functional.softplus(rates[:, :HEADS].to(pool.dtype))
    decay = -_draw(3, HEADS).exp().to(pool.dtype)
    return kernels.state_space_scan(q, k, v, steps, decay, pool, plan)


def _parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sizes = [GROUPS * KEY_DIM, GROUPS * KEY_DIM, HEADS * VALUE_DIM, 2 * HEADS]
    q, k, v, rates = x.split(sizes, -1)
    keys_shape = (len(x), GROUPS, KEY_DIM)
    return q.reshape(keys_shape), k.reshape(keys_shape), v.reshape(len(x), HEADS, -1), rates


WIDTH = 2 * GROUPS * KEY_DIM + HEADS * VALUE_DIM + 2 * HEADS
OPS: dict[str, tuple[Op, tuple[int, ...]]] = {
    "short convolution": (_convolve, (KERNEL - 1, CHANNELS)),
    "gated delta rule": (_delta, (HEADS, KEY_DIM, VALUE_DIM)),
    "channel delta rule": (_channel_delta, (HEADS, KEY_DIM, VALUE_DIM)),
    "state-space scan": (_scan, (HEADS, KEY_DIM, VALUE_DIM)),
}


def _rows(
    lengths: Sequence[int], firsts: Sequence[bool] = (), drafts: Sequence[int] = ()
) -> StateRows:
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    slots = np.arange(len(lengths), dtype=np.int64)[::-1] + 2
    is_first = np.array(firsts or [i % 2 == 0 for i in range(len(lengths))], dtype=np.bool_)
    num_drafts = np.array(drafts or [0] * len(lengths), dtype=np.int64)
    return StateRows(starts, slots.copy(), is_first, num_drafts)


def _row(length: int, slot: int) -> StateRows:
    """One that goes on."""
    no_drafts = np.array([0])
    return StateRows(np.array([0, length]), np.array([slot]), np.array([False]), no_drafts)


def _run(
    kernels: Recurrence, name: str, x: Tensor, rows: StateRows, dtype: torch.dtype, seed: int = 9
) -> tuple[Tensor, Tensor]:
    """The outputs, and the pool behind the step."""
    op, shape = OPS[name]
    wide = dtype if name == "short convolution" else torch.promote_types(dtype, torch.float32)
    pool = _draw(seed, SLOTS, *shape).to(wide)
    pool[rows.slots[rows.is_first]] = float("nan")  # what others have left there
    return op(kernels, x.to(dtype), pool, kernels.plan(rows)), pool


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-11), (torch.float32, 2e-4), (torch.bfloat16, 6e-2)],
)
def test_batches_and_chunks_say_what_token_by_token_says(
    name: str, lengths: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    x, rows = 0.5 * _draw(4, sum(lengths), WIDTH).to(dtype), _rows(lengths)
    expected = _run(REFERENCE, name, x, rows, dtype)
    found = _run(CPU, name, x, rows, dtype)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("dtype", "tolerance", "longest", "padded_tokens"),
    [(torch.float32, 2e-5, 6, None), (torch.float16, 2e-2, CHUNK_TOKENS + 2, 96)],
)
def test_a_gpus_kernels_say_what_token_by_token_says(
    name: str, dtype: torch.dtype, tolerance: float, longest: int, padded_tokens: int | None
) -> None:
    """In float16 in chunks, which float32 has none of, and in a step that is padded, as a captured
    one, whatever its last tokens are."""
    lengths, firsts = (1, longest, 3, 1), [True, False, False, False]
    num_tokens = sum(lengths)
    x = 0.5 * _draw(4, padded_tokens or num_tokens, WIDTH).to(dtype)
    x[num_tokens:] = torch.nan
    rows = _rows(lengths, firsts)
    out, pool = _run(REFERENCE, name, x[:num_tokens], rows, dtype)
    kernels = replace(GPU, plan=lambda rows, _=None: _bound(rows, padded_tokens))
    found, ours = _run(kernels, name, x, rows, dtype)
    torch.testing.assert_close(found[:num_tokens], out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(ours, pool, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kernels", [CPU, TRITON], ids=["cpu", "triton"])
def test_keys_that_are_alike_do_not_harm_a_chunk(kernels: Recurrence) -> None:
    """The system of its tokens' writes is then full of ones, and powers of it are huge."""
    q, k, v, _ = _parts(_draw(4, CHUNK_TOKENS, WIDTH).half())
    inputs = q, k[:1].expand_as(k).contiguous(), v
    decay, beta = torch.zeros(2, CHUNK_TOKENS, HEADS).unbind()
    results = []
    for each in (REFERENCE, kernels):
        pool = _draw(9, SLOTS, HEADS, KEY_DIM, VALUE_DIM).float()
        plan = each.plan(_row(CHUNK_TOKENS, 2))
        results += [each.gated_delta_rule(*inputs, decay, beta + 1, pool, plan), pool]
    torch.testing.assert_close(results[2], results[0], atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(results[3], results[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", [REFERENCE, CPU], ids=["reference", "cpu"])
@pytest.mark.parametrize("name", OPS)
def test_a_row_does_not_depend_on_others_nor_on_its_chunks(name: str, kernels: Recurrence) -> None:
    lengths = (3, 130, 1)
    x, rows = 0.5 * _draw(4, sum(lengths), WIDTH), _rows(lengths, [False] * 3)
    together, pool = _run(kernels, name, x, rows, torch.float64)
    own, slot = x[3:133], int(rows.slots[1])
    for chunks in ((130,), (1,) * 130, (64, 1, 65), (129, 1)):
        alone = _draw(9, SLOTS, *OPS[name][1])
        parts, start = [], 0
        for length in chunks:
            row = _row(length, slot)
            part = own[start : start + length]
            parts.append(OPS[name][0](kernels, part, alone, kernels.plan(row)))
            start += length
        torch.testing.assert_close(torch.cat(parts), together[3:133], atol=1e-11, rtol=1e-11)
        torch.testing.assert_close(alone[slot], pool[slot], atol=1e-11, rtol=1e-11)


DRAFTED = ((1, 0), (4, 3), (70, 1), (7, 2), (2, 1), (12, 11), (1, 0))  # tokens, of these drafts
# For the interpreter, which scans float32 token by token: no row needs to be longer than a chunk.
FEW_DRAFTED = ((1, 0), (4, 3), (5, 1), (2, 1), (1, 0))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize(
    ("backend", "share"),
    [
        *((name, share) for name in ("reference", "cpu") for share in (0.0, 0.5, 1.0)),
        ("triton", 0.5),
    ],
)
def test_a_state_stands_behind_the_drafts_that_were_right(
    name: str, backend: str, share: float
) -> None:
    """Whatever the others were; what is computed of them does not depend on which are drafts."""
    kernels, exact = KERNELS[backend], {"atol": EXACT[backend], "rtol": EXACT[backend]}
    drafted_rows = FEW_DRAFTED if kernels is TRITON else DRAFTED
    lengths, drafts = zip(*drafted_rows, strict=True)
    x, firsts = 0.5 * _draw(4, sum(lengths), WIDTH), [i % 3 == 0 for i in range(len(lengths))]
    rows = _rows(lengths, firsts, drafts)
    out, pool = _run_with_drafts(kernels, name, x, rows, [int(n * share) for n in drafts])
    whole, _ = _run(REFERENCE, name, x, _rows(lengths, firsts), torch.float64)
    torch.testing.assert_close(out, whole.to(out), **exact)
    kept = [length - drafted + int(drafted * share) for length, drafted in drafted_rows]
    parts = [part[:num] for part, num in zip(x.split(lengths), kept, strict=True)]
    _, expected = _run(REFERENCE, name, torch.cat(parts), _rows(kept, firsts), torch.float64)
    torch.testing.assert_close(pool[rows.slots], expected[rows.slots].to(pool), **exact)


def _run_with_drafts(
    kernels: Recurrence, name: str, x: Tensor, rows: StateRows, num_right: Sequence[int]
) -> tuple[Tensor, Tensor]:
    op, shape = OPS[name]
    dtype = _dtype(kernels)
    pool, plan = _draw(9, SLOTS, *shape).to(dtype), kernels.plan(rows)
    out = op(kernels, x.to(dtype), pool, plan)
    kernels.accept_drafts(plan, torch.tensor(num_right))
    return out, pool


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("name", OPS)
def test_slots_of_others_are_not_touched(name: str, kernels: Recurrence) -> None:
    x, rows = _draw(4, 6, WIDTH), _rows((1, 4, 1))
    _, pool = _run(kernels, name, x, rows, _dtype(kernels))
    before = _draw(9, SLOTS, *OPS[name][1]).to(pool)
    others = [slot for slot in range(SLOTS) if slot not in rows.slots]
    assert torch.equal(pool[others], before[others])
    assert pool[rows.slots].isfinite().all(), "a row has begun with what was left in its slot"
    assert not torch.equal(pool[rows.slots], before[rows.slots])


@pytest.mark.parametrize("kernels", [CPU, TRITON], ids=["cpu", "triton"])
@pytest.mark.parametrize("shape", [(HEADS,), (HEADS, KEY_DIM)], ids=["head", "channel"])
def test_a_decay_that_forgets_everything_is_finite(
    shape: tuple[int, ...], kernels: Recurrence
) -> None:
    """exp of a difference of sums, never a quotient of exponentials."""
    tokens = CHUNK_TOKENS + 5
    q, k, v, rates = _parts(_draw(4, tokens, WIDTH).half())
    decay = torch.full((tokens, *shape), -400.0)
    pool = _draw(9, SLOTS, HEADS, KEY_DIM, VALUE_DIM).float()
    rows = _row(tokens, 2)
    beta = rates[:, :HEADS].sigmoid()
    out = kernels.gated_delta_rule(q, k, v, decay, beta, pool, kernels.plan(rows))
    assert out.isfinite().all() and pool.isfinite().all()
