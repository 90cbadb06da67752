"""Devices' capabilities: memory, and the rates at which they read and multiply. Torch-free.

GPUs are from their makers' data sheets (dense rates, no sparsity), times the shares that good
kernels reach; the machine's own CPU is measured (`probe.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Shares of the data sheet's rates. Copying reaches 90% on an H200 (4.3 of 4.8 TB/s), products 80%
# (790 of 989 TFLOP/s); attention over pages and small products reach less.
_READ_SHARE = 0.8
_PRODUCT_SHARE = 0.6
_ATTENTION_SHARE = 0.4
_PCIE_GB_S = 32.0  # 16 lanes of the fourth generation, one way
_LINK_SHARE = 0.8
_ETHERNET_GB_S = 12.5  # 100 Gbit/s


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of linear layers in one weight format."""

    read_bytes_s: float  # of weights
    flop_s: float


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A device for the cost model. Seconds, bytes and floating-point operations."""

    name: str
    memory_bytes: int  # for weights and KV
    rates: Mapping[str, Rates]  # by `--quantization`
    kv_bytes_s: float
    attention_flop_s: float
    step_s: float  # of any step, besides its arithmetic: planning, launching, reading back
    layer_s: float  # of any layer
    row_s: float  # of a row that samples
    adapter_s: float  # of a linear layer's adapters, besides their arithmetic
    capability: tuple[int, int] | None = None  # as CUDA counts; None: not a GPU
    link_bytes_s: float = 0.0  # to other devices of the machine, one way; 0: not known
    sum_s: float = 0.0  # of a sum with them, besides its bytes


def _gpu(
    name: str,
    capability: tuple[int, int],
    memory_gb: int,
    read_tb_s: float,
    bf16_tflops: float,
    link_gb_s: float = _PCIE_GB_S,
) -> DeviceModel:
    read, flop = read_tb_s * 1e12 * _READ_SHARE, bf16_tflops * 1e12 * _PRODUCT_SHARE
    return DeviceModel(
        name=name,
        memory_bytes=int(memory_gb * 1e9),
        rates={
            "none": Rates(read, flop),
            "int8": Rates(read, flop),
            "w8a8": Rates(read, 2 * flop),
            "int4": Rates(read, flop),
            "mxfp4": Rates(read, flop),
        },
        kv_bytes_s=read,
        attention_flop_s=bf16_tflops * 1e12 * _ATTENTION_SHARE,
        # A guess: one graph launch, sampling and the copy back; the host plans meanwhile.
        step_s=150e-6,
        # Some nine kernels of 2 to 3 us each that neither read nor compute much (counted).
        layer_s=20e-6,
        row_s=1e-6,
        adapter_s=5e-6,  # two kernels a linear layer, counted
        capability=capability,
        link_bytes_s=link_gb_s * 1e9 * _LINK_SHARE,
        sum_s=10e-6 if link_gb_s > _PCIE_GB_S else 20e-6,  # a guess; 8 us is published for NVLink
    )


GPUS: Mapping[str, DeviceModel] = {
    "b200": _gpu("NVIDIA B200", (10, 0), 180, 8.0, 2250, 900),
    "h200": _gpu("NVIDIA H200", (9, 0), 141, 4.8, 989, 450),
    "h100": _gpu("NVIDIA H100 SXM", (9, 0), 80, 3.35, 989, 450),
    "a100": _gpu("NVIDIA A100 80 GB", (8, 0), 80, 2.04, 312, 300),
    "l40s": _gpu("NVIDIA L40S", (8, 9), 48, 0.864, 362),
    "l4": _gpu("NVIDIA L4", (8, 9), 24, 0.3, 121),
    "rtx4090": _gpu("NVIDIA RTX 4090", (8, 9), 24, 1.008, 165),
    "rtx3090": _gpu("NVIDIA RTX 3090", (8, 6), 24, 0.936, 71),
}
"""By the name for `stemma plan --device`."""


@dataclass(frozen=True, slots=True)
class Link:
    """From an engine to the others, one way."""

    name: str
    bytes_s: float
    delay_s: float  # of a message


def links_of(device: DeviceModel) -> Mapping[str, Link]:
    """By name, the fastest first: those over which an engine on such a device may send KV. Delays
    are guesses, and so is what two processes of a host send each other."""
    if device.capability is None:
        return {"host": Link("host", 2e9, 1e-3)}
    links = [
        Link("pcie", _PCIE_GB_S * 1e9 * _LINK_SHARE, 30e-6),
        Link("ethernet", _ETHERNET_GB_S * 1e9 * _LINK_SHARE, 100e-6),
    ]
    if device.link_bytes_s > links[0].bytes_s:
        links.insert(0, Link("nvlink", device.link_bytes_s, 20e-6))
    return {link.name: link for link in links}


def host_bytes_s(device: DeviceModel) -> float:
    """Of copies between the device's memory and the host's, one way; of a CPU within its own, which
    reads and writes each byte."""
    return device.kv_bytes_s / 2 if device.capability is None else _PCIE_GB_S * 1e9 * _LINK_SHARE
