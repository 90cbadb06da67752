"""Who has which part of a model that several processes hold together, and what each of them is told
of it.

    stage 0    process 2 (rank 0)   process 3 (rank 1)     layers [0, k), divided between ranks
                   |  residual          |
    stage 1    process 0 (rank 0)   process 1 (rank 1)     layers [k, n): process 0 is the engine

Ranks of a stage meet in sums; those of the same number pass on the residual stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...frontend.client.progress import ByteProgress
from ...kernels.ops import Communicator
from ..checkpoint.config.model_config import ModelConfig
from ..checkpoint.parts import Range
from ..execute.model_runner import ModelRunner, resolve_dtype
from ..models.layers.expert_placement import ONE_GROUP, ExpertGroups
from ..models.layers.ranks import ALONE, Ranks
from ..models.layers.stage import Stage, config_of_stage
from .meeting import Meeting, OpenedMeeting
from .neighbours import ChannelEnd, ChannelNeighbours, open_channel, slot_bytes
from .stages import stages_of

_SPARE_SLOTS = 2  # of a channel, beside those in flight: one that is read, one that is written


@dataclass(frozen=True, slots=True)
class Division:
    """Into how many parts a model is divided, and by what."""

    num_ranks: int = 1  # each layer, or tokens and KV
    expert_groups: ExpertGroups = ONE_GROUP  # of ranks, see `Ranks`
    divides_tokens: bool = False  # rather than each layer, see `Ranks`
    num_stages: int = 1  # the layers, one behind the other

    @property
    def num_processes(self) -> int:
        return self.num_ranks * self.num_stages


@dataclass(frozen=True, slots=True)
class Place:
    """A process's, among those that hold a model."""

    division: Division
    stage: int
    rank: int
    layers: Range
    meeting: Meeting | None  # with the other ranks of its stage; None: there are none
    previous: ChannelEnd | None  # from the stage before
    behind: ChannelEnd | None  # to the one behind
    model_folder: Path
    model_config: ModelConfig  # of the stage's layers
    options: Mapping[str, Any]  # of `ModelRunner`

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank}" + f" of stage {self.stage}" * (self.division.num_stages > 1)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What its process must be given."""
        ends = [end.descriptors for end in (self.previous, self.behind) if end is not None]
        return (*(() if self.meeting is None else self.meeting.descriptors), *sum(ends, ()))

    def take(self, communicator: Communicator | None = None, lost: int | None = None) -> Seat:
        """Join the others. communicator: of who has opened the meeting; lost: see
        `ChannelNeighbours`."""
        if communicator is None and self.meeting is not None:
            communicator = self.meeting.join(self.rank)
        division = self.division
        ranks = ALONE
        if communicator is not None:
            ranks = Ranks(
                self.rank,
                division.num_ranks,
                communicator,
                gathers_logits=self.options["device"] != "cpu",
                expert_groups=division.expert_groups,
                divides_tokens=division.divides_tokens,
            )
        neighbours = None
        if division.num_stages > 1:
            neighbours = ChannelNeighbours(
                self.previous,
                self.behind,
                self.model_config.hidden_size,
                resolve_dtype(self.options["dtype"], self.options["device"]),
                lost,
            )
        return Seat(self, ranks, neighbours)


class Seat:
    """A place that is taken: owns what its process exchanges through."""

    def __init__(self, place: Place, ranks: Ranks, neighbours: ChannelNeighbours | None) -> None:
        self._place = place
        self._ranks = ranks
        self._neighbours = neighbours

    def runner(self, on_progress: ByteProgress | None = None) -> ModelRunner:
        """Of this process's part; returns when all ranks of the stage, and the stages before it,
        have loaded theirs. Raises as `ModelRunner` does."""
        place = self._place
        first, _ = place.layers
        runner = ModelRunner(
            place.model_folder,
            place.model_config,
            ranks=self._ranks,
            stage=Stage(first, place.previous is None, place.behind is None),
            neighbours=self._neighbours,
            on_progress=on_progress,
            **place.options,
        )
        if self._ranks.communicator is not None:
            self._ranks.communicator.all_gather(np.zeros(1))
        return runner

    def check(self) -> None:
        """Raises RankLost after `abort`."""
        self._ranks.check()

    def abort(self) -> None:
        """Let the ranks of this stage give up; from any thread."""
        if self._ranks.communicator is not None:
            self._ranks.communicator.abort()

    def close(self) -> None:
        """Nobody exchanges anything any more."""
        if self._ranks.communicator is not None:
            self._ranks.communicator.close()
        if self._neighbours is not None:
            self._neighbours.close()


class OpenedPlaces:
    """All places of a model, made by the process that is to be the first. Owns what the others are
    given until `hand_over`."""

    def __init__(
        self,
        division: Division,
        model_folder: Path,
        model_config: ModelConfig,
        options: Mapping[str, Any],
    ) -> None:
        """options: of `ModelRunner`. Raises InvalidRequest for a model that cannot be divided."""
        device, num_stages = options["device"], division.num_stages
        layers = [(0, model_config.num_layers)]
        if num_stages > 1:
            layers = stages_of(model_config, num_stages)
        self._meetings = [
            OpenedMeeting(division.num_ranks, device) if division.num_ranks > 1 else None
            for _ in range(num_stages)
        ]
        size = model_config.hidden_size
        room = slot_bytes(options["max_step_tokens"], size, resolve_dtype(options["dtype"], device))
        channels = [
            [open_channel(num_stages + _SPARE_SLOTS, room) for _ in range(division.num_ranks)]
            for _ in range(num_stages - 1)
        ]
        places = []
        for stage in reversed(range(num_stages)):
            meeting = self._meetings[stage]
            config = model_config
            if num_stages > 1:
                config = config_of_stage(model_config, layers[stage])
            for rank in range(division.num_ranks):
                places.append(
                    Place(
                        division,
                        stage,
                        rank,
                        layers[stage],
                        None if meeting is None else meeting.meeting,
                        channels[stage - 1][rank][1] if stage > 0 else None,
                        channels[stage][rank][0] if stage < num_stages - 1 else None,
                        model_folder,
                        config,
                        {**options, "device": _device_of(device, rank)},
                    )
                )
        self.own, self.others = places[0], places[1:]

    def hand_over(self) -> None:
        """The others' processes have been started: close what is only theirs."""
        for place in self.others:
            for end in (place.previous, place.behind):
                if end is not None:
                    end.close()
        for meeting in self._meetings[:-1]:
            if meeting is not None:
                meeting.hand_over()

    def take_own(self, are_alive: Callable[[], bool], lost: int) -> Seat:
        """The first place; lost: see `Place.take`. Raises RankLost where another process, of which
        `are_alive` knows, ends before it is here."""
        meeting = self._meetings[-1]
        return self.own.take(None if meeting is None else meeting.communicator(are_alive), lost)


def _device_of(device: str, rank: int) -> str:
    """GPUs of one machine, one after the other."""
    if device == "cpu":
        return device
    first = int(device.partition(":")[2] or 0)
    return f"cuda:{first + rank}"
