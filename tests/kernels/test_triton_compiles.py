"""Every kernel compiles for sm_90 within its budget of registers and shared memory, without a GPU.

This process interprets kernels; another compiles them (kernels/triton/ahead_of_time) and keeps
what it has compiled in build/triton, so that only changed kernels are compiled again.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stemma.kernels.triton import attention_tiles, latent_attention
from stemma.kernels.triton.ahead_of_time import budgets, offline
from stemma.kernels.triton.ahead_of_time.budgets import BUDGETS
from stemma.kernels.triton.ahead_of_time.compilation import Row
from stemma.kernels.triton.ahead_of_time.resources import (
    Resources,
    awaits_inputs,
    loop_instructions,
    widest_load_bytes,
)
from stemma.kernels.triton.language import triton
from stemma.kernels.triton.multiprocessors import MULTIPROCESSORS, of_capability

TABLE = json.loads(BUDGETS.read_text(encoding="utf-8"))
COMPILED = BUDGETS.parents[2] / "build" / "triton"
ITEMSIZES = {"*fp32": 4, "*bf16": 2, "*fp16": 2, "*i8": 1, "*fp8e4nv": 1}
Rows = dict[str, dict[str, Any]]


def compile_kernels(*arguments: str) -> Rows:
    """What the command says of each kernel, by its name."""
    version = TABLE["triton"]
    if triton.__version__ != version:
        pytest.skip(f"the budgets are triton {version}'s, here is {triton.__version__}")
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    command = "stemma.kernels.triton.ahead_of_time"
    done = subprocess.run(
        [sys.executable, "-m", command, "--json", "--workers", "2", *arguments],
        env=environment | {"TRITON_CACHE_DIR": str(COMPILED), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode == 2 and "no assembler" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.stdout, done.stderr
    rows = {row.pop("name"): row for row in json.loads(done.stdout)}
    assert done.returncode == any(row["breaches"] for row in rows.values()), done.stderr
    return rows


@pytest.fixture(scope="module")
def compiled() -> Rows:
    return compile_kernels()


@pytest.fixture(scope="module")
def all_compiled() -> Rows:
    return compile_kernels("--all")


@pytest.mark.parametrize("name", TABLE["test"])
def test_a_kernel_stays_within_its_budget(name: str, compiled: Rows) -> None:
    assert name in compiled, "nothing launches it: see docs/measure/gpu-testing.md, --update"
    assert compiled[name]["breaches"] == []


def test_every_kernel_has_a_budget(compiled: Rows) -> None:
    assert set(compiled) == set(TABLE["test"])


def test_programs_that_stay_all_fit(compiled: Rows) -> None:
    """Of a grid larger than what the device holds, some would begin when the others have ended."""
    assert_residents_fit(compiled)


@pytest.mark.slow
def test_programs_of_rare_tiles_that_stay_all_fit(all_compiled: Rows) -> None:
    assert_residents_fit(all_compiled)


@pytest.mark.parametrize(
    ("capability", "launch"),
    [
        (89, "attention bf16 256 of Gemma 2"),  # of what a block has on sm_90 it has 44%
        (100, "scan bf16 of Qwen3-Next"),  # its pipeline stopped the compiler
    ],
)
def test_tiles_of_other_gpus_fit_them(capability: int, launch: str) -> None:
    rows = compile_kernels("--gpu", str(capability), "--only", launch)
    assert rows
    assert all(row["breaches"] == [] for row in rows.values())


@pytest.mark.slow
@pytest.mark.parametrize("capability", [one for one in MULTIPROCESSORS if one != 90])
def test_every_kernel_fits_other_gpus(capability: int) -> None:
    rows = compile_kernels("--gpu", str(capability), "--all")
    assert len(rows) > 300
    assert [name for name, row in rows.items() if row["breaches"]] == []
    assert_residents_fit(rows, capability)


def assert_residents_fit(rows: Rows, capability: int = 90) -> None:
    tiles = {
        name: tile
        for name, row in rows.items()
        if (tile := planned_tile(row, capability)) is not None
    }
    assert tiles
    crowded = {
        name: f"{tile.residents} planned, {rows[name]['blocks_per_sm']} fit"
        for name, tile in tiles.items()
        if tile.residents > rows[name]["blocks_per_sm"]
    }
    assert not crowded


def planned_tile(row: dict[str, Any], capability: int) -> attention_tiles.Tile | None:
    """Of a kernel of attention."""
    parameters, multiprocessor = row["parameters"], MULTIPROCESSORS[capability]
    if row["kernel"] != "_attend_items":
        return None
    width = ("narrow", "wide")[parameters["WIDTH"]]
    itemsize = ITEMSIZES[parameters["kv"]]
    if "LATENT_DIM" in parameters:
        num_heads, latent_dim = parameters["NUM_HEADS"], parameters["LATENT_DIM"]
        return latent_attention.tile_of(width, num_heads, latent_dim, itemsize, multiprocessor)
    group = parameters["NUM_HEADS"] // parameters["NUM_KV_HEADS"]
    has_sinks = parameters["sink_logits"] not in (None, "constexpr")
    return attention_tiles.tile_of(
        width, parameters["HEAD_DIM"], group, itemsize, multiprocessor, has_sinks=has_sinks
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLE["soak"])
def test_a_rare_kernel_stays_within_its_budget(name: str, all_compiled: Rows) -> None:
    assert name in all_compiled, "nothing launches it: see docs/measure/gpu-testing.md, --update"
    assert all_compiled[name]["breaches"] == []


@pytest.mark.slow
def test_every_rare_kernel_has_a_budget(all_compiled: Rows) -> None:
    assert set(all_compiled) == {*TABLE["test"], *TABLE["soak"]}


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "blocks"),
    [
        (32, 0, 8, 8),  # all 64 warps
        (16, 0, 1, 32),  # no more than 32 blocks
        (255, 0, 4, 2),
        (168, 0, 4, 3),  # 3 warps of each quarter's 16,384 registers
        (128, 40_000, 4, 4),  # as many by registers as by 228 KB less 1 KB a block
        (128, 113 * 1024, 4, 2),
        (128, 114 * 1024, 4, 1),
        (32, 227 * 1024, 4, 1),
        (32, 227 * 1024 + 1, 4, 0),  # no block may have so much
    ],
)
def test_the_blocks_of_a_multiprocessor_follow_from_what_one_takes(
    registers: int, shared_bytes: int, num_warps: int, blocks: int
) -> None:
    assert MULTIPROCESSORS[90].blocks(registers, shared_bytes, num_warps) == blocks


def test_a_gpu_that_is_not_listed_counts_as_the_one_before() -> None:
    assert of_capability(121).gpus == MULTIPROCESSORS[120].gpus
    assert of_capability(103).shared_bytes == MULTIPROCESSORS[100].shared_bytes
    assert of_capability(87).shared_bytes == MULTIPROCESSORS[86].shared_bytes


def test_a_kernel_that_no_multiprocessor_holds_is_a_misfit() -> None:
    small = MULTIPROCESSORS[89]
    assert budgets.misfits(TAKEN, small) == []
    (said,) = budgets.misfits(replace(TAKEN, shared_bytes=102_400, blocks_per_sm=0), small)
    assert "shared_bytes 102400, of 101376" in said and "RTX 4090" in said


@pytest.mark.parametrize(
    ("ptx", "width"),
    [
        ("add.s32 %r1, %r2, 16;", 0),
        ("@%p1 ld.global.b16 { %rs1 }, [ %rd1 + 0 ];", 2),
        ("ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];", 16),
        ("ld.global.L1::evict_last.v2.b64 { %rd1, %rd2 }, [ %rd1 + 0 ];", 16),
        ("cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x8, %r3;", 8),
        ("ld.global.b32 { %r1 }, [ %rd1 ];\ncp.async.cg.shared.global [ %r1 ], [ %rd1 ], 16;", 16),
    ],
)
def test_the_widest_load_is_read_from_the_code(ptx: str, width: int) -> None:
    assert widest_load_bytes(ptx) == width


def test_the_instructions_of_the_longest_inner_loop_with_products_are_counted() -> None:
    code = """
