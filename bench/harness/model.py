"""The model of the CPU comparisons: a Llama with random weights, made here, nothing downloaded.

`llama-160m` is 124.7 M parameters in bf16 with a byte-level BPE tokenizer trained on the sources of
Python's standard library. The seed fixes the weights bit by bit; they are drawn in the order in
which Hugging Face transformers 5 builds and initialises its LlamaForCausalLM, then head and
embedding are drawn anew with a spread that gives a clear argmax.

With --draft-layers N there is a draft model that costs and guesses what real ones do, and needs no
training: what the layers behind the first N add is scaled by --rest, so that the first N and the
head guess what the whole model says, the better the smaller --rest is. FOLDER/draft is a checkpoint
of them.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import InvalidRequest

CORPUS_CHARS = 16_000_000
CHUNK_CHARS = 4096
SPECIAL = ("<unk>", "<s>", "</s>")
BODY_STD = 0.04
HEAD_STD = 0.1  # logits spread by about HEAD_STD * sqrt(hidden): bf16 seldom flips the argmax
EMBEDDING_STD = 0.2
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama."""

    hidden: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int = 32_000
    max_position_embeddings: int = 4096


PRESETS = {
    "llama-160m": Shape(768, 12, 12, 4, 64, 2048),
    "llama-1b": Shape(2048, 16, 32, 8, 64, 8192),
    "llama-tiny": Shape(128, 2, 4, 2, 32, 256),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench model`."""
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="write the checkpoint there")
    add("--preset", choices=sorted(PRESETS), default="llama-160m")
    add("--seed", type=int, default=0)
    add("--draft-layers", type=int, default=0, metavar="N", help="a draft of the first N layers")
    add("--rest", type=float, default=0.25, metavar="SHARE",
        help="of what the layers behind them would add (default: %(default)s)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Make the checkpoint."""
    shape = PRESETS[args.preset]
    if not 0 <= args.draft_layers < shape.layers:
        allowed = f"0 (no draft) to {shape.layers - 1}, fewer than the model's layers"
        raise InvalidRequest.of("draft_layers", args.draft_layers, allowed)
    if not 0.0 <= args.rest <= 1.0:
        raise InvalidRequest.of("rest", args.rest, "a number in [0, 1]")
    make_model(args.out, shape, args.seed, args.draft_layers, args.rest)
    print(f"{args.preset} written to {args.out}")
    return 0


def make_model(
    folder: Path, shape: Shape, seed: int = 0, draft_layers: int = 0, rest: float = 1.0
) -> None:
    """Write a checkpoint in Hugging Face layout."""
    import torch

    weights = _weights(torch, shape, seed)
    if draft_layers:
        for layer in range(draft_layers, shape.layers):
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                weights[f"model.layers.{layer}.{name}.weight"] *= rest
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    _write(folder, shape, tensors)
    if draft_layers:
        behind = {f"model.layers.{layer}." for layer in range(draft_layers, shape.layers)}
        first = {n: t for n, t in tensors.items() if not n.startswith(tuple(behind))}
        _write(folder / "draft", replace(shape, layers=draft_layers), first)


def _write(folder: Path, shape: Shape, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    _write_tokenizer(folder, shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", checkpoint_config(shape))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    _write_json(folder / "generation_config.json", ids)


def _weights(torch: Any, shape: Shape, seed: int) -> dict[str, Any]:
    """Drawn in float32. Building a module draws, and initialising it draws again."""
    from torch import nn

    torch.manual_seed(seed)
    embedding = nn.Embedding(shape.vocab, shape.hidden)
    linears = {
        f"model.layers.{layer}.{name}": nn.Linear(num_in, num_out, bias=False)
        for layer in range(shape.layers)
        for name, num_in, num_out in _layer(shape)
    }
    nn.init.normal_(embedding.weight, std=BODY_STD)
    for linear in linears.values():
        nn.init.normal_(linear.weight, std=BODY_STD)
    head = nn.Linear(shape.hidden, shape.vocab, bias=False)
    nn.init.normal_(head.weight, std=BODY_STD)
    nn.init.normal_(head.weight, std=HEAD_STD)
    nn.init.normal_(embedding.weight, std=EMBEDDING_STD)
    found = {f"{name}.weight": module.weight.detach() for name, module in linears.items()}
    found["model.embed_tokens.weight"] = embedding.weight.detach()
    found["lm_head.weight"] = head.weight.detach()
    norms = [
        f"model.layers.{layer}.{name}_layernorm"
        for layer in range(shape.layers)
        for name in ("input", "post_attention")
    ]
    return found | {f"{name}.weight": torch.ones(shape.hidden) for name in (*norms, "model.norm")}


def _layer(shape: Shape) -> tuple[tuple[str, int, int], ...]:
    """Linears of one layer in the order in which they are built: name, inputs, outputs."""
    hidden, wide = shape.hidden, shape.intermediate
    query, kv = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return (
        ("self_attn.q_proj", hidden, query),
        ("self_attn.k_proj", hidden, kv),
        ("self_attn.v_proj", hidden, kv),
        ("self_attn.o_proj", query, hidden),
        ("mlp.gate_proj", hidden, wide),
        ("mlp.up_proj", hidden, wide),
        ("mlp.down_proj", wide, hidden),
    )


def checkpoint_config(shape: Shape) -> dict[str, Any]:
    """The model's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "initializer_range": BODY_STD,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def _write_tokenizer(folder: Path, shape: Shape) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B:1")
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocab,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    missing = shape.vocab - tokenizer.get_vocab_size()  # every id of the embedding gets a token
    tokenizer.add_tokens([f"<pad{i}>" for i in range(missing)])
    tokenizer.save(str(folder / "tokenizer.json"))
    unk, bos, eos = SPECIAL
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unk,
        "pad_token": eos,
        "model_max_length": shape.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", config)


def _corpus() -> Iterator[str]:
    """The standard library's sources, in pieces."""
    root, total = Path(sysconfig.get_paths()["stdlib"]), 0
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            text = path.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        total += len(text)
        yield from (text[i : i + CHUNK_CHARS] for i in range(0, len(text), CHUNK_CHARS))
        if total > CORPUS_CHARS:
            return


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
