"""The least a decode or encode can take: its FLOP at the rate of matrix products plus its bytes at that of copies.

Both rates are measured here, in the same run, with the vendor's own routines. FLOP are counted by sending meta tensors
through the reference modules (2 per multiply-add, attention included); bytes count every convolution reading its input
and writing its output once, everything else fused into them. The upsamplers are counted in their composed form where
that is fewer FLOP (DESIGN: 21 % of the decoder), because that is the least known.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ..layers import Upsample
from ..models.arch import Architecture
from .timing import copy_rate, matrix_rate

#: What the products of a precision are compared with; others (fp32, bf16, ...) with their own type.
MATRIX_TYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp16_fast": torch.float16,
    "fp8": torch.float8_e4m3fn, "int8": torch.int8,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Of one clip: FLOP as the published network is written, FLOP with composed upsamplers, values moved.

    `values` are activations read or written once each; times the bytes per value they are the traffic.
    """

    flop: float
    composed_flop: float
    values: float

    def seconds(self, flop_rate: float, byte_rate: float, value_bytes: int) -> float:
        """The floor, with rates in TFLOP/s and TB/s."""
        return self.composed_flop * 1e-12 / flop_rate + self.values * value_bytes * 1e-12 / byte_rate


@dataclass(frozen=True)
class Rates:
    """Measured ceilings: TFLOP/s of square products in `product` (a type's name), TB/s of a copy (read + written)."""

    product: str
    matrix: float
    copy: float


def work(architecture: Architecture, config: object, half: str, latents: int, height: int, width: int) -> Work:
    """Work of `half` ("decoder" or "encoder") for a clip of `latents` x `height` x `width` latent pixels."""
    with torch.device("meta"):
        network = architecture.build(config).requires_grad_(False)
        if half == "decoder":
            x = torch.empty(1, config.latent_channels, latents, height, width)
        else:
            frames = architecture.temporal * (latents - 1) + 1
            x = torch.empty(1, 3, frames, architecture.spatial * height, architecture.spatial * width)
    saved, values = [], []
    for module in network.modules():  # all of it: a half may use convolutions that belong to the network
        if isinstance(module, Upsample):
            module.register_forward_hook(lambda m, a, y: saved.append(_saved(m, a[0], y)))
        elif isinstance(module, (nn.Conv2d, nn.Conv3d)):
            module.register_forward_hook(lambda _, a, y: values.append(a[0].numel() + y.numel()))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        getattr(network, half)(x)
    flop = float(counter.get_total_flops())
    return Work(flop, flop - sum(f for f, _ in saved), sum(values) - sum(v for _, v in saved))


def _saved(module: Upsample, x: Tensor, y: Tensor) -> tuple[float, float]:
    """(FLOP, values) that composing expansion, shuffle and convolution into one kernel per phase saves.

    Each of the 4 z phases has 2x2x2 taps on the small input when time grows too (z = 2), 3x2x2 otherwise.
    """
    c, pixels = x.shape[1], x.numel() // x.shape[1]
    expand = 2.0 * pixels * c * 4 * module.z * c
    conv = 2.0 * 27 * c * y.numel()
    # y has one frame less than z times those of x in a clip's first call; its phases cost what they produce.
    composed = 2.0 * (8 if module.z == 2 else 12) * c * y.numel()
    inner = pixels * 4 * module.z * c + y.numel()  # the expansion's output, and the convolution's reading of it
    return expand + conv - composed, inner


def rates(device: torch.device, precision: str) -> Rates:
    """Measure both ceilings for a precision (one not in MATRIX_TYPES counts as fp16)."""
    dtype = MATRIX_TYPES.get(precision, torch.float16)
    name = str(dtype).removeprefix("torch.")
    if device.type == "cuda":
        with torch.cuda.device(device):
            return Rates(name, matrix_rate(device, dtype) or matrix_rate(device, torch.float16), copy_rate(device))
    if dtype.itemsize == 1:
        dtype, name = torch.float32, "float32"
    a, b = (torch.randn(512, 512, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(2**25, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Rates(name, 2 * 512**3 * 1e-12 / _median(lambda: a @ b),
                 2 * source.nbytes * 1e-12 / _median(lambda: target.copy_(source)))


def _median(call: Callable[[], object], runs: int = 5) -> float:
    times = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def value_bytes(precision: str) -> int:
    """Bytes of an activation in memory: 8-bit precisions keep the outputs of convolutions in 16 bits."""
    return 4 if precision == "fp32" else 2