.text.k:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_0:
        /*0010*/                   IADD3 R2, R2, 0x1, RZ ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0030*/              @P1  BRA `(.L_x_2) ;
        /*0040*/                   FADD R1, R1, R1 ;
.L_x_2:
        /*0050*/              @P0  BRA `(.L_x_1) ;
        /*0060*/              @P2  BRA `(.L_x_0) ;
.L_x_3:
        /*0070*/                   FADD R1, R1, R1 ;
        /*0080*/                   FADD R1, R1, R1 ;
        /*0090*/                   FADD R1, R1, R1 ;
        /*00a0*/                   FADD R1, R1, R1 ;
        /*00b0*/              @P0  BRA `(.L_x_3) ;
.L_x_4:
        /*00c0*/                   BRA `(.L_x_4);
"""
    assert loop_instructions(code) == 4
    assert loop_instructions(code.replace("HMMA", "FFMA")) == 0


@pytest.mark.parametrize(
    ("code", "awaits"),
    [
        ("S2R R0, SR_TID.X ;\nACQBULK ;\nLDG.E R2, [R4] ;", True),
        ("ACQBULK ;\nPREEXIT ;\n@P0 EXIT ;\nSTG.E [R4], R2 ;", True),
        ("LDG.E.128 R2, [R4] ;\nACQBULK ;", False),
        ("@P1 LDGSTS.E.BYPASS.128 [R2], [R4] ;\nACQBULK ;", False),
        ("@P0 STG.E [R4], R2 ;\nACQBULK ;", False),
        ("@P0 BRA `(.L_x_1) ;\nACQBULK ;", False),  # some programs may pass it by
        ("LDC R1, c[0x0][0x28] ;\nLDG.E R2, [R4] ;", False),
    ],
)
def test_a_kernel_awaits_its_inputs_ahead_of_all_else(code: str, awaits: bool) -> None:
    assert awaits_inputs(code) == awaits


