"""What one multiprocessor of each GPU holds, by compute capability, as the CUDA programming guide's
table of technical specifications says; kernels choose their tiles by it. No triton."""

from __future__ import annotations

from dataclasses import dataclass

REGISTERS = 65536
_REGISTER_UNIT = 256  # registers are given to a warp in this unit
_PARTITIONS = 4  # each with a quarter of the registers and the warps
_RESERVED_SHARED_BYTES = 1024  # of each block, for the system
HOPPER = 90


@dataclass(frozen=True, slots=True)
class Multiprocessor:
    """One of a GPU's; a block is a kernel's program."""

    capability: int  # 10 * major + minor
    gpus: str  # some that have it
    shared_bytes: int  # for all blocks
    max_warps: int = 64
    max_blocks: int = 32

    @property
    def block_shared_bytes(self) -> int:
        """The most that one block may have."""
        return self.shared_bytes - _RESERVED_SHARED_BYTES

    @property
    def is_small(self) -> bool:
        """Whether a block has 99 KB: tiles made for 160 and more must shrink."""
        return self.block_shared_bytes < 128 * 1024

    @property
    def has_tensor_memory(self) -> bool:
        """Whether sums of products lie in a memory of their own (tcgen05)."""
        return 100 <= self.capability < 120

    def blocks(self, registers: int, shared_bytes: int, num_warps: int) -> int:
        """Blocks of one kernel that it holds at once; registers: of a thread."""
        if shared_bytes > self.block_shared_bytes:
            return 0
        per_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
        of_partition = self.max_warps // _PARTITIONS
        if per_warp:
            of_partition = min(REGISTERS // _PARTITIONS // per_warp, of_partition)
        by_warps = of_partition * _PARTITIONS // num_warps
        by_shared = self.shared_bytes // (shared_bytes + _RESERVED_SHARED_BYTES)
        return min(by_warps, by_shared, self.max_blocks)


MULTIPROCESSORS = {
    one.capability: one
    for one in (
        Multiprocessor(80, "A100", 164 * 1024),
        Multiprocessor(86, "A10, RTX 3090", 100 * 1024, max_warps=48, max_blocks=16),
        Multiprocessor(89, "L4, L40, RTX 4090", 100 * 1024, max_warps=48, max_blocks=24),
        Multiprocessor(HOPPER, "H100, H200", 228 * 1024),
        Multiprocessor(100, "B200", 228 * 1024),
        Multiprocessor(120, "RTX 5090, RTX PRO 6000", 100 * 1024, max_warps=48, max_blocks=24),
    )
}


def of_capability(capability: int) -> Multiprocessor:
    """The newest that is no newer: what a later GPU of its kind holds at least, as a rule."""
    known = [number for number in MULTIPROCESSORS if number <= capability]
    return MULTIPROCESSORS[max(known, default=min(MULTIPROCESSORS))]
