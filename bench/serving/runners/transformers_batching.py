"""Hugging Face transformers' continuous batching with its own choices, in one process.

The model is made from the folder's config.json with random weights, on the GPU if there is one: no
checkpoint is read. A request is added as soon as its parent is done. transformers 5.17 and later.
"""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from ...harness.workloads import PromptBook, WorkItem, Workload
from .protocol import main

_CPU_PAGE, _GPU_PAGE = 32, 256  # tokens; the latter is the library's own
_CPU_BATCH_TOKENS, _GPU_BATCH_TOKENS = 512, 2048
_NEVER = -1  # an end-of-sequence id that no token has


class TransformersBatching:
    """Owns the model and the manager with its thread."""

    engine = "transformers"
    mode = "offline"

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        transformers: Any = import_module("transformers")
        transformers.logging.set_verbosity_error()
        self.version = str(transformers.__version__)
        is_cuda = torch.cuda.is_available()
        config = transformers.AutoConfig.from_pretrained(Path(args.model))
        with torch.device("cuda" if is_cuda else "cpu"):
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16 if is_cuda else torch.float32
            ).eval()
        generation = transformers.GenerationConfig(
            do_sample=False, eos_token_id=_NEVER, pad_token_id=0, max_new_tokens=1
        )
        self._manager = model.init_continuous_batching(
            generation_config=generation,
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                **batching_options(is_cuda, args.kv_tokens)
            ),
        )
        if is_cuda:
            self._manager.warmup()  # as its own `generate_batch` does: records graphs, if any
        self._manager.start()

    def run(self, workload: Workload) -> PromptBook:
        if workload.json_schema is not None:
            raise ValueError("transformers has no structured outputs")
        book, children = PromptBook(), workload.children()
        waiting = self._add(children[None], book)
        while waiting:
            done = self._manager.get_result(timeout=1)
            if done is None:
                if not self._manager.is_running():
                    raise RuntimeError("the generation thread has ended")
                continue
            if not done.is_finished():
                continue
            if done.error is not None:
                raise RuntimeError(str(done.error))
            item = waiting.pop(done.request_id)
            book.outputs[item.id] = list(done.generated_tokens)
            waiting |= self._add(children.get(item.id, []), book)
        return book

    def _add(self, items: list[WorkItem], book: PromptBook) -> dict[str, WorkItem]:
        """Add requests for these items; returns the items by the library's ids."""
        return {
            self._manager.add_request(book.prompt(item), max_new_tokens=item.max_tokens): item
            for item in items
        }

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10)


def batching_options(is_cuda: bool, kv_tokens: int | None) -> dict[str, Any]:
    """On a GPU the library chooses attention and graphs and, unless given, sizes its cache by free
    memory; on a CPU it would take most of the machine's."""
    if is_cuda and not kv_tokens:
        return {"allow_block_sharing": True}
    page = _GPU_PAGE if is_cuda else _CPU_PAGE
    return {
        "allow_block_sharing": True,
        "page_size": page,
        "num_blocks": (kv_tokens or 4096) // page,
        "max_batch_tokens": _GPU_BATCH_TOKENS if is_cuda else _CPU_BATCH_TOKENS,
    }


if __name__ == "__main__":
    sys.exit(main(TransformersBatching))