def test_a_dependent_kernel_that_does_not_wait_is_a_breach_and_so_is_a_wait_without_need() -> None:
    budget = budgets.as_budget(TAKEN)
    assert budgets.breaches(replace(TAKEN, is_dependent=True, awaits_inputs=True), budget) == []
    for is_dependent in (True, False):
        wrong = replace(TAKEN, is_dependent=is_dependent, awaits_inputs=not is_dependent)
        (said,) = budgets.breaches(wrong, budget)
        assert f"awaits_inputs: {not is_dependent}" in said


def test_decode_layers_kernels_are_compiled_as_dependent_ones_too(compiled: Rows) -> None:
    dependent = {row["kernel"] for row in compiled.values() if row["is_dependent"]}
    assert dependent == {
        "_attend_items", "_merge_partials", "_rotate_and_store", "_store_kv", "_rms_norm",
        "_rms_norm_slices", "_act_and_mul", "_product",
    }  # fmt: skip


TAKEN = Resources(
    kernel="k", parameters={}, num_warps=4, num_stages=3, registers=90, spilled_bytes=0,
    shared_bytes=40_000, blocks_per_sm=5, products="wgmma", widest_load_bytes=16,
    loop_instructions=400,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"registers": 88}, "registers 90, at most 88"),
        ({"shared_bytes": 39_999}, "shared_bytes 40000, at most 39999"),
        ({"loop_instructions": 399}, "loop_instructions 400, at most 399"),
        ({"blocks_per_sm": 6}, "blocks_per_sm 5, at least 6"),
        ({"widest_load_bytes": 32}, "widest_load_bytes 16, at least 32"),
    ],
)
def test_a_breach_is_named(change: dict[str, int], says: str) -> None:
    budget = budgets.as_budget(TAKEN)
    assert budgets.breaches(TAKEN, budget) == []
    assert budgets.breaches(TAKEN, budget | change) == [says]


