"""Small random encoders in Hugging Face layout, with real tokenizers, as the hub has them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = (
    "Nora has a red kite and flies it by the sea.",
    "Tom has a blue boat; it floats on the lake.",
    "It rains in the hills, and the river rises.",
    "Who has a red kite? Who has a boat?",
    "The kite is red, the boat is blue, the hills are green.",
)
_BERT_MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ROBERTA_MARKS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


def wordpiece(vocab_size: int = 120) -> Tokenizer:
    """BERT's: [CLS] a [SEP] b [SEP], of two types."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=[*_BERT_MARKS])
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    cls, sep = (tokenizer.token_to_id(mark) for mark in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", cls), ("[SEP]", sep)],
    )
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def unigram(vocab_size: int = 120) -> Tokenizer:
    """XLM-RoBERTa's: SentencePiece's unigrams, <s> a </s></s> b </s>."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size, special_tokens=[*_ROBERTA_MARKS], unk_token="<unk>"
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    begin, end = (tokenizer.token_to_id(mark) for mark in ("<s>", "</s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", begin), ("</s>", end)],
    )
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def byte_level(vocab_size: int = 330) -> Tokenizer:
    """ModernBERT's: byte pairs, with BERT's marks."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*_BERT_MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    cls, sep = (tokenizer.token_to_id(mark) for mark in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", cls), ("[SEP]", sep)],
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


_TOKENIZERS = {
    "Bert": wordpiece,
    "Roberta": unigram,
    "XLMRoberta": unigram,
    "Camembert": unigram,
    "ModernBert": byte_level,
    "JinaEmbeddingsV3": unigram,
    "DistilBert": wordpiece,
    "MPNet": unigram,
}


def make_encoder(
    folder: Path,
    architecture: str,
    *,
    seed: int = 0,
    init_std: float = 0.15,
    tokenizer: Tokenizer | None = None,
    **fields: Any,
) -> Path:
    """Write a float32 checkpoint with random weights, norms and biases too, and its tokenizer.

    `architecture`: a name in transformers. `fields` go to its config. Returns the folder.
    """
    import transformers

    family = next(name for name in sorted(_TOKENIZERS, key=len, reverse=True)
                  if architecture.startswith(name))  # fmt: skip
    tokenizer = tokenizer or _TOKENIZERS[family]()
    given = {
        "vocab_size": tokenizer.get_vocab_size() + 3,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 130,
        "pad_token_id": tokenizer.token_to_id("[PAD]") or tokenizer.token_to_id("<pad>") or 0,
        **fields,
    }
    if family == "DistilBert":  # of which its config makes no attribute
        given["hidden_dim"] = given.pop("intermediate_size")
    config = getattr(transformers, f"{family}Config")(**given)
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=init_std)
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() and name.endswith("weight"):
                parameter.add_(1.0)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def with_sentence_files(
    folder: Path,
    pooling: str = "cls_token",
    *,
    max_seq_length: int | None = None,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    dense: Sequence[int] = (),
) -> Path:
    """Add what sentence-transformers writes beside a checkpoint; `dense`: sizes of layers behind
    the pooling, of random weights."""
    hidden_size = json.loads((folder / "config.json").read_text())["hidden_size"]
    kinds = ["Transformer", "Pooling", *["Dense"] * len(dense), "Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "",
         "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules))
    modes = {f"pooling_mode_{mode}": mode == pooling for mode in ("cls_token", "mean_tokens")}
    config = {"word_embedding_dimension": hidden_size, **modes, f"pooling_mode_{pooling}": True}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    told = {"max_seq_length": max_seq_length, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(told))
    said = {"prompts": dict(prompts or {}), "default_prompt_name": default_prompt}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(said))
    for number, size in enumerate(dense):
        _write_dense(folder / f"{number + 2}_Dense", hidden_size, size)
        hidden_size = size
    return folder


def _write_dense(folder: Path, in_features: int, out_features: int) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"in_features": in_features, "out_features": out_features, "bias": True,
              "activation_function": "torch.nn.modules.activation.Tanh"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(in_features)
    weights = {
        "linear.weight": torch.randn(out_features, in_features, generator=generator) * 0.2,
        "linear.bias": torch.randn(out_features, generator=generator) * 0.2,
    }
    save_file(weights, folder / "model.safetensors")
