"""Run as a program: threads compute at once, as the engines of one process do.

Each must get what it gets alone. Prints how many results it compared.
"""

from __future__ import annotations

import sys
import threading

import torch
from torch import Tensor

from stemma.kernels.native.arena import Arena
from stemma.kernels.registry import select_kernels

CALLERS, ROUNDS = 3, 400


class Layer:
    """A norm, then a linear of a width that no other caller's has."""

    def __init__(self, caller: int) -> None:
        generator = torch.Generator().manual_seed(caller)
        kernels = select_kernels(torch.bfloat16)
        assert kernels.capture is not None
        self._capture = kernels.capture
        self.x = torch.randn((3 + caller, 64), generator=generator).bfloat16()
        self._norm = kernels.make_rms_norm(torch.ones(64).bfloat16(), 1e-5)
        weight = torch.randn((32 * (5 + 7 * caller), 64), generator=generator)
        self._linear = kernels.make_linear(weight.bfloat16(), None)

    def forward(self) -> Tensor:
        return self._linear(self._norm(self.x))

    def results(self, rounds: int) -> list[Tensor]:
        """Called, and recorded and replayed, a round each."""
        found = []
        for _ in range(rounds):
            recorded, recording = self._capture(self.forward, [])
            assert recording is not None
            found += [self.forward(), recorded.clone()]
            recording.replay([])
            found.append(recording.result.clone())
        return found


class Caller(threading.Thread):
    def __init__(self, number: int, arena: Arena, begin: threading.Barrier) -> None:
        super().__init__()
        self._number, self._arena, self._begin = number, arena, begin
        self.found: list[Tensor] = []
        self.pieces: list[Tensor] = []

    def run(self) -> None:
        self._begin.wait()
        layer = Layer(self._number)  # packed while the others' are
        self.pieces = [self._arena.take(1 + self._number) for _ in range(ROUNDS)]
        self._begin.wait()
        self.found = layer.results(ROUNDS)


def main() -> None:
    begin, arena = threading.Barrier(CALLERS), Arena()
    callers = [Caller(number, arena, begin) for number in range(CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for number, caller in enumerate(callers):
        alone = Layer(number).forward()
        assert all(torch.equal(each, alone) for each in caller.found), number
    starts = [piece.data_ptr() for caller in callers for piece in caller.pieces]
    assert len(set(starts)) == len(starts), "memory was given twice"
    print(sum(len(caller.found) for caller in callers))


if __name__ == "__main__":
    sys.setswitchinterval(1e-5)
    main()
