"""Chats, tokenizers and templates in the manner of real ones, to render and to tokenize."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))
}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "What the weather is like",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "", "parameters": {"type": "object",
                                                                   "properties": {}}},
}  # fmt: skip


def call(name: str = "weather", call_id: str = "call12345", **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": call_id, "type": "function", "function": function}


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


HI = [said("user", "Hi"), said("assistant", "Hello there!")]
CALLED = [
    said("user", "How is the weather in Ulm?"),
    said("assistant", None, tool_calls=[call(city="Ulm", days=2)]),
    said("tool", '{"sky": "grey"}', tool_call_id="call12345", name="weather"),
]
CHATS: dict[str, list[dict[str, Any]]] = {
    "user": [said("user", "do it")],
    "system_user": [said("system", "Be brief."), said("user", "What is a tree?")],
    "turns": [*HI, said("user", "Who are you?")],
    "system_turns": [said("system", "Be brief."), *HI, said("user", "And now?")],
    "many_turns": [*HI * 6, said("user", "And now?")],
    "blanks": [
        said("system", "  Be brief.\n"),
        said("user", "\n\n  Hi \n"),
        said("assistant", " \nHello\n\n"),
        said("user", "\tdo  it  \n\n"),
    ],
    "empty": [said("system", ""), said("user", ""), said("assistant", ""), said("user", "")],
    "unicode": [said("user", "Grüße, 世界! 🙂 é"), said("assistant", "здравствуй"),
                said("user", "ﬁn\u00a0—\u2028x")],
    "thought": [
        said("user", "1+1?"),
        said("assistant", "<think>\nOne and one.\n</think>\n\n2"),
        said("user", "2+2?"),
    ],
    "reasoning": [
        said("user", "1+1?"),
        said("assistant", "2", reasoning_content="One and one."),
        said("user", "2+2?"),
    ],
    "half_thought": [said("user", "x"), said("assistant", "no</think>"), said("user", "y")],
    "called": CALLED,
    "called_and_said": [*CALLED, said("assistant", "It is grey."), said("user", "Thanks")],
    "said_and_called": [
        said("system", "Use tools."),
        said("user", "Weather?"),
        said("assistant", "Let me see.", tool_calls=[call(city="Köln")]),
        said("tool", "rain", tool_call_id="call12345", name="weather"),
    ],
    "two_calls": [
        said("user", "Weather, time?"),
        said("assistant", None, tool_calls=[call(city="Ulm"), call("clock", "call67890")]),
        said("tool", "rain", tool_call_id="call12345", name="weather"),
        said("tool", "noon", tool_call_id="call67890", name="clock"),
    ],
    "called_with_empty_text": [
        CALLED[0], said("assistant", "", tool_calls=[call(city="Ulm")]), CALLED[2],
    ],
    "parts": [said("user", parts("one")), said("assistant", parts("two")),
              said("user", parts(" three ", "four"))],
    "system_parts": [said("system", parts("Be brief.")), said("user", parts("Hi"))],
    "system_only": [said("system", "Be brief.")],
    "assistant_first": [said("assistant", "Welcome!"), said("user", "Hi")],
    "two_users": [said("user", "a"), said("user", "b")],
    "late_system": [said("user", "a"), said("system", "b"), said("user", "c")],
    "markup": [said("user", "<b>x</b> {{ y }} {% if z %} [/INST] <|x|>")],
    "long": [said("user", "A tree is a plant. " * 40), said("assistant", "Yes. " * 80),
             said("user", "Go on.")],
}  # fmt: skip
CONTINUED: dict[str, list[dict[str, Any]]] = {
    "prefill": [said("user", "Count"), said("assistant", "one, two,")],
    "prefill_blanks": [said("user", "Count"), said("assistant", " one, \n")],
    "prefill_thought": [said("user", "1+1?"), said("assistant", "<think>\nOne")],
    "prefill_turns": [*HI, said("user", "Count"), said("assistant", "one")],
}

TEXTS = [
    "do it [INST] do the thing [/INST] Hello there! How is the weather in Ulm? It is grey.",
    "A tree is a plant. Yes. You are a helpful assistant. What is a tree? Be brief. user system",
    '{"name": "weather", "arguments": {"city": "Ulm", "days": 2}} {"type": "function"}',
    "one, two, three, four\n\n\n<think>\nOne and one.\n</think>\n\n2 assistant\n tool_call </tool>",
] * 8
FEW = ["<unk>", "<s>", "</s>", "<pad>"]
MANY = [
    *FEW, "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>",
    "<|end|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|User|>", "<|Assistant|>", "<|start|>", "<|message|>",
    "<|channel|>", "<|start_of_role|>", "<|end_of_role|>", "<|END_OF_TURN_TOKEN|>",
    "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|endofturn|>", "[gMASK]",
]  # fmt: skip
KINDS = ("byte_level", "prepended", "metaspace_first", "metaspace_always", "unprefixed", "stripped")


def make_tokenizer(folder: Path, kind: str) -> int:
    """Write a small trained tokenizer of this kind; returns how many tokens it has."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=kind != "byte_level"))
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    if kind == "byte_level":
        split = Regex(r"\p{L}+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(split, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = BpeTrainer(vocab_size=700, initial_alphabet=letters, show_progress=False)
    else:
        trainer = BpeTrainer(vocab_size=900, special_tokens=alphabet, show_progress=False)
        blanks = normalizers.Replace(" ", "▁")
        if kind in ("prepended", "stripped"):
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), blanks])
        elif kind == "unprefixed":
            tokenizer.normalizer = blanks
        else:
            scheme = kind.removeprefix("metaspace_")
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    tokenizer.train_from_iterator(TEXTS, trainer)
    whole = json.loads(tokenizer.to_str())
    whole["added_tokens"] = []  # the bytes are ordinary tokens
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    strips = kind == "stripped"
    specials = FEW if kind == "metaspace_always" else MANY
    tokenizer.add_special_tokens(
        [AddedToken(text, rstrip=strips and text.startswith("<|"), normalized=False)
         for text in specials]
    )  # fmt: skip
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    if kind == "byte_level":
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "unk_token": "<unk>",
        "pad_token": {"__type": "AddedToken", "content": "<pad>", "special": True},
        "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return int(tokenizer.get_vocab_size(with_added_tokens=True))
