"""SGLang's radix trees on the workload of `bench radix`: a process that the benchmark starts.

    python -m stemma.bench.cache.radix_sglang FOLDER {rust,python} NUM_SEQUENCES POOL_TOKENS

FOLDER holds an unpacked wheel of SGLang 0.5.23 (`pip download --no-deps sglang==0.5.23`, `unzip`);
nothing of it needs to be installed but torch. Each line of input, "page_size evict_chunk", is
answered by the JSON of one Run.

What it leaves out makes SGLang look faster, never slower: the adapter between its core and its
scheduler (rust), events and metrics (python), and the free list of the pool (both).
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from .radix import Subject, drive, sequences

_CORE = "sglang/srt/mem_cache/rust_tree_core"
_FULL = 0  # the tree component that all models have: attention over the whole prefix


class _Pool:
    """Counts the tokens in SGLang's tree; hands out the same indices to every sequence."""

    def __init__(self, pool_tokens: int) -> None:
        self.num_free_tokens = pool_tokens
        self._indices = torch.arange(0, dtype=torch.int64)

    def num_free(self) -> int:
        return self.num_free_tokens

    def allocate(self, handle: Any, num_tokens: int) -> torch.Tensor:
        num_matched: int = handle[1]
        if len(self._indices) != num_matched + num_tokens:
            self._indices = torch.arange(num_matched + num_tokens, dtype=torch.int64)
        return self._indices.clone()

    def free_segment(self, indices: torch.Tensor, **_: object) -> None:
        self.num_free_tokens += len(indices)


class RustTree(_Pool):
    """The compiled core, without the Python adapter around it."""

    def __init__(self, core: Any, page_size: int, pool_tokens: int) -> None:
        super().__init__(pool_tokens)
        self.core = core
        params = core.TreeCoreInitParamsBinding(
            eviction_policy="lru", page_size=page_size, device="cpu"
        )
        self.tree = core.RustUnifiedTreeCoreBinding(params, [_FULL])
        self.root = self.tree.root_node_handle()

    def match(self, token_ids: array[int]) -> tuple[Any, int]:
        key = self.core.MatchParamsBinding(key=token_ids, extra_key=None, cache_salt=None)
        found = self.tree.match_prefix(key)
        node, num_matched = found.last_device_node_id, found.device_prefix_len
        if num_matched:
            self.tree.collect_full_device_indices(node, self.root)
        return (node, num_matched), num_matched

    def lock(self, handle: Any) -> Any:
        return self.tree.inc_lock_ref(handle[0], [])

    def evict(self, num_tokens: int) -> None:
        """Leaf by leaf, as SGLang's controller does."""
        tree = self.tree
        freed: dict[int, int] = {}
        tree.evict_device_start(_FULL, num_tokens)
        while True:
            step = tree.evict_device_next_node(_FULL, freed)
            _add_up(freed, step.tracker)
            if step.node_id is not None:
                leaf = tree.evict_device_leaf(step.node_id)
                _add_up(freed, leaf.tracker)
                for indices in leaf.new_device_frees.get(_FULL, ()):
                    self.free_segment(indices)
            elif not step.made_progress:
                break
        tree.evict_device_end(_FULL)

    def insert(self, token_ids: array[int], pages: torch.Tensor) -> None:
        result = self.tree.insert(self.core.InsertParamsBinding(key=token_ids, value=pages))
        self.num_free_tokens -= len(pages) - result.prefix_len

    def unlock(self, lock: Any) -> None:
        params = self.core.DecLockRefParamsBinding(
            node_id=lock.node_id,
            skipped_lock_components=list(lock.skipped_lock_components),
            component_lock_uuids=dict(lock.component_lock_uuids),
        )
        self.tree.dec_lock_ref(lock.node_id, params, False)


def _add_up(total: dict[int, int], more: dict[int, int]) -> None:
    for component, num_tokens in more.items():
        total[component] = total.get(component, 0) + num_tokens


class PythonTree(_Pool):
    """The class RadixCache."""

    def __init__(self, module: Any, page_size: int, pool_tokens: int) -> None:
        super().__init__(pool_tokens)
        self.module = module
        self.tree = module.RadixCache.create_simulated(mock_allocator=self, page_size=page_size)
        self.tree.update_eviction_metrics = _ignore
        self.tree.kv_events = SimpleNamespace(
            record_store=_ignore, record_remove=_ignore, record_all_cleared=_ignore
        )

    device = "cpu"

    def match(self, token_ids: array[int]) -> tuple[Any, int]:
        key = self.module.RadixKey(token_ids)
        found = self.tree.match_prefix(self.module.MatchPrefixParams(key=key))
        node, num_matched = found.last_device_node, found.device_prefix_len
        self.tree.path_device_indices(node)
        return (node, num_matched), num_matched

    def lock(self, handle: Any) -> Any:
        self.tree.inc_lock_ref(handle[0])
        return handle[0]

    def evict(self, num_tokens: int) -> None:
        self.tree.evict(self.module.EvictParams(num_tokens=num_tokens))

    def insert(self, token_ids: array[int], pages: torch.Tensor) -> None:
        params = self.module.InsertParams(key=self.module.RadixKey(token_ids), value=pages)
        self.num_free_tokens -= len(pages) - self.tree.insert(params).prefix_len

    def unlock(self, lock: Any) -> None:
        self.tree.dec_lock_ref(lock)


def _ignore(*_: object, **__: object) -> None:
    """Replaces a metric or an event."""


def load_core(folder: Path) -> ModuleType:
    """The compiled extension."""
    (path,) = (folder / _CORE).glob("mem_cache.*.so")
    spec = importlib.util.spec_from_file_location("mem_cache", path)
    assert spec is not None and spec.loader is not None, f"{path} is no extension module"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_class(folder: Path) -> ModuleType:
    """The module of RadixCache, with mocks for all parts of SGLang that it does not need."""
    sys.meta_path.insert(0, _Partly(folder))
    common: Any = importlib.import_module("sglang.srt.utils.common")
    common.ceil_align = lambda value, unit: -(-value // unit) * unit
    return importlib.import_module("sglang.srt.mem_cache.radix_cache")


class _Partly(MetaPathFinder, Loader):
    """Finds the tree's own modules in `folder`; any other module of SGLang is a mock."""

    packages = ("sglang", "sglang.srt", "sglang.srt.mem_cache")
    modules = ("radix_cache", "base_prefix_cache", "cache_init_params", "events", "utils")

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] != "sglang":
            return None
        file = self.folder / name.replace(".", "/")
        if name in self.packages:  # without running their __init__.py
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(file)]
            return spec
        package, _, last = name.rpartition(".")
        if package == self.packages[-1] and last in (*self.modules, "evict_policy"):
            return importlib.util.spec_from_file_location(name, f"{file}.py")
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Mocked(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _Mocked(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def main(arguments: Sequence[str]) -> None:
    """Respond to each line with one run."""
    folder, name, count, pool_tokens = arguments
    torch.set_num_threads(1)
    module = load_core(Path(folder)) if name == "rust" else load_class(Path(folder))
    make = RustTree if name == "rust" else PythonTree
    workload = sequences(int(count), "q")
    for line in sys.stdin:
        page_size, evict_chunk = map(int, line.split())
        subject: Subject = make(module, page_size, int(pool_tokens))
        print(json.dumps(asdict(drive(subject, workload, evict_chunk))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
