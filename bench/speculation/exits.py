"""Exits behind the layers of a model: learnt, held against its last layer, and taken.

An exit is an affine map from a layer's state to the last layer's, by ridge regression (a tuned
lens, Belrose et al. 2023, arXiv:2303.08112), which the model's own norm and output projection read,
and a logistic regression on the state of whether they read what they read of the last layer (the
trained confidence of CALM, Schuster et al. 2022, arXiv:2207.07061). What that learns from is
what maps made of one half of the states get right in the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...frontend.client.backend import Backend
from ...runtime.models.decoder import Decoder
from ...runtime.models.forward_batch import ForwardBatch
from ...training.making import record
from ...training.target import Target

if TYPE_CHECKING:
    from ...runtime.loaded_model import LoadedModel

_RIDGE = 1e-2  # of the mean square of a state's numbers
_DECAY = 1e-3  # of a confidence's weights
_BLOCK = 256  # tokens at most, which are in one half of the states
_CHUNK = 256  # tokens whose logits are there at a time


@dataclass(frozen=True, slots=True)
class Exit:
    """Behind a layer: what its state is read as, and how sure that is."""

    weight: Tensor  # [hidden_size, hidden_size] float32, of the map
    bias: Tensor  # [hidden_size] float32
    sure_weight: Tensor  # [hidden_size] float32, of the confidence
    sure_bias: Tensor  # [1] float32

    def read(self, state: Tensor) -> Tensor:
        """[T, hidden_size] -> the same in place of the last layer's."""
        return (state.float() @ self.weight + self.bias).to(state.dtype)

    def confidence(self, state: Tensor) -> Tensor:
        """[T, hidden_size] -> [T] in [0, 1]"""
        return torch.sigmoid(_scaled(state) @ self.sure_weight + self.sure_bias)


class ExitingDecoder(Decoder):
    """A decoder of which a token that is computed alone may stop early; without exits it computes
    what the decoder does.

    The layers behind a token's last one keep its state and compute its keys and values alone, so
    that its KV is there, as CALM's is.
    """

    def __init__(self, model: Decoder, exits: Sequence[Exit] = (), sure: float = 1.0) -> None:
        """exits: of the first layers, one each; sure: the confidence from which a token stops."""
        self.__dict__.update(model.__dict__)
        self._exits, self._sure = exits, sure
        self.kept: list[Tensor] | None = None  # if a list: of each pass the states behind layers
        self.num_layers: list[int] = []  # that each token computed alone has had

    def forward(self, input_ids: Tensor, positions: Tensor, batch: ForwardBatch) -> Tensor:
        """See `Decoder.forward`."""
        state = self._vocab.embed(input_ids)
        stopped: Exit | None = None
        states = []
        for index, (layer, rotary) in enumerate(zip(self._layers, self._rotary.at(positions))):
            stream = state.clone()
            # NOTE: measured is what becomes of a text, not time: the whole layer is computed.
            output = layer(None, stream, rotary, batch)
            if stopped is None:
                self._add(stream, output)
                state = stream
                states.append(state)
                stopped = self._stopping(index, state)
        if len(state) == 1:
            self.num_layers.append(len(states))
        if self.kept is not None:
            self.kept.append(torch.stack(states))
        return self.normed(state if stopped is None else stopped.read(state))

    def _stopping(self, index: int, state: Tensor) -> Exit | None:
        if len(state) > 1 or index >= len(self._exits):
            return None
        found = self._exits[index]
        return found if found.confidence(state).item() >= self._sure else None

    def normed(self, state: Tensor) -> Tensor:
        """By the model's last norm."""
        assert self._norm is not None, "it has all layers"
        return self._norm(state)

    def likeliest(self, state: Tensor) -> Tensor:
        """[N, hidden_size] -> [N] token ids, by the norm and the output projection."""
        found = [
            self.compute_logits(self.normed(state[start : start + _CHUNK])).argmax(-1)
            for start in range(0, len(state), _CHUNK)
        ]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class States:
    """Of the tokens behind which a model drew one."""

    model: ExitingDecoder
    behind: Tensor  # [num_layers, N, hidden_size] in the model's dtype
    tokens: Tensor  # [N] the likeliest by the last layer

    def agreement(self, read: Tensor, of: Tensor | slice = slice(None)) -> Tensor:
        """[M, hidden_size] in place of the last layer's of these tokens (of all) -> [M] bool"""
        return self.model.likeliest(read) == self.tokens[of]


