"""A byte-level `tokenizer.json`: each token's bytes, and a text's canonical tokens."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

END_OF_SEQUENCE = ("<|end|>", "</s>", "<|endoftext|>")


class TokenizerFile:
    """`token_bytes[i]` is None for special tokens, which are never in a grammar's text."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))
        self.tokenizer.encode_special_tokens = True
        self.size: int = self.tokenizer.get_vocab_size()
        added = self.tokenizer.get_added_tokens_decoder()
        self.texts = [self.tokenizer.id_to_token(i) or "" for i in range(self.size)]
        byte_of = _bytes_by_character()
        self.token_bytes: list[bytes | None] = [
            bytes(map(byte_of.__getitem__, text)) if i not in added else None
            for i, text in enumerate(self.texts)
        ]
        for i, token in added.items():
            if not token.special:
                self.token_bytes[i] = token.content.encode()

    @property
    def eos_id(self) -> int:
        """The special token that ends an output."""
        ends = (self.tokenizer.token_to_id(text) for text in END_OF_SEQUENCE)
        return next(i for i in ends if i is not None)

    def encode(self, text: str) -> list[int]:
        """Without special tokens. Raises UnicodeEncodeError for lone surrogates."""
        text.encode()
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def bytes_of(self, token_ids: list[int]) -> list[bytes]:
        """The bytes of each token; of special ones none."""
        return [self.token_bytes[i] or b"" for i in token_ids]


def _bytes_by_character() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable bytes map to themselves, others to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}
