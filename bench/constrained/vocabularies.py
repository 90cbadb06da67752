"""Vocabularies of realistic size, trained once on what a Python installation holds and then kept.

Byte-level BPE whose pre-tokeniser splits as cl100k's and Llama 3's do (digits in threes, a space
with the word after it, runs of punctuation), so that `":"` and `","` are tokens as in production.
The same installation gives the same vocabulary; another one gives one much like it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import InvalidRequest
from ...flags import count

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SIZES = (32_000, 128_000)
SPECIAL = ("<|begin|>", "<|end|>")
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SUFFIXES = frozenset(
    {".py", ".pyi", ".json", ".md", ".rst", ".txt", ".h", ".c", ".rs", ".html", ".js", ".hpp"}
)
CORPUS_CHARS = 48_000_000
FILE_CHARS = 400_000  # from one file at most
MAX_TOKEN_CHARS = 32


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `stemma bench vocabularies`."""
    parser.add_argument("--size", type=count, nargs="+", default=SIZES, metavar="N")


def run(args: argparse.Namespace) -> int:
    """Train missing vocabularies and print the paths of all."""
    for size in args.size:
        print(trained_vocabulary(size))
    return 0


def trained_vocabulary(size: int) -> Path:
    """The `tokenizer.json` of a vocabulary of `size` tokens; trains it first where it is missing.

    128,000 tokens take about 15 s on 2 cores. Raises InvalidRequest where this installation
    has too little text.
    """
    path = cache_folder() / f"bpe-{size}-{_recipe()}.json"
    if not path.exists():
        print(f"training a vocabulary of {size} tokens, once", file=sys.stderr, flush=True)
        tokenizer = _train(size)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        tokenizer.save(str(unfinished))
        unfinished.replace(path)
    return path


def cache_folder() -> Path:
    """Where trained vocabularies are stored."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "stemma" / "bench"


def _recipe() -> str:
    recipe = repr((PATTERN, SPECIAL, CORPUS_CHARS, FILE_CHARS, MAX_TOKEN_CHARS, sys.version))
    return hashlib.sha256(recipe.encode()).hexdigest()[:8]


def _train(size: int) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=MAX_TOKEN_CHARS,
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    if tokenizer.get_vocab_size() < size:
        found = f"at most {tokenizer.get_vocab_size()} with the text of this installation"
        raise InvalidRequest.of("size", size, found)
    return tokenizer


def _corpus() -> Iterator[str]:
    """Sources and documents of the standard library and of installed packages, shuffled."""
    paths = sysconfig.get_paths()
    roots = dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib"))
    files = {
        path: None
        for root in roots
        for path in sorted(root.rglob("*"))
        if path.suffix in SUFFIXES and path.is_file()
    }
    shuffled = list(files)
    random.Random(0).shuffle(shuffled)
    num_left = CORPUS_CHARS
    for path in shuffled:
        try:
            text = path.read_text("utf-8")[:FILE_CHARS]
        except (UnicodeDecodeError, OSError):
            continue
        num_left -= len(text)
        yield text
        if num_left <= 0:
            return
