"""The house: who may import whom, and how light `import stemma` is."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import stemma

ROOT = Path(stemma.__file__).parent
PILLARS = ("frontend", "radix", "constrained", "kernels")
GROUND = (
    "errors",
    "file_lock",
    "flags",
    "native_library",
    "native_panic",
    "piped_process",
    "shared_limit",
    "turn_queue",
)  # floor 0
BELOW = {  # what each room above the pillars may import
    "runtime": (*GROUND, *PILLARS),
    "server": (*GROUND, "frontend", "runtime"),
    "training": (*GROUND, *PILLARS, "runtime"),
    "quantize": (*GROUND, *PILLARS, "runtime"),
    "cluster": (*GROUND, "frontend", "radix", "runtime"),
    "planning": (*GROUND, *PILLARS, "runtime", "cluster"),
    "bench": (*GROUND, *PILLARS, "runtime", "server", "cluster", "planning", "training"),
    "cli": (
        *GROUND,
        *PILLARS,
        "runtime",
        "server",
        "cluster",
        "planning",
        "training",
        "quantize",
        "bench",
    ),
}
ROOMS = (*PILLARS, *BELOW)
SERVED = (
    "stemma.runtime.tokenizer",
    # How many tokens images become, which config.json and the processor's file say.
    "stemma.runtime.images.counter",
    "stemma.runtime.models.model_config",
)
# The floors within a room, the lowest first. What stands on one floor imports nothing of it.
FLOORS = {
    "runtime": (
        ("checkpoint", "tokenizer", "sessions"),
        ("images", "memory", "models", "speculate"),
        ("schedule",),
        ("programs", "config"),
        ("execute",),
        ("parallel",),
        ("engine",),
        ("loaded_model",),
        ("encoder_engine",),
        ("gateway",),
        ("__main__",),
    ),
    "server": (
        ("protocol",),
        ("parsers",),
        ("settings",),
        ("access", "metrics"),
        ("generation",),
        ("api", "page"),
        ("app",),
        ("supervisor",),
        ("models",),
        ("http_server",),
    ),
    "cluster": (
        ("placement", "prompt_text"),
        ("cache_mirror", "counters", "settings"),
        ("replica",),
        ("fleet_view", "known_prefixes"),
        ("local", "parts", "ray_engines", "remote", "router_calls", "scaling"),
        ("homes",),
        ("membership",),
        ("router",),
        ("__main__",),
    ),
    "frontend": (
        ("protocol",),
        ("chat_format",),
        ("client",),
        ("openai", "trace"),
        ("native",),
        ("backend",),
        ("cascade", "global_config"),
        ("dsl",),
    ),
    "bench": (
        ("harness",),
        ("cache", "cluster", "constrained"),
        ("serving",),
        ("device", "roofline"),
        ("scheduling", "speculation", "gpu"),
    ),
}
TRITON_DOOR = "kernels/triton/language.py"
PLANNERS = ("work_list", "attention_tiles", "availability")  # of kernels/triton, for the host
# Whole packages and files of the runtime that never load torch, not even through others.
HOST_HALF = (
    "tokenizer",
    "images",
    "memory.copies",
    "memory.disk",
    "memory.peers",
    "speculate",
    "schedule",
    "programs",
    "config",
    "gateway",
    "sessions",
    "models.families",
    "models.encoders.registry",
    "checkpoint.config",
    "checkpoint.location",
    "checkpoint.lora.registry",
)


def sources() -> Iterator[Path]:
    for room in ROOMS:
        yield from files_of(room)
    yield from ROOT.glob("*.py")


def files_of(room: str) -> list[Path]:
    """Never none: a room that has moved would pass every test of it."""
    paths = [*(ROOT / room).rglob("*.py")]
    assert paths, f"there is no room {room}"
    return paths


@cache
def imports_of(path: Path) -> tuple[tuple[str, int], ...]:
    """Absolute names of all imports, also those for types only and inside functions, and of what
    is taken from a module, which may be one itself: (name, level)."""
    return tuple(_imports_of(path))


def _imports_of(path: Path) -> Iterator[tuple[str, int]]:
    package = ["stemma", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, 0
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            for alias in node.names:
                yield ".".join([*module, alias.name]), node.level
            yield ".".join(module), node.level


def module_of(path: Path) -> str:
    parts = ["stemma", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts).removesuffix(".__init__")


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "stemma" else ""


@pytest.mark.parametrize("pillar", PILLARS)
def test_a_pillar_imports_no_other_pillar_and_nothing_above(pillar: str) -> None:
    for path in files_of(pillar):
        for module, _ in imports_of(path):
            room = room_of(module)
            assert room in ("", pillar, *GROUND), f"{path}: imports {module}"


@pytest.mark.parametrize("room", BELOW)
def test_a_room_imports_only_rooms_below(room: str) -> None:
    for path in files_of(room):
        for module, _ in imports_of(path):
            is_below = room_of(module) in ("", room, *BELOW[room]) or module == "stemma.__version__"
            assert is_below, f"{path}: {module}"


def test_the_server_needs_only_the_runtimes_tokenizer_and_what_counts_images() -> None:
    for path in files_of("server"):
        for module, _ in imports_of(path):
            if room_of(module) == "runtime":
                assert module.startswith(SERVED), f"{path}: {module}"


@pytest.mark.parametrize("room", FLOORS)
def test_inside_a_room_folders_import_only_folders_below(room: str) -> None:
    floor_of = {name: floor for floor, names in enumerate(FLOORS[room]) for name in names}
    inside = [path for path in (ROOT / room).iterdir() if path != ROOT / "bench" / "results"]
    found = {path.stem if path.is_file() else path.name for path in inside}
    assert found - {"__init__", "__pycache__"} == set(floor_of), "FLOORS lists the room"
    for path in files_of(room):
        here = path.relative_to(ROOT / room).with_suffix("").parts[0]
        if here == "__init__":
            continue
        for module, _ in imports_of(path):
            parts = module.split(".")
            if parts[:2] == ["stemma", room] and len(parts) > 2 and parts[2] in floor_of:
                there = parts[2]
                assert here == there or floor_of[there] < floor_of[here], f"{path}: {module}"


def test_folders_import_each_other_in_no_circle_at_any_depth() -> None:
    """A folder counts as one node beside its neighbours. Raises CycleError, which names one."""
    paths = {module_of(path): path for path in sources()}
    places: dict[str, dict[str, set[str]]] = {}
    for module, path in paths.items():
        if path.name == "__init__.py":
            continue
        for name in {name for name, _ in imports_of(path) if name in paths}:
            here, there = module.split("."), name.split(".")
            depth = next(
                (i for i, (a, b) in enumerate(zip(here, there)) if a != b),
                min(len(here), len(there)),
            )
            if depth < min(len(here), len(there)):
                graph = places.setdefault(".".join(here[:depth]), {})
                graph.setdefault(here[depth], set()).add(there[depth])
    assert len(places) > 20
    for graph in places.values():
        TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("module", GROUND)
def test_the_ground_imports_nothing_of_the_house(module: str) -> None:
    assert not [m for m, _ in imports_of(ROOT / f"{module}.py") if m.startswith("stemma")]


def test_rooms_are_never_imported_by_bare_folder_name() -> None:
    for path in sources():
        for module, _ in imports_of(path):
            bare = module.split(".")[0]
            assert bare not in (*ROOMS, *GROUND), f"{path}: import {module}"


def test_inside_the_library_imports_are_relative() -> None:
    for path in sources():
        for module, level in imports_of(path):
            assert level or not module.startswith("stemma"), f"{path}: import {module}"


def test_files_import_each_other_in_no_circle() -> None:
    """Raises CycleError, which names one."""
    paths = {module_of(path): path for path in sources()}
    graph = {
        module: {name for name, _ in imports_of(path) if name in paths and name != module}
        for module, path in paths.items()
    }
    TopologicalSorter(graph).prepare()


def host_half() -> list[str]:
    """The modules of HOST_HALF."""
    paths = [ROOT.joinpath("runtime", *name.split(".")) for name in HOST_HALF]
    files = [
        file
        for path in paths
        for file in (path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")])
    ]
    return [module_of(file) for file in files]


def test_the_host_half_loads_no_torch() -> None:
    """Each of its modules is imported where torch cannot be."""
    modules = host_half()
    assert len(modules) > 80
    code = (
        "import sys, importlib; sys.modules['torch'] = None;"
        f"[importlib.import_module(name) for name in {modules!r}]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_commands_that_read_the_engines_flags_load_no_compiler_of_grammars() -> None:
    code = (
        "import sys, stemma.cli.generate; assert 'stemma.constrained.compiler' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("module", ["server.http_server", "cluster.__main__", "cli.plan"])
def test_neither_the_server_nor_the_router_nor_planning_loads_torch(module: str) -> None:
    code = f"import sys; sys.modules['torch'] = None; import stemma.{module}"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("pillar", ["frontend", "radix", "constrained"])
def test_a_pillar_without_tensors_imports_no_torch(pillar: str) -> None:
    for path in files_of(pillar):
        assert not [m for m, _ in imports_of(path) if m.split(".")[0] == "torch"], path


def test_one_file_imports_triton() -> None:
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in sources()
        if any(module.split(".")[0] == "triton" for module, _ in imports_of(path))
    }
    assert importers == {TRITON_DOOR}


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_planner_for_the_gpu_imports_no_triton(planner: str) -> None:
    code = f"import sys, stemma.kernels.triton.{planner}; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_engine_on_a_cpu_never_imports_triton() -> None:
    """What the engine's process imports, and the choice of kernels for each dtype."""
    code = (
        "import sys, torch, stemma.runtime.__main__, stemma.runtime.loaded_model;"
        "from stemma.kernels.registry import select_kernels;"
        "[select_kernels(d) for d in (torch.bfloat16, torch.float16, torch.float32)];"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_package_is_declared() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"stemma"} | {
        ".".join(["stemma", *init.parent.relative_to(ROOT).parts])
        for room in ROOMS
        for init in (ROOT / room).rglob("__init__.py")
    }
    assert set(declared["packages"]) == found


def test_import_stemma_is_light() -> None:
    """No torch, no zmq; the time is the CPU's, and the best of five: no neighbour decides."""
    code = (
        "import sys, time; t = time.process_time(); import stemma; t = time.process_time() - t;"
        "assert not {'torch', 'zmq', 'numpy'} & set(sys.modules), sorted(sys.modules); print(t)"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
        for _ in range(5)
    ]
    assert min(times) < 0.150


def test_the_client_starts_without_torch() -> None:
    code = "import sys, stemma; stemma.Engine, stemma.function; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
