"""Writes a checkpoint as a Hugging Face model folder that any Llama implementation can load.

    python export.py --checkpoint run/checkpoint.pt --out ../../runtime/assets/stemma-tiny

Of several checkpoints of one run, the mean (Wortsman et al., "Model soups", 2022).

The files are written beside their places and renamed, so a reader never sees half a model.
"""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from model import Config, Llama, hugging_face_state
from safetensors.torch import save_file
from samples import BEGIN, END, MARKERS, PAD
from tokenizer import SPECIAL, Encoder

# A tool is one line, as in `samples.told`: its name, its parameters, what it is for. That is a
# third of the tokens of its schema, and the same whatever else a framework writes into that.
TOOLS = (
    "{% set told %}Tools:{% for tool in tools %}{% set function = tool.function or tool %}"
    "{% set schema = function.parameters or {} %}{% set required = schema.required or [] %}"
    "{{ '\n' ~ function.name ~ '(' }}"
    "{% for name, value in (schema.properties or {}).items() %}"
    "{% set given = (value.anyOf or [value])[0] %}{% set kind = given.type or 'string' %}"
    "{% set kind = kind if kind is string else kind[0] %}"
    "{% set kind = given.enum | join('|') if given.enum else kind %}"
    "{{ ',' if not loop.first }}{{ name }}{{ '?' if name not in required }}"
    "{{ ':' ~ kind if kind != 'string' }}{% endfor %}{{ ')' }}"
    "{{ ' ' ~ function.description.strip().split('\n')[0][:200] if function.description }}"
    "{% endfor %}{% endset %}"
)
# A call in Hermes' form, as the model generates it.
CALL = (
    """{{ '<tool_call>\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}"""
    "{{ call.function.arguments | tojson(separators=(',', ':')) "
    "if call.function.arguments is mapping else call.function.arguments }}"
    "{{ '}\n</tool_call>' }}"
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% set told = '' %}"
    "{% if tools %}" + TOOLS + "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|system|>' + told + eos_token }}{% endif %}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|user|>' if loop.first or loop.previtem['role'] != 'tool' else '\n' }}"
    "{{ '<tool_response>\n' + message['content'] + '\n</tool_response>' }}"
    "{{ eos_token if loop.last or loop.nextitem['role'] != 'tool' }}"
    "{% elif message['tool_calls'] %}"
    "{{ '<|assistant|>' }}{{ message['content'] + '\n' if message['content'] }}"
    "{% for call in message['tool_calls'] %}{{ '\n' if not loop.first }}" + CALL + "{% endfor %}"
    "{{ eos_token }}"
    "{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{{ '\n\n' + told if tools and loop.first and message['role'] == 'system' }}"
    "{{ eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def export(checkpoints: Sequence[Path], out: Path) -> None:
    """Write the mean of the `checkpoints`' moving averages, and the tokenizer beside the first."""
    saved = [torch.load(path, map_location="cpu", weights_only=False) for path in checkpoints]
    averages = [each["average"] for each in saved]
    config = Config(**saved[0].get("config", {}))
    model = Llama(config)
    model.load_state_dict(
        {name: torch.stack([each[name] for each in averages]).mean(0) for name in averages[0]}
    )
    tokenizer = checkpoints[0].parent / "tokenizer.json"
    ids = Encoder.load(tokenizer).markers
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = Path(name)
        save_file(hugging_face_state(model), folder / "model.safetensors", {"format": "pt"})
        shutil.copy(tokenizer, folder / "tokenizer.json")
        for file, content in _json_files(config, ids).items():
            text = json.dumps(content, indent=2, ensure_ascii=False)
            (folder / file).write_text(text + "\n", encoding="utf-8")
        for path in folder.iterdir():
            path.chmod(0o644)
            os.replace(path, out / path.name)


def _json_files(config: Config, ids: dict[str, int]) -> dict[str, dict[str, object]]:
    """The configuration files: name -> content; `ids` maps special tokens to their numbers."""
    special = {"bos_token": BEGIN, "eos_token": END, "pad_token": PAD}
    ends = {"bos_token_id": ids[BEGIN], "eos_token_id": ids[END], "pad_token_id": ids[PAD]}
    return {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden,
            "intermediate_size": config.intermediate,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": config.max_position,
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "rope_scaling": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "use_cache": True,
            "torch_dtype": "bfloat16",
            **ends,
        },
        "generation_config.json": {**ends, "do_sample": False, "max_new_tokens": 256},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_position,
            "clean_up_tokenization_spaces": False,
            "add_bos_token": True,
            "chat_template": CHAT_TEMPLATE,
            "additional_special_tokens": [*MARKERS.values()],
            "added_tokens_decoder": {
                str(ids[text]): {"content": text, "special": True, "normalized": False,
                                 "lstrip": False, "rstrip": False, "single_word": False}
                for text in SPECIAL
            },
            **special,
        },
        "special_tokens_map.json": {
            **special,
            "additional_special_tokens": [*MARKERS.values()],
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    default = [Path("run/checkpoint.pt")]
    parser.add_argument(
        "--checkpoint", type=Path, nargs="+", default=default, help="one, or several to average"
    )
    parser.add_argument("--out", type=Path, default=Path("stemma-tiny"))
    args = parser.parse_args()
    export(args.checkpoint, args.out)
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{args.out}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