@torch.no_grad()
def states_of(loaded: LoadedModel, run: Callable[[Backend], None]) -> States:
    """In the programs that `run` runs. The engine must not be used behind it."""
    programs = record(loaded, run, "conversations", "conversations")
    loaded.runner.model = model = exiting(loaded)
    target, found = Target(loaded.runner), []
    for text in (text for texts in programs for text in texts):
        model.kept = []
        target.hidden(text.token_ids)
        before = torch.tensor(text.is_guessed).nonzero().flatten() - 1
        found.append(torch.cat(model.kept, 1)[:, before])
    model.kept = None
    behind = torch.cat(found, 1)
    return States(model, behind, model.likeliest(behind[-1]))


def exiting(loaded: LoadedModel, exits: Sequence[Exit] = (), sure: float = 1.0) -> ExitingDecoder:
    """The model with exits."""
    assert isinstance(loaded.runner.model, Decoder), "its layers are alike"
    return ExitingDecoder(loaded.runner.model, exits, sure)


def learnt(states: States) -> list[Exit]:
    """Of each layer but the last."""
    last = states.behind[-1]
    num_tokens = len(states.tokens)
    is_one = torch.arange(num_tokens) // max(1, min(_BLOCK, num_tokens // 2)) % 2 == 0
    found = []
    for state in states.behind[:-1]:
        is_right = torch.zeros(len(state))
        for mine in (is_one, ~is_one):
            weight, bias = _ridge(state[mine], last[mine])
            read = (state[~mine].float() @ weight + bias).to(state.dtype)
            is_right[~mine] = states.agreement(read, ~mine).float()
        found.append(Exit(*_ridge(state, last), *_logistic(_scaled(state), is_right)))
    return found


@torch.no_grad()
def _ridge(state: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """The affine map from one to the other, of the least square error with a ridge."""
    x, y = state.float(), last.float()
    x_mean, y_mean = x.mean(0), y.mean(0)
    x, y = x - x_mean, y - y_mean
    ridge = _RIDGE * len(x) * x.square().mean() * torch.eye(x.shape[1])
    weight = torch.linalg.solve(x.T @ x + ridge, x.T @ y)
    return weight, y_mean - x_mean @ weight


def _logistic(x: Tensor, is_right: Tensor) -> tuple[Tensor, Tensor]:
    """Weights and bias of the probability that it is right."""
    weight = torch.zeros(x.shape[1], requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        found = F.binary_cross_entropy_with_logits(x @ weight + bias, is_right)
        found = found + _DECAY * weight.square().sum()
        found.backward()  # type: ignore[no-untyped-call]
        return found

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weight.detach(), bias.detach()


def _scaled(state: Tensor) -> Tensor:
    return F.rms_norm(state.float(), state.shape[-1:], eps=1e-6)


@torch.no_grad()
def layer_rows(
    states: States, exits: Sequence[Exit], sure: Sequence[float]
) -> list[dict[str, Any]]:
    """What each layer knows, the last too."""
    rows = []
    for index, state in enumerate(states.behind):
        is_right = seen = states.agreement(state)
        confidence = torch.ones(len(state))
        if index < len(exits):
            is_right = states.agreement(exits[index].read(state))
            confidence = exits[index].confidence(state)
        row: dict[str, Any] = {"layer": index + 1, "lens": _mean(seen), "exit": _mean(is_right)}
        for threshold in sure:
            is_sure = confidence >= threshold
            row[f"sure {threshold:g}"] = _mean(is_sure)
            row[f"right {threshold:g}"] = _mean(is_right[is_sure])
        rows.append(row)
    return rows


def _mean(x: Tensor) -> float:
    return x.float().mean().item() if len(x) else 1.0
