"""Jump-forward: bytes that the grammar forces, as the tokens that a tokenizer would write.

Where only one text can follow, no model is needed to write it (the compressed automaton of SGLang,
Zheng et al. 2024, section 4). The bytes are cut into tokens so that the whole output stays
canonical, as far as this can be known before the rest is written:

    consumed ... "city"  :  "         forced bytes          unknown
                 [left context] + F = ","country":"        ...
                                      kept tokens  | held back: `":"` may become `":` `""`

The left context is re-encoded with the forced text and must come out unchanged. Tokens at the end
are held back from the first byte at which a token of the vocabulary, allowed by the grammar, would
reach into the unknown text. (Holding back only whole tokens that a longer one extends was not
enough: `":"` before an empty string is written `":` `""`; 15% of the runs were wrong.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from .vocabulary import Vocabulary

MAX_CONTEXT_TOKENS = 3  # a guess: pre-tokenizers look back no further than a word
MAX_FORCED_BYTES = 1024  # forced bytes beyond this follow in another run
MAX_CACHED_BYTES = 2**20  # per grammar
_ENTRY_BYTES, _TOKEN_BYTES = 500, 36  # of a cached run with its key and its place; of a token


class ForcedTokens:
    """The forced runs of one grammar, cached: shared by all its matchers.

    Invariant: what is cached takes about `num_bytes`, at most MAX_CACHED_BYTES.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._runs: dict[Hashable, tuple[int, ...]] = {}
        self._settled: dict[Hashable, int] = {}
        self.num_bytes = 0

    def after(
        self,
        consumed: Sequence[int],
        forced: bytes,
        place: Hashable,
        can_extend: Callable[[bytes], bool],
    ) -> tuple[int, ...]:
        """Tokens that write the beginning of `forced` after the consumed tokens.

        `can_extend(rest)` says whether a token longer than `rest`, beginning with it, may follow
        where the bytes `rest` end the forced ones. The result depends only on the last consumed
        tokens and on `place`, which stands for `forced` and `can_extend`.
        """
        context = tuple(consumed[-MAX_CONTEXT_TOKENS:])
        key = (place, context)
        run = self._runs.get(key)
        if run is None:
            run = self._tokenized(context, forced, self._settled_bytes(place, forced, can_extend))
            self._note(_ENTRY_BYTES + _TOKEN_BYTES * len(run) + len(forced))
            self._runs[key] = run
        return run

    def _note(self, num_bytes: int) -> None:
        """Make room: whoever comes again begins anew, which costs what it did the first time."""
        if self.num_bytes + num_bytes > MAX_CACHED_BYTES:
            self._runs.clear()
            self._settled.clear()
            self.num_bytes = 0
        self.num_bytes += num_bytes

    def _tokenized(self, context: tuple[int, ...], forced: bytes, settled: int) -> tuple[int, ...]:
        kept: list[int] = []
        position = 0
        for token in self._encoded(context, forced) if settled else ():
            data = self._vocabulary.token_bytes[token]
            position += len(data)
            if position > settled or not data or not forced.endswith(data, 0, position):
                break
            kept.append(token)
        return tuple(kept)

    def _settled_bytes(
        self, place: Hashable, forced: bytes, can_extend: Callable[[bytes], bool]
    ) -> int:
        """Number of forced bytes that no token extending beyond the forced bytes can reach."""
        settled = self._settled.get(place)
        if settled is None:
            first = max(0, len(forced) - self._vocabulary.max_token_bytes + 1)
            reached = (p for p in range(first, len(forced)) if can_extend(forced[p:]))
            settled = self._settled[place] = next(reached, len(forced))
        return settled

    def _encoded(self, context: tuple[int, ...], forced: bytes) -> Sequence[int]:
        """The forced bytes' tokens, after the longest context whose own tokens stay unchanged."""
        for num_left in range(len(context), -1, -1):
            left = context[len(context) - num_left :]
            written = b"".join([self._vocabulary.token_bytes[token] for token in left])
            text = whole_characters(written + forced)
            if text is None:
                continue
            encoded = tuple(self._vocabulary.encode(text))
            if encoded[:num_left] == left:
                return encoded[num_left:]
        return ()


def whole_characters(data: bytes) -> str | None:
    """The text without a character cut off at the end; None: it is not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        if error.reason != "unexpected end of data":
            return None
        return data[: error.start].decode()
