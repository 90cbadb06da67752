"""What a model's arithmetic needs, against its own tensors."""

from __future__ import annotations

from pathlib import Path

import stemma as st
from stemma.bench.harness.limits import model_costs


def test_a_tied_head_counts_once_and_an_embedding_never() -> None:
    embedded = Path(st.__file__).parent / "runtime" / "checkpoint" / "assets" / "stemma-tiny"
    costs = model_costs(embedded)  # hidden 256, 6 layers, 4 and 2 heads of 64, 512 wide
    assert costs.body_weights == 6 * (256 * 256 * 2 + 2 * 256 * 128 + 3 * 256 * 512)
    assert costs.head_weights == 4096 * 256
    assert costs.bytes_per_step == 2 * (costs.body_weights + costs.head_weights)
    one = 2 * (costs.body_weights + costs.head_weights) + 4 * 6 * 4 * 64
    assert costs.prefill_flop(1) == one
