"""The C++ kernels for every instruction set that can run here, NEON by an emulator, AVX512-BF16
also with its products made of others. (On the best one all other tests run.)"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from stemma.kernels.native.bindings import INSTRUCTION_SETS, LIBRARY
from stemma.native_library import BuildError, InstructionSet, cpu_flags

CHECK = Path(__file__).parent / "instruction_sets" / "check.cpp"
TIMEOUT_S = 900
_EMULATED_ARM = ("aarch64-linux-gnu-g++", "qemu-aarch64")
EMULATED = {"neon": _EMULATED_ARM, "neon_bf16": _EMULATED_ARM}
BF16_PRODUCTS = CHECK.with_name("bf16_products.h")


@pytest.mark.parametrize("instructions", INSTRUCTION_SETS, ids=lambda each: each.name)
def test_kernels_compute_what_loops_over_single_numbers_do(
    instructions: InstructionSet, tmp_path: Path
) -> None:
    if instructions is _used():
        pytest.skip("all other tests run on it")
    compiler, *emulator = EMULATED.get(instructions.name, ("g++",))
    compile_flags, lacking = instructions.compile_flags, instructions.cpu_flags - cpu_flags()
    if lacking == {"avx512_bf16"}:
        compile_flags = tuple(each for each in compile_flags if each != "-mavx512bf16")
        compile_flags += ("-include", str(BF16_PRODUCTS))
    elif not lacking:
        compiler, emulator = "g++", []
    elif not emulator:
        pytest.skip(f"the CPU has no {instructions.name}")
    if missing := [name for name in (compiler, *emulator) if shutil.which(name) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    program = str(tmp_path / "check")
    flags = [flag for flag in LIBRARY.compile_flags if flag not in ("-O3", "-shared", "-fPIC")]
    sources = [str(each) for each in sorted(LIBRARY.sources.glob("*.cpp"))]
    subprocess.run(
        [
            compiler, *flags, *compile_flags, "-Og", "-static", f"-I{LIBRARY.sources}",
            str(CHECK), *sources, "-o", program,
        ],
        check=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    done = subprocess.run(
        [*emulator, program], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _used() -> InstructionSet | None:
    try:
        return LIBRARY.instructions()
    except BuildError:
        return None
