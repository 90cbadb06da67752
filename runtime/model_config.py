"""What a checkpoint folder says about its model: config.json and generation_config.json, checked.

Torch-free, so that the host half (tokenizer, scheduler, server) can read it too. Every problem is
a `ModelLoadError` that names the file, the field, what was expected and what was found.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ModelLoadError
from .config_fields import Fields
from .rope_scaling import RopeScaling, rope_theta_and_scaling

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder-only model and its default sampling.

    `num_heads % num_kv_heads == 0` and `head_dim` is even.
    """

    architecture: str  # one of SUPPORTED_ARCHITECTURES
    hidden_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # key/value heads, each shared by num_heads / num_kv_heads query heads
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: RopeScaling | None  # None: plain rotary frequencies
    rms_norm_eps: float
    tie_word_embeddings: bool  # the output projection is the embedding matrix
    qkv_bias: bool
    output_bias: bool  # bias of the attention's output projection
    mlp_bias: bool
    sliding_window: int | None  # tokens a query may look back, itself included; None: all
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    torch_dtype: str | None  # as stored, "bfloat16"; None where config.json does not say
    default_temperature: float | None  # None: the checkpoint has no opinion
    default_top_p: float | None
    default_top_k: int | None
    default_min_p: float | None
    default_repetition_penalty: float | None

    @property
    def context_length(self) -> int:
        """The longest sequence that is served exactly.

        A sliding window is not implemented as such: up to the window's length it equals full
        attention, so a model with one is limited to that length.
        """
        scaling = self.rope_scaling
        longest = self.max_position_embeddings if scaling is None else scaling.max_positions
        return longest if self.sliding_window is None else min(longest, self.sliding_window)

    @classmethod
    def from_folder(cls, path: str | Path) -> ModelConfig:
        """Read the folder's config.json and, where present, generation_config.json.

        Raises:
            ModelLoadError: a missing or malformed file or field, or an unsupported model.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ModelLoadError(f"model folder {folder} does not exist or is not a folder")
        config = Fields.read(folder / "config.json")
        generation_file = folder / "generation_config.json"
        generation = Fields.read(generation_file) if generation_file.exists() else None
        return _parse(config, generation or Fields(generation_file, {}))


def _parse(config: Fields, generation: Fields) -> ModelConfig:
    architecture = _architecture(config)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.fail("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    _require_silu(config)
    is_llama = architecture == "LlamaForCausalLM"
    attention_bias = is_llama and config.flag("attention_bias", False)
    max_positions = config.integer("max_position_embeddings", default=2048)
    rope_theta, rope_scaling = rope_theta_and_scaling(config, max_positions)
    bos_token_ids = generation.token_ids("bos_token_id") or config.token_ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, hidden_size, num_heads),
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=max_positions,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=is_llama and config.flag("mlp_bias", False),
        sliding_window=_sliding_window(config, architecture),
        eos_token_ids=generation.token_ids("eos_token_id") or config.token_ids("eos_token_id"),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        torch_dtype=_stored_dtype(config),
        default_temperature=_default_temperature(generation),
        default_top_p=_default_top_p(generation),
        default_top_k=_default_top_k(generation),
        default_min_p=_default_min_p(generation),
        default_repetition_penalty=_default_repetition_penalty(generation),
    )


def _architecture(config: Fields) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise config.fail("architectures", "a list with the architecture's name")
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    raise ModelLoadError(
        f"{config.file}: architecture {names[0]!r} is not supported; supported are: {supported}"
    )


def _head_dim(config: Fields, hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise config.fail("hidden_size", f"a multiple of num_attention_heads={num_heads}")
    head_dim = config.integer("head_dim", default=max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise config.fail("head_dim", "an even number, as rotary embeddings need")
    return head_dim


def _require_silu(config: Fields) -> None:
    if config.get("hidden_act") not in (None, "silu", "swish"):
        raise config.fail("hidden_act", "'silu'")


def _sliding_window(config: Fields, architecture: str) -> int | None:
    """The window in tokens, or None where the architecture or the checkpoint has none.

    Qwen2 checkpoints carry a `sliding_window` that counts only with `use_sliding_window`.
    """
    if architecture == "LlamaForCausalLM" or config.get("sliding_window") is None:
        return None
    if architecture == "Qwen2ForCausalLM" and not config.flag("use_sliding_window", False):
        return None
    return config.integer("sliding_window")


def _stored_dtype(config: Fields) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")
    return str(value) if value is not None else None


def _default_temperature(generation: Fields) -> float | None:
    if generation.get("do_sample") is False:
        return 0.0
    value = generation.get("temperature")
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or value < 0:
        raise generation.fail("temperature", "a number >= 0")
    return float(value)


def _default_top_p(generation: Fields) -> float | None:
    value = generation.get("top_p")
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
        raise generation.fail("top_p", "a number in (0, 1]")
    return float(value)


def _default_top_k(generation: Fields) -> int | None:
    """Hugging Face writes 0 for "off"."""
    value = generation.get("top_k")
    if value is None or value == 0:
        return None
    return generation.integer("top_k")


def _default_min_p(generation: Fields) -> float | None:
    value = generation.get("min_p")
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
        raise generation.fail("min_p", "a number in [0, 1]")
    return float(value)


def _default_repetition_penalty(generation: Fields) -> float | None:
    value = generation.get("repetition_penalty")
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 10:
        raise generation.fail("repetition_penalty", "a number in (0, 10]")
    return float(value)
