"""An encoder: embeddings, a stack of layers that see the whole text, a vector for each token. The
config specifies the layers."""

from __future__ import annotations

from torch import Tensor

from .attention import Places, Rotary, SelfAttention, rotary_at
from .build import EncoderBuild
from .packed import PackedTexts
from .relative_bias import RelativeBias


class Encoder:
    """Immutable after construction; keeps nothing of a batch."""

    def __init__(self, build: EncoderBuild) -> None:
        config, names = build.config, build.config.names
        base = base_of(build)
        self._config, self._dtype = config, build.dtype
        self._gather = build.kernels.gather_rows
        size = config.hidden_size
        take = build.source.take
        self._tokens = take(f"{base}{names.tokens}.weight", (config.vocab_size, size))
        self._positions = self._types = None
        if names.positions is not None:
            shape = (config.num_position_rows, size)
            self._positions = take(f"{base}{names.positions}.weight", shape)
        if names.token_types is not None:
            shape = (config.num_token_types, size)
            self._types = take(f"{base}{names.token_types}.weight", shape)
        self._relative_bias = None
        if names.relative_bias is not None:
            shape = (config.num_relative_buckets, config.num_heads)
            self._relative_bias = RelativeBias(take(f"{base}{names.relative_bias}.weight", shape))
        self._norm = build.norm(f"{base}{names.embedding_norm}")
        self._layers = [
            EncoderLayer(build, f"{base}{names.layer.format(index)}", index)
            for index in range(config.num_layers)
        ]
        final = names.final_norm
        self._final_norm = None if final is None else build.norm(f"{base}{final}")
        for name in names.unread:
            build.source.skip(f"{base}{name}")
            build.source.skip(name)

    def forward(self, texts: PackedTexts) -> Tensor:
        """[T, hidden_size] in the model's dtype: the tokens' vectors."""
        x = self._norm(self._embedded(texts))
        rotaries: dict[float, Rotary] = {}
        biases: dict[int, Tensor] = {}
        if self._relative_bias is not None:
            biases = {n: self._relative_bias.of(n) for n in set(texts.lengths)}
        for index, layer in enumerate(self._layers):
            x = layer(x, texts, Places(self._rotary(texts, index, rotaries), biases))
        return x if self._final_norm is None else self._final_norm(x)

    def _embedded(self, texts: PackedTexts) -> Tensor:
        x = self._gather(self._tokens, texts.input_ids)
        if self._types is not None:
            last = len(self._types) - 1  # RoBERTa has one type: a pair's texts have it both
            x = x + self._gather(self._types, texts.token_types.clamp(max=last))
        if self._positions is not None:
            x = x + self._gather(self._positions, texts.positions)
        return x

    def _rotary(self, texts: PackedTexts, index: int, made: dict[float, Rotary]) -> Rotary | None:
        if not self._config.rope_thetas:
            return None
        theta = self._config.rope_thetas[index]
        if theta not in made:
            made[theta] = rotary_at(texts.positions, theta, self._config.head_dim, self._dtype)
        return made[theta]


class EncoderLayer:
    """Attention and a feed-forward block, each with its norm before or behind it."""

    def __init__(self, build: EncoderBuild, name: str, index: int) -> None:
        config, names = build.config, build.config.names
        self._is_normed_before = config.is_normed_before
        self._attention = SelfAttention(build, name, index)
        # ModernBERT's first layer takes the embedding's norm as its own.
        has_norm = index > 0 or not config.is_normed_before
        self._attention_norm = build.norm(f"{name}.{names.attention_norm}") if has_norm else None
        self._feed_forward = FeedForward(build, name)
        self._feed_forward_norm = build.norm(f"{name}.{names.feed_forward_norm}")

    def __call__(self, x: Tensor, texts: PackedTexts, places: Places) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        norm = self._attention_norm
        if self._is_normed_before:
            x = x + self._attention(x if norm is None else norm(x), texts, places)
            return x + self._feed_forward(self._feed_forward_norm(x))
        assert norm is not None
        x = norm(x + self._attention(x, texts, places))
        return self._feed_forward_norm(x + self._feed_forward(x))


class FeedForward:
    """down(activation(up(x))), with gates times what else `up` gives."""

    def __init__(self, build: EncoderBuild, layer: str) -> None:
        config, names = build.config, build.config.names
        hidden_size, size = config.hidden_size, config.intermediate_size
        has_bias = config.has_feed_forward_bias
        self._has_gates = config.has_gates
        width = 2 * size if config.has_gates else size
        self._up = build.linear([f"{layer}.{names.up}"], hidden_size, [width], has_bias=has_bias)
        self._down = build.linear([f"{layer}.{names.down}"], size, [hidden_size], has_bias=has_bias)
        self._activate = build.activation(config.activation)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        up = self._up(x)
        if not self._has_gates:
            return self._down(self._activate(up))
        activated, gate = up.chunk(2, dim=-1)
        return self._down(self._activate(activated.contiguous()) * gate)


def base_of(build: EncoderBuild) -> str:
    """What stands before the encoder's names in this checkpoint: a bare one has them without."""
    names = build.config.names
    return names.base if f"{names.base}{names.tokens}.weight" in build.source else ""
