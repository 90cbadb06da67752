"""The multiprocessor resources and instructions of a compiled kernel.

Registers, stack and shared memory are the assembler's (cuobjdump on the cubin); instructions are
counted in the PTX, where a product is `tcgen05.mma`, `wgmma` or `mma.sync` and a load states its
width.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any, Literal

from ..language import triton
from ..multiprocessors import of_capability

Products = Literal["none", "mma", "wgmma", "tcgen05"]
PRODUCTS: tuple[Products, ...] = ("none", "mma", "wgmma", "tcgen05")  # slowest first

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
_LOAD = re.compile(r"ld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)\b")
_ASYNC_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*?\],\s*(0x[0-9a-f]+|\d+)\b")
_LINE = re.compile(r"^\.(L_\w+):|^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA\b.*`\(\.(L_\w+)\)")
_PRODUCT = re.compile(r"MMA[ .]")  # HMMA, HGMMA, IMMA, QMMA, UTCHMMA and their like
_BULK_COPY = "cp.async.bulk.tensor"
_PTX_WAIT = "griddepcontrol.wait"
_WAIT = re.compile(r"\bACQBULK\b")  # the same
# What may not be ahead of it: reads and writes of global memory, and ways around it.
_EARLY = re.compile(r"\b(?:LDG|STG|LDGSTS|LD|ST|ATOMG?|RED|UBLKCP|UTMA\w+|BRA|BRX|CALL|EXIT)\b")


@dataclass(frozen=True, slots=True)
class Resources:
    """One kernel as compiled."""

    kernel: str
    # Compile-time parameters by value, the others by type ("*bf16", "i32").
    parameters: dict[str, int | float | str | bool | None]
    num_warps: int
    num_stages: int
    registers: int  # of a thread
    spilled_bytes: int  # of a thread: its stack and other local memory
    shared_bytes: int  # of a block, of those that it may have
    blocks_per_sm: int  # that fit at the same time
    products: Products  # of a block (tcgen05), of a warp group (wgmma), of a warp (mma)
    widest_load_bytes: int  # of one thread's load from global memory; 0: none
    # Of a warp, in machine code: the longest loop with products and no loop inside; 0: none.
    loop_instructions: int
    is_dependent: bool = False  # launched so, see `dependent_launch`
    awaits_inputs: bool = False  # before all else it waits for the kernel before


def resources_of(compiled: Any) -> Resources:
    """The resources of one triton CompiledKernel."""
    registers, spilled = _registers_and_spills(compiled.asm["cubin"])
    metadata, ptx = compiled.metadata, compiled.asm["ptx"]
    products, is_dependent = _products(ptx), bool(metadata.launch_pdl)
    machine_code = ""
    if products != "none" or is_dependent:  # to disassemble takes 0.4 s
        machine_code = _machine_code(compiled.asm["cubin"])
    names, constants = compiled.src.fn.arg_names, compiled.src.constants
    return Resources(
        kernel=metadata.name,
        parameters=dict(compiled.src.signature)
        | {names[path[0]]: _plain(value) for path, value in constants.items()},
        num_warps=metadata.num_warps,
        num_stages=metadata.num_stages,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=metadata.shared,
        blocks_per_sm=of_capability(metadata.target.arch).blocks(
            registers, metadata.shared, metadata.num_warps
        ),
        products=products,
        widest_load_bytes=widest_load_bytes(ptx),
        loop_instructions=loop_instructions(machine_code) if products != "none" else 0,
        is_dependent=is_dependent,
        awaits_inputs=awaits_inputs(machine_code) if is_dependent else _PTX_WAIT in ptx,
    )


def loop_instructions(machine_code: str) -> int:
    """Of the longest innermost loop with a matrix product: what a block of keys costs a warp."""
    instructions: list[str] = []
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    for label, instruction in _LINE.findall(machine_code):
        if label:
            labels[label] = len(instructions)
            continue
        target = _BRANCH.search(instruction)
        if target and target[1] in labels:
            loops.append((labels[target[1]], len(instructions)))
        instructions.append(instruction)
    return max(
        (
            last - first + 1
            for first, last in loops
            if any(_PRODUCT.search(one) for one in instructions[first : last + 1])
            and not any(first <= begin and end < last for begin, end in loops)
        ),
        default=0,
    )


def awaits_inputs(machine_code: str) -> bool:
    """Whether a kernel waits for the one before it ahead of all that it reads and writes, on every
    way through it."""
    before, *behind = _WAIT.split(machine_code, maxsplit=1)
    return bool(behind) and _EARLY.search(before) is None


def widest_load_bytes(ptx: str) -> int:
    """The most bytes that one thread loads from global memory at once, asynchronous or not."""
    loads = [int(lanes or 1) * int(bits) // 8 for lanes, bits in _LOAD.findall(ptx)]
    copies = [int(size, 0) for size in _ASYNC_COPY.findall(ptx)]
    return max([*loads, *copies, 16 * (_BULK_COPY in ptx)], default=0)


def _products(ptx: str) -> Products:
    if "tcgen05.mma" in ptx:
        return "tcgen05"
    if "wgmma.mma_async" in ptx:
        return "wgmma"
    return "mma" if "mma.sync" in ptx else "none"


def _registers_and_spills(cubin: bytes) -> tuple[int, int]:
    said = _said_of(cubin, triton.knobs.nvidia.cuobjdump.path, "-res-usage")
    usage = _USAGE.search(said)
    assert usage, f"cuobjdump names no registers:\n{said}"
    registers, stack, _, local = map(int, usage.groups())
    return registers, stack + local


def _machine_code(cubin: bytes) -> str:
    return _said_of(cubin, triton.knobs.nvidia.nvdisasm.path, "-c", "-ndf")


def _said_of(cubin: bytes, *command: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [*command, file.name], capture_output=True, text=True, check=True
        ).stdout


def _plain(value: Any) -> int | float | str | bool | None:
    """A compile-time value in a form that JSON supports."""
    return value if isinstance(value, int | float | str | bool | None) else str(value)
