"""Makes a wheel for each machine that a compiler is here for, out of the pure one: the same files
and the compiled libraries, for all instruction sets of that machine.

    .venv/bin/python .ci/wheels.py dist/stemma_lm-VERSION-py3-none-any.whl

A wheel's tag says which system it needs, as its libraries' symbols tell: compiling on an older one
makes a wheel for older ones. Elsewhere pip takes the pure wheel. libstdc++ is the system's: torch
needs it too, and linked in it would ask for a newer C library.
"""

from __future__ import annotations

import base64
import hashlib
import platform
import re
import shutil
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from stemma.constrained.native import bindings as grammars
from stemma.kernels.native import bindings as kernels
from stemma.native_library import NativeLibrary
from stemma.runtime.speculate.native import bindings as drafting

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = (kernels.LIBRARY, grammars.LIBRARY, drafting.LIBRARY)
MACHINES = ("x86_64", "aarch64")
OLDEST = 17  # of the oldest tag for both machines
# The last of GLIBCXX_3.4.N that a system with glibc 2.M has, by M (auditwheel's manylinux policy).
LIBSTDCXX = {17: 19, 24: 22, 27: 24, 31: 28, 34: 29, 35: 30, 39: 33}


def main(pure: Path) -> int:
    """Write the wheels beside the pure one; 1 where no compiler is here for any machine."""
    num_made = 0
    for machine in MACHINES:
        own = machine == platform.machine()
        compiler = shutil.which("g++" if own else f"{machine}-linux-gnu-g++")
        if compiler is None:
            print(f"no wheel for {machine}: no compiler for it is installed")
            continue
        files = prebuilt(LIBRARIES, machine, compiler, ROOT / "build" / "prebuilt")
        print(with_libraries(pure, files, machine))
        num_made += 1
    return 0 if num_made else 1


def prebuilt(
    libraries: Sequence[NativeLibrary], machine: str, compiler: str, folder: Path
) -> dict[str, Path]:
    """The libraries for all of a machine's instruction sets, by their paths in a wheel; those that
    are in `folder` are taken from there."""
    files = {}
    for library in libraries:
        for each in library.instruction_sets:
            if each.machine in (None, machine):
                path = library.prebuild(compiler, machine, each, folder)
                to = library.prebuilt_path(machine, each).resolve().relative_to(ROOT)
                files[f"stemma/{to.as_posix()}"] = path
    return files


def with_libraries(pure: Path, files: Mapping[str, Path], machine: str) -> Path:
    """A wheel beside the pure one, with these files too."""
    contents = {name: path.read_bytes() for name, path in files.items()}
    tag = f"manylinux_2_{max(map(_system, contents.values()))}_{machine}"
    made = pure.with_name(pure.name.replace("-any.whl", f"-{tag}.whl"))
    with zipfile.ZipFile(pure) as source, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name in source.namelist():
            if name.endswith(".dist-info/RECORD"):
                record, lines = name, source.read(name).decode().splitlines()
            elif name.endswith(".dist-info/WHEEL"):
                described = name
                text = source.read(name).decode().replace("Purelib: true", "Purelib: false")
                contents[name] = text.replace("-none-any", f"-none-{tag}").encode()
            else:
                wheel.writestr(source.getinfo(name), source.read(name))
        kept = [line for line in lines if not line.startswith(f"{described},")]
        for name, content in contents.items():
            wheel.writestr(name, content)
            kept.append(f"{name},sha256={_digest(content)},{len(content)}")
        wheel.writestr(record, "".join(f"{line}\n" for line in kept))
    return made


def _system(library: bytes) -> int:
    """N of the oldest manylinux_2_N on which a library runs."""
    glibc, libstdcxx = (
        max([0, *map(int, re.findall(rb"\0%s\.(\d+)(?=[.\0])" % name, library))])
        for name in (rb"GLIBC_2", rb"GLIBCXX_3\.4")
    )
    having = [system for system, last in LIBSTDCXX.items() if libstdcxx <= last]
    if not having:
        raise SystemExit(f"GLIBCXX_3.4.{libstdcxx} is newer than those in LIBSTDCXX")
    return max(OLDEST, glibc, having[0])


def _digest(content: bytes) -> str:
    """As a RECORD has it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
