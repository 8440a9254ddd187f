"""Benchmark of the operators, by shape and type: median time, rate, share of the measured ceiling, and peers.

16-bit types and int8 are compared with cuBLAS in the same type, fp8 with `_scaled_mm` (fast accumulation), passes over
memory with a copy. The ceiling is measured anew with each case: a GPU at its power limit slows by a tenth and more
within a run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.attention import attention
from ...kernels.conv3d import Epilogue, conv3d, pack_weight
from ...kernels.norm_act import Norm, Store, coefficients, norm_act, statistics
from ...kernels.prebuilt.errors import PrebuiltError
from ...kernels.targets import FP8, target
from ...kernels.to_pixels import UNIT, columns_weight, to_pixels
from ...kernels.upsample import pack, upsample
from . import winograd
from .ratio.text import RatioError
from .rows import HEADER, Meter, Row
from .timing import copy_rate, matrix_rate

# D_out x H x W, C -> K: the decoder's resolutions at 720p.
CONVS = ((4, 720, 1280, 128, 128), (4, 720, 1280, 256, 256), (4, 360, 640, 512, 512), (2, 180, 320, 512, 512),
         (1, 90, 160, 512, 512))  # fmt: skip
# The same with Wan's widths, as compared in the form of other generations.
FORM_CONVS = (*CONVS[:4], (1, 720, 1280, 96, 96), (2, 360, 640, 192, 192))
NORMS = ((4, 720, 1280, 128), (4, 360, 640, 512))
UPSAMPLES = ((2, 180, 320, 512, True), (4, 360, 640, 256, False))
ATTENTIONS = ((14400, 512), (32400, 512), (14400, 384), (14400, 1024))


class Bench(Meter):
    """All cases of every operator; the failure of a peer becomes a row and does not end the run.

    convs: shapes of convolutions, D_out x H x W, C -> K."""

    def __init__(self, device: torch.device, convs: Sequence[tuple[int, int, int, int, int]] = CONVS) -> None:
        super().__init__(device)
        self.convs = convs

    def conv(self, shape: tuple[int, int, int, int, int], dtype: torch.dtype, peers: bool = True) -> Iterator[Row]:
        """Measure a 3x3x3 convolution. shape: D_out, H, W, C, K; peers: measure cuDNN and comfy-kitchen, too."""
        d, h, w, c, k = shape
        name = f"{d}x{h}x{w} {c}->{k}"
        self.ceiling = matrix_rate(self.device, dtype)
        work = 2.0 * 27 * c * k * d * h * w
        x = torch.zeros(d + 2, h + 2, w + 2, c, dtype=dtype, device=self.device)
        x[:, 1:-1, 1:-1] = self.random(d + 2, h, w, c, dtype=dtype)
        weight = pack_weight(torch.randn(k, c, 3, 3, 3, device=self.device) * (27 * c) ** -0.5, dtype)
        kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float16
        out, residual = (self.random(d, h, w, k, dtype=kind) for _ in range(2))
        bias = torch.randn(k, device=self.device)
        scale = 1.0 if dtype.itemsize == 2 else 0.02
        plain, full = Epilogue(bias=bias, scale=scale), Epilogue(bias=bias, scale=scale, residual=residual, groups=32)
        here = target(self.device)
        yield self.flops("conv3d bias", name, dtype, "this pack", work, lambda: conv3d(x, weight, out, epilogue=plain))
        yield self.flops("conv3d bias+res+stats", name, dtype, "this pack", work,
                         lambda: conv3d(x, weight, out, epilogue=full))
        if here.accumulate(dtype, True) != here.accumulate(dtype, False):
            fast = replace(full, half_accumulate=True)
            yield self.flops("conv3d bias+res+stats", name, dtype, "this pack, fp16 sums", work,
                             lambda: conv3d(x, weight, out, epilogue=fast))
        if not peers or dtype.itemsize == 1:
            return
        nd = x[:, 1:-1, 1:-1].permute(3, 0, 1, 2)[None].contiguous()
        raw = weight.data.view(k, 3, 3, 3, c).permute(0, 4, 1, 2, 3).contiguous()
        low = bias.to(dtype)
        for layout, fmt in (("NCDHW", torch.contiguous_format), ("NDHWC", torch.channels_last_3d)):
            a, b = nd.contiguous(memory_format=fmt), raw.contiguous(memory_format=fmt)
            r = residual.permute(3, 0, 1, 2)[None].contiguous(memory_format=fmt)
            for label, call in (
                ("conv3d bias", lambda a=a, b=b: F.conv3d(a, b, low, padding=(0, 1, 1))),
                ("conv3d bias+res+stats", lambda a=a, b=b, r=r: _eager_epilogue(a, b, low, r)),
            ):
                yield self.flops(label, name, dtype, f"cuDNN {layout}", work, call)
        kitchen = _kitchen("fp16_conv3d")
        if kitchen is not None and dtype == torch.float16:  # its products are summed in fp16, it makes no statistics
            low, r = low.half(), residual.permute(3, 0, 1, 2)[None]
            a, b = x.permute(3, 0, 1, 2)[None], raw.contiguous(memory_format=torch.channels_last_3d)
            yield self.flops("conv3d bias+res", name, dtype, "comfy-kitchen, fp16 sums", work,
                             lambda: kitchen.fp16_conv3d(a, b, low, r))

    def norm_act(self, d: int, h: int, w: int, c: int, stored: torch.dtype) -> Iterator[Row]:
        """Measure a group norm with activation of [d, h, w, c] in fp16, its statistics and coefficients.

        stored: type of the result."""
        self.ceiling = copy_rate(self.device)
        x = self.random(d, h, w, c)
        buffer = torch.empty(d + 2, h + 2, w + 2, c, dtype=stored, device=self.device)
        norm = Norm(weight=torch.randn(c, device=self.device), bias=torch.randn(c, device=self.device))
        sums = statistics(x, 32)
        coefs = coefficients(sums, norm, h * w)
        name, store = f"{d}x{h}x{w} {c}", Store(scale=0.05 if stored.itemsize == 1 else 1.0)
        moved = x.nbytes + x.numel() * stored.itemsize
        yield self.bytes("norm_act", name, stored, "this pack", moved,
                         lambda: norm_act(x, norm, buffer, store=store, coefs=coefs))
        yield self.bytes("statistics", name, stored, "this pack", x.nbytes, lambda: statistics(x, 32))
        yield self.bytes("coefficients", name, stored, "this pack", sums.data.nbytes,
                         lambda: coefficients(sums, norm, h * w))
        if stored != torch.float16:
            return
        nchw = x.permute(0, 3, 1, 2).contiguous()
        gain, shift = norm.weight.half(), norm.bias.half()
        yield self.bytes("norm_act", name, stored, "eager NCHW", moved,
                         lambda: F.silu(F.group_norm(nchw, 32, gain, shift, 1e-6)))
        kitchen = _kitchen("group_norm_silu_pad3d")
        if kitchen is not None:
            ncdhw = x.permute(3, 0, 1, 2)[None].contiguous(memory_format=torch.channels_last_3d)
            yield self.bytes("norm_act", name, stored, "comfy-kitchen", moved,
                             lambda: kitchen.group_norm_silu_pad3d(ncdhw, gain, shift, 32, 1e-6,
                                                                   (1, 1, 1, 1, 2)))

    def upsample(self, d: int, h: int, w: int, c: int, temporal: bool, dtype: torch.dtype) -> Iterator[Row]:
        """Measure an upsampler of [d, h, w, c], composed and as the plain pair. temporal: it doubles frames, too."""
        self.ceiling = matrix_rate(self.device, dtype)
        z = 2 if temporal else 1
        before = 1 if temporal else 2
        expand = torch.randn(4 * z * c, c, 1, 1, 1, device=self.device) * c**-0.5
        conv = torch.randn(c, c, 3, 3, 3, device=self.device) * (27 * c) ** -0.5
        expand_bias, conv_bias = torch.randn(4 * z * c, device=self.device), torch.randn(c, device=self.device)
        composed = pack(expand, expand_bias, conv, conv_bias, dtype)
        x = torch.zeros(d + before, h + 2, w + 2, c, dtype=dtype, device=self.device)
        x[:, 1:-1, 1:-1] = self.random(d + before, h, w, c, dtype=dtype)
        out = torch.empty(d * z, 2 * h, 2 * w, c, dtype=torch.float16, device=self.device)
        work = composed.weight.flops_per_position * d * h * w
        scale = 1.0 if dtype.itemsize == 2 else 0.02
        name = f"{d}x{h}x{w} {c} {'time' if temporal else 'space'}"
        yield self.flops("upsample composed", name, dtype, "this pack", work,
                         lambda: upsample(x, composed, out, first=2, groups=32, scale=scale))
        # The plain pair with our own kernels: expansion storing its shuffle, then the large convolution.
        inner = torch.zeros(d * z + 2, 2 * h + 2, 2 * w + 2, c, dtype=dtype, device=self.device)
        grow = pack_weight(expand, dtype, (z, 2, 2))
        wide = pack_weight(conv, dtype)
        pair_work = 2.0 * 4 * z * c * c * d * h * w + 2.0 * 27 * c * c * 4 * z * d * h * w

        def pair() -> None:
            conv3d(x[before:, 1:-1, 1:-1].contiguous(), grow, inner[2:, 1:-1, 1:-1],
                   epilogue=Epilogue(bias=expand_bias, scale=scale, out_scale=scale))
            conv3d(inner, wide, out, epilogue=Epilogue(bias=conv_bias, scale=scale, groups=32))

        yield self.flops("upsample plain pair", name, dtype, "this pack", pair_work, pair)

    def pixels(self, d: int, h: int, w: int, c: int, stored: torch.dtype) -> Iterator[Row]:
        """Measure the last convolution, [d, h, w, c] to pixels stored as `stored`."""
        self.ceiling = None  # bound by bytes and exchange, not by the three columns of its product
        x = torch.zeros(d + 2, h + 2, w + 2, c, dtype=torch.float16, device=self.device)
        x[:, 1:-1, 1:-1] = self.random(d + 2, h, w, c)
        weight = pack_weight(torch.randn(3, c, 3, 3, 3, device=self.device) * (27 * c) ** -0.5, torch.float16)
        packed, bias = columns_weight(weight), torch.randn(3, device=self.device)
        out = torch.empty(d, h, w, 3, dtype=stored, device=self.device)
        work = 2.0 * 27 * c * 3 * d * h * w
        yield self.flops("to_pixels", f"{d}x{h}x{w} {c}->3 {str(stored)[6:]}", torch.float16, "this pack", work,
                         lambda: to_pixels(x, weight, bias, out, pixels=UNIT, packed=packed))
        raw = weight.data.view(3, 3, 3, 3, c).permute(0, 4, 1, 2, 3)
        nd = x[:, 1:-1, 1:-1].permute(3, 0, 1, 2)[None].contiguous()
        low = bias.half()
        yield self.flops("to_pixels", f"{d}x{h}x{w} {c}->3 conv only", torch.float16, "cuDNN NCDHW", work,
                         lambda: F.conv3d(nd, raw, low, padding=(0, 1, 1)))

    def attention(self, frames: int, tokens: int, head: int) -> Iterator[Row]:
        """Measure attention of one head of `head` channels among `tokens` positions of each frame, in fp16."""
        self.ceiling = matrix_rate(self.device, torch.float16)
        q, k, v = (self.random(frames, tokens, head) for _ in range(3))
        work = 4.0 * frames * tokens * tokens * head
        name = f"{frames}x{tokens} head {head}"
        yield self.flops("attention", name, q.dtype, "this pack", work, lambda: attention(q, k, v))
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def efficient() -> Tensor:
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                return F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])

        yield self.flops("attention", name, q.dtype, "SDPA memory-efficient", work, efficient)

    def rows(self, operators: Sequence[str]) -> Iterator[Row | str]:
        """Measure every case of the given operators, one at a time. A text says why the rest of a case is left out."""
        here = target(self.device)
        eight = [t for t in (FP8, torch.int8) if here.supports(t)]
        half, first = torch.float16, eight[:1]
        cases: dict[str, list[Iterator[Row]]] = {
            "conv3d": [self.conv(shape, t) for shape in self.convs for t in (half, torch.bfloat16, *eight)],
            "norm_act": [self.norm_act(*shape, t) for t in (half, *first) for shape in NORMS],
            "upsample": [self.upsample(*shape, t) for t in (half, *first) for shape in UPSAMPLES],
            "to_pixels": [self.pixels(4, 720, 1280, 128, t) for t in (half, torch.uint8)],
            "attention": [self.attention(1, *shape) for shape in ATTENTIONS],
            "winograd": [winograd.cases(self)],
        }
        for name in operators:
            for case in cases[name]:
                try:
                    yield from case
                except RatioError as error:
                    yield f"{name}: left out: {error}"
                except PrebuiltError as error:
                    yield f"{name}: left out: {error}; without Triton only kernels of decodes and encodes run"


def _eager_epilogue(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the fused epilogue in eager torch: convolution, addition, one pass for the statistics."""
    y = F.conv3d(x, weight, bias, padding=(0, 1, 1)) + residual
    frames = y.transpose(1, 2).reshape(y.shape[2], 32, -1)
    return y, torch.var_mean(frames, -1, correction=0)[0]


def _kitchen(operator: str) -> object | None:
    """Return comfy-kitchen, where the host ships a version that has this CUDA operator."""
    if importlib.util.find_spec("comfy_kitchen") is None:
        return None
    import comfy_kitchen

    return comfy_kitchen if hasattr(comfy_kitchen, operator) else None


__all__ = ["HEADER", "Bench", "Row"]
