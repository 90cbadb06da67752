"""The card of a quantized model: what it is, how it was made, how far it is from the original."""

from __future__ import annotations

from pathlib import Path

from .making import Recipe, Report

_FILE = "README.md"
_METHODS = {
    "rtn": "rounding to the nearest number",
    "gptq": "GPTQ (arXiv:2210.17323), act-order, groups fixed before",
    "awq": "AWQ (arXiv:2306.00978), scales folded into norms and linears",
    "smoothquant": "SmoothQuant (arXiv:2211.10438), scales folded as AWQ's, then GPTQ",
}


def write_card(out: Path, model: str, command: str, recipe: Recipe, report: Report) -> None:
    """Before what card the original has."""
    file = out / _FILE
    given = file.read_text(encoding="utf-8") if file.exists() else None
    text = _card(model, command, recipe, report)
    if given is not None:
        text += f"\n---\n\nThe original's card:\n\n{given}"
    file.write_text(text, encoding="utf-8")


def _card(model: str, command: str, recipe: Recipe, report: Report) -> str:
    layout, copy, found = recipe.layout, report.copy, report.divergence
    groups = "a scale a row" if layout.bits == 8 else f"groups of {layout.group_size} inputs"
    inputs = ", inputs rounded to 8 bits a token" if layout.activations == "int8" else ""
    before, after = copy.bytes_before, copy.bytes_after
    return f"""# {Path(model).name}, weights in {layout.bits} bits

Made from `{model}` by

```bash
{command}
```

| | |
| --- | --- |
| Method | {_METHODS[recipe.method]} |
| Weights | {layout.bits} bits, {groups}{inputs}; {len(copy.errors)} linears |
| As they were | {copy.num_kept} tensors, the embedding and the output projection among them |
| Size | {after / 1e6:.1f} MB, of {before / 1e6:.1f} MB ({after / max(1, before):.0%}) |
| Calibrated by | {report.num_tokens:,} tokens |
| KL to the original | {found.kl:.4f} nats a token, over {found.num_tokens:,} tokens held out |
| Same best token | {found.same_best:.1%} of them |

The divergence is computed in float32, with the output projection in 8 bits, as Stemma serves it.
"""
