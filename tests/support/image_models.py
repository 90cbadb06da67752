"""Small random checkpoints of models that read images, complete enough for a server, and images."""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import _byte_symbols, randomize

from stemma.runtime.images.image import Image

SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
END, IM_START, IM_END, VISION_START, VISION_END, IMAGE, VIDEO = range(256, 263)
VOCAB_SIZE = 272
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' or 'image' in c or 'image_url' in c %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
}  # fmt: skip
_TEXT = {
    "vocab_size": VOCAB_SIZE, "num_hidden_layers": 3, "intermediate_size": 96,
    "max_position_embeddings": 4096, "eos_token_id": IM_END, "bos_token_id": None,
}  # fmt: skip


@dataclass(frozen=True)
class ImageModel:
    """What `make_image_model` makes."""

    prefix: str  # of transformers' classes
    text: dict[str, Any]
    vision: dict[str, Any]
    is_tied: bool = False


MODELS = {
    "qwen2.5-vl": ImageModel(
        "Qwen2_5_VL",
        {
            "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3],
            },
        },
        {
            "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40,
            "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
        },
    ),
    "qwen2.5-vl-odd": ImageModel(
        "Qwen2_5_VL",
        {
            "hidden_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6, "mrope_section": [5, 1, 6],
            },
        },
        {
            "depth": 4, "hidden_size": 48, "num_heads": 4, "intermediate_size": 52,
            "patch_size": 6, "window_size": 36, "fullatt_block_indexes": [0, 3],
            "out_hidden_size": 48, "rope_parameters": {"rope_type": "axial", "rope_theta": 500.0},
        },
        is_tied=True,
    ),
    "qwen3-vl": ImageModel(
        "Qwen3VL",
        {
            "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
        },
        {
            "depth": 4, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40,
            "patch_size": 4, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2],
            "out_hidden_size": 64,
        },
    ),
    "qwen3-vl-moe": ImageModel(
        "Qwen3VLMoe",
        {
            "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20,
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
            "mlp_only_layers": [1],
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 2e4, "mrope_section": [4, 3, 3],
                "mrope_interleaved": True,
            },
        },
        {
            "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40,
            "patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1],
            "out_hidden_size": 48,
        },
    ),
    "qwen3-vl-odd": ImageModel(
        "Qwen3VL",
        {
            "hidden_size": 40, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 20,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 3e5, "mrope_section": [4, 2, 4],
                "mrope_interleaved": True,
            },
        },
        {
            "depth": 3, "hidden_size": 36, "num_heads": 3, "intermediate_size": 20,
            "patch_size": 6, "num_position_embeddings": 9, "deepstack_visual_indexes": [1],
            "out_hidden_size": 40,
        },
        is_tied=True,
    ),
}  # fmt: skip


def make_image_model(folder: Path, name: str = "qwen2.5-vl", seed: int = 0) -> Path:
    """Write a float32 checkpoint of a key of `MODELS` with random weights, its tokenizer of bytes,
    its chat template and its image processor. Returns the folder."""
    import transformers

    case = MODELS[name]
    config = getattr(transformers, f"{case.prefix}Config")(
        text_config={**_TEXT, **case.text, "tie_word_embeddings": case.is_tied},
        vision_config={"spatial_merge_size": 2, "temporal_patch_size": 2, **case.vision},
        tie_word_embeddings=case.is_tied,
        **TOKENS,
    )
    model = getattr(transformers, f"{case.prefix}ForConditionalGeneration")(config)
    randomize(model, seed, 0.2)
    model.save_pretrained(folder)
    if case.prefix == "Qwen3VLMoe":
        _turn_experts(folder / "model.safetensors")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END]}))
    _write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    patch = case.vision["patch_size"]
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "merge_size": 2,
        "temporal_patch_size": 2, "min_pixels": (2 * patch) ** 2 * 2,
        "max_pixels": (2 * patch) ** 2 * 48,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def _turn_experts(path: Path) -> None:
    """To the layout of the hub, which transformers reads too: [E, H, 2 I] and [E, I, H]."""
    from safetensors.torch import load_file, save_file

    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def png(height: int, width: int, seed: int = 0) -> bytes:
    """An image of noise."""
    from PIL import Image as Pillow

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    written = io.BytesIO()
    Pillow.fromarray(pixels).save(written, format="PNG")
    return written.getvalue()


def noise(name: str, rows: int, columns: int, token_id: int = -1) -> Image:
    """An image of random patches, of so many rows and columns of tokens."""
    vision = MODELS[name].vision
    size = 3 * 2 * vision["patch_size"] ** 2
    patches = np.random.default_rng(-token_id).normal(size=(4 * rows * columns, size))
    return Image(token_id, (2 * rows, 2 * columns), 2, b"", lambda _: patches.astype(np.float32))


def with_images(*parts: Sequence[int] | Image) -> array[int]:
    """Token ids, the images' between their marks."""
    ids = array("i")
    for part in parts:
        if isinstance(part, Image):
            ids.append(VISION_START)
            ids.extend([part.token_id] * part.num_tokens)
            ids.append(VISION_END)
        else:
            ids.extend(part)
    return ids


def hf_image_scores(
    folder: Path, tokens: Sequence[int], images: Sequence[Image], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """[len(tokens) - 1] log-probabilities of all tokens but the first, by transformers, which sees
    the template's stand-in at each of an image's tokens."""
    import transformers

    model = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    ids = torch.tensor([[IMAGE if token < 0 else token for token in tokens]])
    seen: dict[str, Any] = {}
    if images:
        seen = {
            "pixel_values": torch.cat([torch.from_numpy(i.patches()) for i in images]),
            "image_grid_thw": torch.tensor([[1, *image.grid] for image in images]),
            "mm_token_type_ids": (ids == IMAGE).int(),
        }
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, **seen).logits[0].double()
    found = logits.log_softmax(-1)
    return found[range(len(tokens) - 1), ids[0, 1:].tolist()]
