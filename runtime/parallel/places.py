"""Who has which part of a model that several processes hold together, and what each of them is told
of it.

    stage 0    process 2 (rank 0)   process 3 (rank 1)     layers [0, k), divided between ranks
                   |  residual          |
    stage 1    process 0 (rank 0)   process 1 (rank 1)     layers [k, n): process 0 is the engine

Ranks of a stage meet in sums, and those that divide tokens in exchanges: of `--tp-size T` rank r
has the (r % T)-th part of each layer, and the (r // T)-th share of the tokens. Ranks of the same
number pass on the residual stream: on a CPU through memory that two of them share, else through
torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...frontend.client.progress import ByteProgress
from ..checkpoint.config.model_config import ModelConfig
from ..checkpoint.parts import Range
from ..execute.accelerator import require_devices
from ..execute.model_runner import ModelRunner, resolve_dtype
from ..models.layers.expert_placement import ONE_GROUP, ExpertGroups
from ..models.layers.ranks import Ranks
from ..models.layers.stage import Stage, config_of_stage
from .meeting import Groups, Joined, Meeting, OpenedMeeting
from .neighbours import (
    ChannelEnd,
    ChannelMessages,
    ChannelNeighbours,
    open_channel,
    slot_bytes,
)
from .stages import stages_of
from .torch_neighbours import TorchNeighbours

# Messages to the stage behind, beside those of steps in flight: one is read, one is written.
_SPARE_SLOTS = 2
# Room for KV on its way to the engine; memory that is never used takes none.
_KV_SLOTS, _KV_SLOT_BYTES = 64, 1 << 20


@dataclass(frozen=True, slots=True)
class Division:
    """Into how many parts a model is divided, and by what."""

    num_parts: int = 1  # each layer
    num_shares: int = 1  # a step's tokens and the KV
    expert_groups: ExpertGroups = ONE_GROUP  # see `Ranks`
    num_stages: int = 1  # the layers, one behind the other

    @property
    def num_ranks(self) -> int:
        """Of a stage."""
        return self.num_parts * self.num_shares

    @property
    def num_processes(self) -> int:
        return self.num_ranks * self.num_stages

    @property
    def groups(self) -> Sequence[Groups]:
        """Those of a stage that sum, and those that exchange what they have of the tokens."""
        return Groups(self.num_parts, step=1), Groups(self.num_shares, step=self.num_parts)


@dataclass(frozen=True, slots=True)
class Place:
    """A process's, among those that hold a model."""

    division: Division
    stage: int
    rank: int
    runs: Sequence[Range]  # the layers of each stage
    meeting: Meeting
    previous: ChannelEnd | None  # from the stage before, on a CPU
    behind: ChannelEnd | None  # to the one behind, on a CPU
    kv_previous: ChannelEnd | None  # the same of rank 0, for KV
    kv_behind: ChannelEnd | None
    model_folder: Path
    model_config: ModelConfig
    options: Mapping[str, Any]  # of `ModelRunner`

    @property
    def name(self) -> str:
        """For messages."""
        return f"rank {self.rank}" + f" of stage {self.stage}" * (self.division.num_stages > 1)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What its process must be given."""
        return (*self.meeting.descriptors, *sum((end.descriptors for end in self.ends), ()))

    @property
    def ends(self) -> list[ChannelEnd]:
        """Its ends of channels."""
        ends = (self.previous, self.behind, self.kv_previous, self.kv_behind)
        return [end for end in ends if end is not None]

    @property
    def part(self) -> Stage:
        """Its layers, as `ModelRunner` takes them."""
        count, first = self.division.num_stages, self.runs[self.stage][0]
        is_first, is_last = self.stage == 0, self.stage == count - 1
        return Stage(first, is_first, is_last, count, self.model_config, self.runs)

    @property
    def config(self) -> ModelConfig:
        """Of its layers."""
        if self.division.num_stages == 1:
            return self.model_config
        return config_of_stage(self.model_config, self.runs[self.stage])

    def take(self, joined: Joined | None = None, lost: int | None = None) -> Seat:
        """Join the others. joined: of who has opened the meeting; lost: see `ChannelNeighbours`."""
        joined = joined or self.meeting.join()
        division = self.division
        communicator, context = joined.communicators
        ranks = Ranks(
            self.rank % division.num_parts,
            division.num_parts,
            communicator,
            gathers_logits=self.options["device"] != "cpu",
            context=context,
            expert_groups=division.expert_groups,
        )
        messages = None
        if self.kv_previous is not None or self.kv_behind is not None:
            messages = ChannelMessages(self.kv_previous, self.kv_behind, lost)
        return Seat(self, joined, ranks, self._neighbours(joined, lost), messages)

    def _neighbours(
        self, joined: Joined, lost: int | None
    ) -> ChannelNeighbours | TorchNeighbours | None:
        division, device = self.division, self.options["device"]
        if division.num_stages == 1:
            return None
        size = self.model_config.hidden_size
        dtype = resolve_dtype(self.options["dtype"], device)
        if device == "cpu":
            return ChannelNeighbours(self.previous, self.behind, size, dtype, lost)
        assert joined.world is not None, "the stages meet"
        process, step = self.meeting.process, division.num_ranks  # the last stage's come first
        return TorchNeighbours(
            joined.world,
            None if self.part.is_first else process + step,
            None if self.part.is_last else process - step,
            row=torch.empty(
                (0, size), dtype=dtype, device=device if self.meeting.is_on_gpu else "cpu"
            ),
            max_sent=division.num_stages + _SPARE_SLOTS,
        )


class Seat:
    """A place that is taken: owns what its process exchanges through."""

    def __init__(
        self,
        place: Place,
        joined: Joined,
        ranks: Ranks,
        neighbours: ChannelNeighbours | TorchNeighbours | None,
        messages: ChannelMessages | None,
    ) -> None:
        self._messages = messages
        self._place = place
        self._joined = joined
        self._ranks = ranks
        self._neighbours = neighbours

    def runner(self, on_progress: ByteProgress | None = None) -> ModelRunner:
        """Of this process's part; returns when all ranks of the stage, and the stages before it,
        have loaded theirs. Raises as `ModelRunner` does."""
        place = self._place
        runner = ModelRunner(
            place.model_folder,
            place.config,
            ranks=self._ranks,
            stage=place.part,
            neighbours=self._neighbours,
            kv_messages=self._messages,
            on_progress=on_progress,
            **place.options,
        )
        self._ranks.least(0)
        return runner

    def check(self) -> None:
        """Raises RankLost after `abort`."""
        self._ranks.check()

    def abort(self) -> None:
        """Let the ranks of this stage give up that this one exchanges with; from any thread."""
        for each in self._ranks.communicators:
            each.abort()

    def close(self) -> None:
        """Nobody exchanges anything any more."""
        owned = (self._neighbours, self._messages, self._joined.world)
        for each in (*self._ranks.communicators, *owned):
            if each is not None:
                each.close()


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
        """options: of `ModelRunner`. Raises InvalidRequest for a model that cannot be divided, and
        where a process has no device."""
        device, num_stages = options["device"], division.num_stages
        if device != "cpu":
            require_devices(device, division.num_processes)
        layers = [(0, model_config.num_layers)]
        if num_stages > 1:
            layers = stages_of(model_config, num_stages)
        self._meeting = OpenedMeeting(
            division.groups,
            division.num_processes,
            device,
            needs_world=num_stages > 1 and device != "cpu",
        )
        channels: list[list[tuple[ChannelEnd, ChannelEnd]]] = []
        if device == "cpu":
            dtype = resolve_dtype(options["dtype"], device)
            room = slot_bytes(options["max_step_tokens"], model_config.hidden_size, dtype)
            channels = [
                [open_channel(num_stages + _SPARE_SLOTS, room) for _ in range(division.num_ranks)]
                for _ in range(num_stages - 1)
            ]
            for_kv = [open_channel(_KV_SLOTS, _KV_SLOT_BYTES) for _ in range(num_stages - 1)]
            channels = [[*each, kv] for each, kv in zip(channels, for_kv, strict=True)]
        places: list[Place] = []

        def ends(stage: int, channel: int) -> tuple[ChannelEnd | None, ChannelEnd | None]:
            """From the stage before, to the one behind."""
            previous = channels[stage - 1][channel][1] if channels and stage > 0 else None
            is_last = stage == num_stages - 1
            return previous, channels[stage][channel][0] if channels and not is_last else None

        for stage in reversed(range(num_stages)):
            for rank in range(division.num_ranks):
                process = len(places)
                places.append(
                    Place(
                        division,
                        stage,
                        rank,
                        layers,
                        self._meeting.of(process),
                        *ends(stage, rank),
                        *(ends(stage, -1) if rank == 0 else (None, None)),
                        model_folder,
                        model_config,
                        {**options, "device": _device_of(device, process)},
                    )
                )
        self.own, self.others = places[0], places[1:]

    def hand_over(self) -> None:
        """The others' processes have been started: close what is only theirs."""
        for place in self.others:
            for end in place.ends:
                end.close()
        self._meeting.hand_over()

    def take_own(self, are_alive: Callable[[], bool], lost: int) -> Seat:
        """The first place; lost: see `Place.take`. Raises RankLost where another process, of which
        `are_alive` knows, ends before it is here."""
        return self.own.take(self._meeting.join(are_alive), lost)


def _device_of(device: str, process: int) -> str:
    """GPUs of one machine, one after the other."""
    if device == "cpu":
        return device
    first = int(device.partition(":")[2] or 0)
    return f"cuda:{first + process}"
