"""GPTQ against the paper's own way, scales folded without a change, three bits in words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from checkpoints import make_checkpoint
from torch import Tensor

from stemma.quantize.folding import fold_in, folds_of
from stemma.quantize.gptq import DAMPING, InputOrder, gptq_numbers
from stemma.quantize.grids import Grid, grid_of
from stemma.quantize.layer_runs import LayerRuns, LayerWeights
from stemma.runtime.checkpoint.quantized.gptq_layout import numbers_of_3_bits, words_of_3_bits
from stemma.runtime.checkpoint.safetensors.checkpoint import CheckpointWeights
from stemma.runtime.models.model_config import read_model_config
from stemma.runtime.models.model_tensors import model_tensors


def inverse_gptq(columns: Tensor, grid: Grid, gram: Tensor) -> Tensor:
    """Frantar et al. 2022, section 3: from the first input to the last, each one's error spread
    over the others by the inverse without those that are done."""
    damped = gram + DAMPING * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    left = sorted(range(len(gram)), key=lambda i: -float(gram[i, i]))
    columns, numbers = columns.clone(), torch.empty_like(columns)
    while left:
        inverse = torch.linalg.inv(damped[left][:, left])
        first, group = left[0], left[0] // grid.group_size
        numbers[first] = grid.numbers(columns[first], group)
        rounded = (numbers[first] - grid.zeros[group]) * grid.scales[group]
        error = (columns[first] - rounded) / inverse[0, 0]
        for row, each in enumerate(left):
            columns[each] -= inverse[row, 0] * error
        left = left[1:]
    return numbers


def test_one_factorization_gives_what_the_inverses_do() -> None:
    torch.manual_seed(0)
    mixing = torch.randn(192, 192, dtype=torch.float64)
    x = torch.randn(1000, 192, dtype=torch.float64) @ mixing  # inputs that go together
    gram, columns = x.T @ x, torch.randn(192, 24, dtype=torch.float64)
    grid = grid_of(columns, 4, 64, gram.diagonal())
    numbers = gptq_numbers(columns, grid, InputOrder(gram.clone()))
    assert torch.equal(numbers, inverse_gptq(columns, grid, gram))

    def error(numbers: Tensor) -> float:
        return float((x @ (grid.values(numbers.clone()) - columns)).square().sum())

    assert error(numbers) < 0.6 * error(grid.nearest(columns))


def test_a_weight_makes_up_for_what_its_inputs_have_lost() -> None:
    torch.manual_seed(0)
    original = torch.randn(500, 32, dtype=torch.float64) @ torch.randn(32, 32, dtype=torch.float64)
    x = original + 0.3 * torch.randn_like(original) + 0.2 * original.roll(1, 1)
    columns = torch.randn(32, 8, dtype=torch.float64)
    order = InputOrder(x.T @ x)
    changed = columns + order.solve(x.T @ (original - x) @ columns)
    nearest = torch.linalg.lstsq(x, original @ columns).solution

    def error(columns_now: Tensor) -> float:
        return float((x @ columns_now - original @ columns).square().sum())

    assert error(changed) < 0.5 * error(columns)
    assert error(changed) < 1.05 * error(nearest), "but for the damping it is the least"


def test_folded_scales_leave_a_layers_output_as_it_was(tmp_path: Path) -> None:
    """In every place that takes scales, biases and shared heads of values too."""
    folder = make_checkpoint(tmp_path, "qwen2", num_layers=1, has_tokenizer=False)
    config = read_model_config(folder)
    source = CheckpointWeights(folder, torch.float32)
    weights = LayerWeights(source)
    runs = LayerRuns(config, weights)
    stream = torch.randn(20, config.hidden_size, generator=torch.Generator().manual_seed(1))
    before = stream.clone()
    layer = runs.layer(0)
    runs.run(layer, 0, [12, 8], before)
    shapes = model_tensors(config).linears
    linears = {name: source.take(f"{name}.weight", shape) for name, shape in shapes.items()}
    folds = folds_of(config, runs.layer_name(0), runs.linears(layer, 0))
    assert len(folds) == 4
    for fold in folds:
        size = linears[fold.names[0]].shape[1]
        scales = fold.tied(torch.rand(size) * 8 + 0.1)
        fold_in(fold, scales, linears.__getitem__, source, weights.changed)
    weights.weights.update({n: w for n, w in linears.items() if not n.endswith("lm_head")})
    after = stream.clone()
    runs.run(runs.layer(0), 0, [12, 8], after)
    source.close()
    assert not torch.equal(after, before)
    assert torch.allclose(after, before, atol=1e-4 * float(before.abs().max()))


def test_three_bits_are_a_stream_of_bits() -> None:
    numbers = torch.randint(8, (3, 64), dtype=torch.uint8)
    words = words_of_3_bits(numbers)
    bits = np.unpackbits(words.numpy().view(np.uint8), axis=1, bitorder="little")
    assert np.array_equal(bits.reshape(3, 64, 3) @ [1, 2, 4], numbers.numpy())
    assert torch.equal(numbers_of_3_bits(words), numbers)