def test_a_slower_product_and_a_spill_are_breaches() -> None:
    budget = budgets.as_budget(TAKEN)
    slower, spilling = replace(TAKEN, products="mma"), replace(TAKEN, spilled_bytes=8)
    assert budgets.breaches(slower, budget) == ["products by mma, not wgmma"]
    assert budgets.breaches(spilling, budgets.as_budget(spilling)) == ["spills 8 bytes"]
    assert budgets.breaches(spilling, budget | {"spilled_bytes": 8}) == []


def test_a_part_of_the_budgets_is_updated_alone(tmp_path: Path) -> None:
    path = tmp_path / "budgets.json"
    first, other = "rms_norm bf16 4096: _rms_norm", "update_pages: _update_pages"
    budgets.write_budgets(path, [Row(first, False, TAKEN), Row(other, False, TAKEN)])
    said = json.loads(path.read_text())
    said["test"][first]["spilled_bytes"] = 8
    path.write_text(json.dumps(said))
    less = replace(TAKEN, registers=60)
    budgets.write_budgets(path, [Row(first, False, less)], "rms_norm")
    updated = json.loads(path.read_text())["test"]
    assert updated[first] == budgets.as_budget(less) | {"spilled_bytes": 8}
    assert updated[other] == budgets.as_budget(TAKEN)


def test_nothing_is_compiled_where_kernels_are_interpreted() -> None:
    assert offline.why_not_compiled() == offline.INTERPRETED
    with pytest.raises(RuntimeError, match="interpreted"), offline.offline():
        pass


def test_once_each_op_was_launched_no_number_of_tokens_compiles_anything() -> None:
    """What compiles in the middle of serving makes all wait for seconds."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _SIZES],
        env=environment | {"TRITON_CACHE_DIR": str(COMPILED), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    num_warm, *compiled = json.loads(done.stdout)
    assert num_warm > 80
    assert compiled == [[size, []] for size in (1, 17, 100, 129)]


# Prints how many kernels the warm-up has compiled; then sizes with the launches that compiled more.
_SIZES = """
import json, sys
from torch import empty, int64, uint8
from stemma.kernels.triton import expert_blocks, page_copy
from stemma.kernels.triton.ahead_of_time import launches
from stemma.kernels.triton.ahead_of_time.offline import offline, why_not_compiled

if why_not_compiled():
    print(why_not_compiled(), file=sys.stderr)
    sys.exit(2)

def sort_pairs(num_tokens):
    expert_blocks.make_blocks(empty(num_tokens, 8, dtype=int64), 128, 64)

def copy_pages(num_pages):  # strides depend on their number
    pages = empty(num_pages, dtype=int64)
    for width, page_size in ((256, 16), (4, 1)):
        copy = page_copy.PageCopy([empty(4, 64, width, dtype=uint8)] * 2, page_size)
        packed = empty(2, 4, num_pages, page_size, width, dtype=uint8)
        copy.pack(pages, packed)
        copy.unpack(pages, packed)

named = {launch.name: launch.run for launch in launches.all_launches() if not launch.is_rare}
known, kept = set(), []

def compiled_at(size):
    launches.NUM_TOKENS = size
    found = []
    both = {"few pairs": lambda: sort_pairs(size), "pairs": lambda: sort_pairs(9 * size),
            "pages": lambda: copy_pages(size)}
    for name, run in {**named, **both}.items():
        with offline() as compiled:
            run()
        kept.extend(compiled)
        if {id(kernel) for kernel in compiled} - known:
            found.append(name)
        known.update(map(id, compiled))
    return found

compiled_at(8)
compiled_at(64)
num_warm = len(known)
sizes = [[size, compiled_at(size)] for size in (1, 17, 100, 129)]
print(json.dumps([num_warm, *sizes]))
"""
