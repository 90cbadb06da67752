"""The tokenizer of stemma-tiny: byte-level BPE of 4096 tokens, trained on generated samples.

Capitalised words and numbers do not absorb the space before them, so a name has the same tokens
in a sentence and in JSON; lower-case words do. Each digit is a token of its own. Since a newline
ends a piece and pieces never span a segment's border in these formats, tokenizing the segments
of a conversation alone or together gives the same tokens.
"""

from pathlib import Path

from generate import MIX, samples
from samples import BEGIN, END, MARKERS, PAD, Sample
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
SPECIAL = [PAD, BEGIN, END, *MARKERS.values(), *(f"<|reserved_{i}|>" for i in range(10))]
SPLIT = (
    r"\n| ?\p{Ll}+|\p{Lu}\p{Ll}+|\p{Lu}+(?!\p{Ll})|\p{Lu}|\p{N}| ?[^\s\p{L}\p{N}]+|[\p{L}\p{M}]+|\s"
)


def train_tokenizer(num_samples: int = 30_000, seed: int = 1) -> Tokenizer:
    """Train on the plain text of `num_samples` samples of the training mix."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=16,
        show_progress=False,
    )
    stream = samples(MIX, seed)
    texts = (
        segment.text
        for _ in range(num_samples)
        for segment in next(stream).segments
        if not segment.is_marker
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)]
    )
    return tokenizer


class Encoder:
    """Encodes samples segment by segment, as a runtime does; caches repeated segments."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.markers = {text: tokenizer.token_to_id(text) for text in SPECIAL}
        self._cache: dict[str, list[int]] = {}

    @classmethod
    def load(cls, path: Path) -> "Encoder":
        return cls(Tokenizer.from_file(str(path)))

    def encode(self, text: str) -> list[int]:
        """The tokens of plain text; no special token is ever added or parsed."""
        ids = self._cache.get(text)
        if ids is None:
            if len(self._cache) > 50_000:
                self._cache.clear()
            ids = self.tokenizer.encode(text, add_special_tokens=False).ids
            self._cache[text] = ids
        return ids

    def encode_sample(self, sample: Sample) -> tuple[list[int], list[float]]:
        """The tokens of a sample and the weight of each in the loss, 0 if it is not generated."""
        ids: list[int] = []
        weights: list[float] = []
        for segment in sample.segments:
            new = [self.markers[segment.text]] if segment.is_marker else self.encode(segment.text)
            ids += new
            weights += [segment.weight if segment.is_generated else 0.0] * len(new)
        return ids, weights

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


if __name__ == "__main__":
    train_tokenizer().save("tokenizer.json")
