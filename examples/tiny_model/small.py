"""The small model of a cascade: some layers of stemma-tiny, their MLPs cut, trained to extract.

    python small.py --out run-small             # and --resume, to go on
    stemma bench cascade --small run-small/model

It takes a fourth of the products of stemma-tiny's layers, and writes a model folder at OUT/model.
Of a deep model most layers can be left out and the rest be healed by little training (Gromov et
al., "The unreasonable ineffectiveness of the deeper layers", 2024); which ones is tried: those
with the least loss as they are. Of an MLP the neurons with the largest outputs are kept. Flags are
those of `train.py`; weights are trained in float32, which a CPU without bfloat16 is faster in.
"""

import dataclasses
import itertools
from pathlib import Path

import torch
from export import export
from generate import samples
from model import Config, Llama
from torch import Tensor, nn
from train import (
    Batch,
    Data,
    Trainer,
    compute_loss,
    held_out_batches,
    load_encoder,
    load_teacher,
    make_batches,
    parse_args,
    run,
)

LARGE = Path(__file__).parents[2] / "runtime/checkpoint/assets/stemma-tiny"
NUM_LAYERS = 3
NUM_NEURONS = 128  # of each MLP
MIX = {"extract": 0.6, "extract_many": 0.3, "extract_whole": 0.1}


def main() -> None:
    args = parse_args(
        __doc__, out=Path("run-small"), steps=3000, tokens=2048, lr=1e-3, lr_embed=1e-3, mix=MIX,
        warmup_mix_steps=0, decay=0.9, dtype=torch.float32, pool=400, threads=1,
    )  # fmt: skip
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = args.out / "tokenizer.json"
    tokenizer.write_bytes((LARGE / "tokenizer.json").read_bytes())
    encoder = load_encoder(tokenizer)
    large, checkpoint = load_teacher(LARGE, "cpu"), args.out / "checkpoint.pt"
    if args.resume:
        trainer = Trainer(args, Llama(small_config(large)), "cpu")
        trainer.load(checkpoint)
    else:
        stream = samples(MIX, args.seed)
        seen = make_batches(encoder, [next(stream) for _ in range(20)], args.tokens)
        trainer = Trainer(args, cut(large, seen), "cpu")
    run(trainer, Data(encoder, args), held_out_batches(encoder, ("extract",)), checkpoint)
    export([checkpoint], args.out / "model")


def small_config(large: Llama) -> Config:
    return dataclasses.replace(large.config, layers=NUM_LAYERS, intermediate=NUM_NEURONS)


@torch.no_grad()
def cut(model: Llama, seen: list[Batch]) -> Llama:
    """A model of `NUM_LAYERS` layers of `NUM_NEURONS`: those of `model` that matter for `seen`."""
    blocks = list(model.blocks)

    def loss_of(choice: tuple[int, ...]) -> float:
        model.blocks = nn.ModuleList(blocks[index] for index in choice)
        return sum(compute_loss(model, batch, "cpu", None, torch.float32).item() for batch in seen)

    layers = min(itertools.combinations(range(len(blocks)), NUM_LAYERS), key=loss_of)
    loss_of(layers)  # with these in place
    print(f"layers {layers}", flush=True)
    small = Llama(small_config(model))
    small.embed.weight.copy_(model.embed.weight)
    small.final_norm.copy_(model.final_norm)
    for own, block, weights in zip(
        small.blocks, model.blocks, neuron_weights(model, seen), strict=True
    ):
        kept = weights.topk(NUM_NEURONS).indices.sort().values
        state = block.state_dict()
        gate, up = state["gate_up.weight"].chunk(2)
        state["gate_up.weight"] = torch.cat([gate[kept], up[kept]])
        state["down.weight"] = state["down.weight"][:, kept]
        own.load_state_dict(state)
    return small


def neuron_weights(model: Llama, seen: list[Batch]) -> list[Tensor]:
    """How much each neuron of each MLP adds to the residual stream, squared: [intermediate]."""
    found = [torch.zeros(model.config.intermediate) for _ in model.blocks]
    hooks = []
    for index, block in enumerate(model.blocks):

        def add(module: nn.Module, given: tuple[Tensor, ...], index: int = index) -> None:
            found[index] += given[0].flatten(0, 1).square().sum(0)

        hooks.append(block.down.register_forward_pre_hook(add))
    for batch in seen:
        model(batch.ids)
    for hook in hooks:
        hook.remove()
    return [
        energy * block.down.weight.square().sum(0)
        for energy, block in zip(found, model.blocks, strict=True)
    ]


if __name__ == "__main__":
    main()
