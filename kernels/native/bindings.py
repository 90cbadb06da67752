"""The C++ of `src/` in this process: loaded once, its thread pool started once.

`python -m stemma.kernels.native.bindings` compiles it ahead of time.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import torch

from ...errors import InvalidRequest
from ...native_library import (
    COMPILE_FLAGS,
    CPU_ENV,
    BuildError,
    InstructionSet,
    NativeLibrary,
    WrongInstructionSet,
)

AVX512F = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
AVX512 = AVX512F | {"avx512vbmi", "avx512_bf16", "avx512_vnni"}
# Best first, as src/vector.h chooses.
INSTRUCTION_SETS = (
    InstructionSet(
        "avx512",
        "x86_64",
        AVX512,
        ("-march=x86-64-v4", "-mavx512vbmi", "-mavx512bf16", "-mavx512vnni"),
    ),
    InstructionSet(
        "avx512_vnni", "x86_64", AVX512F | {"avx512_vnni"}, ("-march=x86-64-v4", "-mavx512vnni")
    ),
    InstructionSet("avx512f", "x86_64", AVX512F, ("-march=x86-64-v4",)),
    InstructionSet("avx2", "x86_64", frozenset({"avx2", "fma", "f16c"}), ("-march=x86-64-v3",)),
    InstructionSet(
        "neon_bf16",
        "aarch64",
        frozenset({"asimd", "bf16", "i8mm"}),
        ("-march=armv8.2-a+bf16+i8mm",),
    ),
    InstructionSet("neon", "aarch64", frozenset({"asimd"}), ("-march=armv8-a",)),
)
# No -ffast-math: infinities and NaN mean something here. No contraction: what one instance of a
# template fuses and another does not would round differently. GCC warns of its own intrinsics'
# headers.
LIBRARY = NativeLibrary(
    "kernels",
    "CPU kernels",
    Path(__file__).parent / "src",
    (
        *COMPILE_FLAGS,
        "-fno-math-errno",
        "-ffp-contract=off",
        "-pthread",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
    ),
    INSTRUCTION_SETS,
)
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
# Arguments, by function name; these have no result.
_ARGUMENTS = {
    "stemma_start": (ctypes.c_int32, ctypes.c_int32),
    "stemma_pack": (_POINTER, _INT, _INT, _POINTER),
    "stemma_linear": (_POINTER, _POINTER, _POINTER, _INT),
    "stemma_pack_quantized": (_POINTER,) * 4,
    "stemma_quantized_linear": (_POINTER, _POINTER, _POINTER, _INT, _POINTER),
    "stemma_rms_norm": (_POINTER, _POINTER, _POINTER, ctypes.c_double, _POINTER, _INT, _INT),
    "stemma_norm_slices": (_POINTER, _POINTER, ctypes.c_double, _INT, _INT, _INT, _INT),
    "stemma_scale": (_POINTER, ctypes.c_double, _INT, _INT),
    "stemma_add": (_POINTER, _POINTER, _INT, _INT),
    "stemma_rotate_and_store": (*(_POINTER,) * 6, *(_INT,) * 7),
    "stemma_attention": (_POINTER, _POINTER, _INT, *(_POINTER,) * 4),
    "stemma_float_attention": (_POINTER, _POINTER, _INT, *(_POINTER,) * 4),
    "stemma_act_and_mul": (*(_POINTER,) * 2, *(_INT,) * 3),
    "stemma_lora": (*(_POINTER,) * 4, _INT),
    "stemma_gather_rows": (_POINTER, _POINTER, _POINTER, _INT, _INT),
    "stemma_join_columns": (_POINTER, _POINTER, _POINTER, _INT, _INT, _INT),
    "stemma_gather_share": (_POINTER, _POINTER, _POINTER, *(_INT,) * 4),
    "stemma_apply_token_mask": (*(_POINTER,) * 3, *(_INT,) * 4),
    "stemma_observe": (*(_POINTER,) * 3, *(_INT,) * 6, *(ctypes.c_double,) * 2),
    "stemma_replay": (_POINTER, _INT),
    "stemma_communicator_free": (_POINTER,),
    "stemma_communicator_abort": (_POINTER,),
    "stemma_all_reduce": (_POINTER, _POINTER, _INT, _INT),
    "stemma_all_gather": (_POINTER, _POINTER, _INT, _POINTER),
    "stemma_all_to_all": (_POINTER, _POINTER, _POINTER, _POINTER),
}
_ANSWERS = {  # results, then arguments
    "stemma_communicator": (_POINTER, _POINTER, *(_INT,) * 4),
    "stemma_communicator_bytes": (_INT, _INT, _INT),
    "stemma_communicator_is_aborted": (ctypes.c_int32, _POINTER),
}
SPIN_ENV = "STEMMA_SPIN_US"
# Longer than the host half needs between two steps; a late thread delays nothing here, so that
# spinning costs a neighbour a little and this process nothing.
DEFAULT_SPIN_US = 200


@functools.cache
def library_without_threads() -> ctypes.CDLL:
    """For functions that use none. Raises BuildError or WrongInstructionSet."""
    without_result = {name: (None, *each) for name, each in _ARGUMENTS.items()}
    return LIBRARY.load(without_result | _ANSWERS)


@functools.cache
def library() -> ctypes.CDLL:
    """Raises BuildError or WrongInstructionSet.

    NOTE: torch's own threads are switched off, in this thread and in those that have not used
    torch: the little work left to torch does not justify a second pool, whose threads would spin
    beside this one's. Of several engines in a process the first says how many threads there are.
    """
    loaded = library_without_threads()
    num_threads = torch.get_num_threads()
    loaded.stemma_start(num_threads, int(os.environ.get(SPIN_ENV, DEFAULT_SPIN_US)))
    torch.set_num_threads(1)
    return loaded


def instructions() -> InstructionSet:
    """The instruction set that is used. Raises BuildError, and InvalidRequest where STEMMA_CPU
    names none of this CPU."""
    try:
        return LIBRARY.instructions()
    except WrongInstructionSet as error:
        raise InvalidRequest(str(error), CPU_ENV) from error


def description() -> str:
    """The instruction set that is used, and where the library comes from. Raises as
    `instructions`."""
    return f"{instructions().name}, {LIBRARY.origin()}"


@functools.cache
def why_not_native(dtype: torch.dtype) -> str | None:
    """None if the compiled kernels run for `dtype` on this machine, else the reason. Raises
    InvalidRequest where STEMMA_CPU names no instruction set of this CPU, whatever `dtype`."""
    try:
        instructions()
        if dtype is not torch.bfloat16:
            return f"no compiled kernels for {dtype}"
        library()
    except BuildError as error:
        return str(error)
    return None


if __name__ == "__main__":
    LIBRARY.report()
