"""Small random Hugging Face checkpoints for tests, complete enough for a whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

_MODEL_TYPES = {
    "llama": "Llama",
    "cwm": "Cwm",
    "arcee": "Arcee",
    "helium": "Helium",
    "seed_oss": "SeedOss",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "phi": "Phi",
    "phi3": "Phi3",
    "stablelm": "StableLm",
    "starcoder2": "Starcoder2",
    "exaone4": "Exaone4",
    "cohere": "Cohere",
    "cohere2": "Cohere2",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "granite": "Granite",
    "glm": "Glm",
    "glm4": "Glm4",
    "hunyuan": "HunYuanDenseV1",
    "ernie4_5": "Ernie4_5",
    "lfm2": "Lfm2",
}
_CONFIG_TYPES = {"gemma3": "Gemma3Text"}
BYTE_VOCAB_SIZE = 260  # 256 bytes and four special tokens
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>", "<unk>")
BOS_ID, EOS_ID = 256, 257


def make_checkpoint(
    folder: Path,
    architecture: str = "llama",
    *,
    vocab_size: int = BYTE_VOCAB_SIZE,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate_size: int = 128,
    max_position_embeddings: int = 512,
    tie_word_embeddings: bool = False,
    is_sharded: bool = False,
    seed: int = 0,
    init_std: float = 0.2,
    has_tokenizer: bool = True,
    **config_fields: Any,
) -> Path:
    """Write a float32 checkpoint of a key of `_MODEL_TYPES` with random weights.

    `init_std` is large enough for distinct logits; biases and norm weights are random too. Further
    keyword arguments go to the transformers config. Returns the folder.
    """
    import transformers

    prefix = _MODEL_TYPES[architecture]
    config = getattr(transformers, f"{_CONFIG_TYPES.get(architecture, prefix)}Config")(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=min(BOS_ID, vocab_size - 1),
        eos_token_id=min(EOS_ID, vocab_size - 1),
        pad_token_id=None,
        **({"head_dim": head_dim} if head_dim is not None else {}),
        **config_fields,
    )
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    randomize(model, seed, init_std)
    folder = Path(folder)
    size = "100KB" if is_sharded else "10GB"
    model.save_pretrained(folder, max_shard_size=size)
    if has_tokenizer:
        make_byte_tokenizer(folder)
    return folder


def make_byte_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json and tokenizer_config.json: token id = byte value, then SPECIAL_TOKENS.

    Any text round-trips; no merges, no BOS added.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token", "pad_token", "unk_token"), SPECIAL_TOKENS))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return folder


BACKTRACKS = "a" * 299 + "b"  # what makes a backtracking tokenizer panic


def make_backtracking(folder: Path) -> Path:
    """Give a checkpoint's tokenizer an expression over which its library panics, on BACKTRACKS."""
    from tokenizers import Regex, Tokenizer, pre_tokenizers

    path = str(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    hard = pre_tokenizers.Split(Regex(r"(a|a|a)+$"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([hard, tokenizer.pre_tokenizer])
    tokenizer.save(path)
    return folder


def make_long_token(folder: Path, num_chars: int) -> Path:
    """Give a checkpoint's tokenizer a token of so many characters, so that nobody can tell from a
    text's length that it fits no prompt."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"][-1]["content"] = "<" + "x" * (num_chars - 2) + ">"
    path.write_text(json.dumps(tokenizer))
    return folder


def _byte_symbols() -> list[str]:
    """The printable character that byte-level BPE uses for each byte (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable}
    symbols.update({byte: chr(256 + place) for place, byte in enumerate(others)})
    return [symbols[byte] for byte in range(256)]


_NORMS = ("norm.weight", *(f".norms.{head}.weight" for head in range(16)))


def randomize(model: torch.nn.Module, seed: int, init_std: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * init_std
            parameter.copy_(noise + 1.0 if name.endswith(_NORMS) else noise)
