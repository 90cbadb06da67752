"""Why weights that PyTorch has pickled are not loaded."""

from __future__ import annotations

from collections.abc import Sequence

PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def why_not_pickled(model: str, names: Sequence[str]) -> str:
    """`names`: the files of `model` that are pickled, at least one."""
    shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"{model} has its weights as PyTorch pickles only ({shown}), which can run code of their "
        "own when they are read; convert them once, on a machine where that may be, with "
        "transformers: AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(FOLDER, "
        "safe_serialization=True)"
    )
