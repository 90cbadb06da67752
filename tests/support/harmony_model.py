"""A small random gpt-oss with a byte tokenizer that has harmony's special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from chats import TEMPLATES
from checkpoints import BYTE_VOCAB_SIZE
from mixtures import make_mixture, pack_experts

from stemma.frontend.chat_format.harmony_reader import FINAL_TOKENS, MARKS

TOKENS = {text: BYTE_VOCAB_SIZE + i for i, text in enumerate((*MARKS, *FINAL_TOKENS))}


def make_harmony_model(folder: Path, **fields: Any) -> Path:
    """Experts in MXFP4. Neither file names the tokens that end an answer as such."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 4096}
    make_mixture(
        folder,
        "GptOss",
        vocab_size=BYTE_VOCAB_SIZE + len(TOKENS),
        has_tokenizer=True,
        **{**sizes, **fields},
    )
    pack_experts(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = tokenizer["added_tokens"]
    added += [
        {**added[-1], "id": i, "content": text, "special": True} for text, i in TOKENS.items()
    ]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATES["harmony"])
    return folder
