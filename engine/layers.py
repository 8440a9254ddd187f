"""Building blocks of the video VAEs: modules that hold parameters, readable top to bottom.

Activations are [B, C, T, H, W]. Causal history is a State handed in by the caller; None means the call sees a whole
clip. What differs between the families is a parameter, or the names their files give to the same parts: the classes
with parameters of their own are SeedVR2's, models/wan.py names Wan's. Checked against the originals' recorded outputs.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import exact
from .kernels.precision import tf32_asked
from .runtime.state import State


def name_halos(module: nn.Module) -> None:
    """Give every convolution of frames under `module` the key its history is filed under: its own module path."""
    for name, child in module.named_modules():
        if isinstance(child, (CausalConv3d, FrameConv)):
            child.key = name


class CausalConv3d(nn.Conv3d):
    """Convolution that looks back in time only; spatial padding is zeros.

    A clip starts with `kt - 1` copies of its first frame, as many zero frames, or nothing (`head`). Later calls
    continue from the frames left in the State: everything after the last full step, so strides work with any chunking
    that yields at least one output frame.
    """

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel: tuple[int, int, int] = (3, 3, 3),
        stride: tuple[int, int, int] = (1, 1, 1),
        padding: int | None = None,
        head: Literal["replicate", "zero", "none"] = "replicate",
    ) -> None:
        pad = kernel[1] // 2 if padding is None else padding
        super().__init__(c_in, c_out, kernel, stride, (0, pad, pad))
        self.head = head
        self.key = ""

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        kt, step = self.kernel_size[0], self.stride[0]
        if kt > 1:
            halo = None if state is None else state.halos.get(self.key)
            if halo is None and self.head != "none":
                halo = x[:, :, :1] if self.head == "replicate" else torch.zeros_like(x[:, :, :1])
                halo = halo.expand(-1, -1, kt - 1, -1, -1)
            x = x if halo is None else torch.cat((halo.to(x), x), 2)
            if state is not None:
                used = ((x.shape[2] - kt) // step + 1) * step
                state.keep(self.key, x[:, :, used:])
        if not torch.is_grad_enabled() and exact.as_products(x.device, x.dtype, tf32_asked()):
            return exact.conv3d(x, self.weight, self.bias, self.stride, self.padding)
        if not self.weight.is_contiguous():  # in channels_last_3d; CPU kernels do not follow the weight by themselves
            x = x.contiguous(memory_format=torch.channels_last_3d)
        return super().forward(x)

    def starts(self, state: State | None) -> bool:
        """Whether the next call is the first of its clip."""
        return state is None or self.key not in state.halos


class FrameConv(nn.Conv2d):
    """A 2-D convolution of every frame; it has no history."""

    key = ""

    def forward(self, x: Tensor) -> Tensor:
        weight, stride, padding = self.weight.unsqueeze(2), (1, *self.stride), (0, *self.padding)
        if not torch.is_grad_enabled() and exact.as_products(x.device, x.dtype, tf32_asked()):
            return exact.conv3d(x, weight, self.bias, stride, padding)
        return F.conv3d(x, weight, self.bias, stride, padding)


class NormAct(nn.GroupNorm):
    """GroupNorm over (channels of the group, H, W) of each single frame, then SiLU unless `act` is off."""

    def __init__(self, channels: int, groups: int, act: bool = True) -> None:
        super().__init__(groups, channels, eps=1e-6)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        b, _, t, _, _ = x.shape
        y = super().forward(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (b, t)).transpose(1, 2)
        if not self.act:
            return y
        return F.silu(y) if torch.is_grad_enabled() else F.silu(y, inplace=True)


class LengthNormAct(nn.Module):
    """x / |x| * sqrt(C) * gamma over the C channels of each position (|x| at least 1e-12), then SiLU unless off.

    `axes`: trailing axes of size 1 of gamma, as the files have them.
    """

    eps = 1e-12

    def __init__(self, channels: int, act: bool = True, axes: int = 3) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *(1,) * axes))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        # fp32 up to the one rounding at the end: in fp16 a dark position's 1 / |x| would be infinite.
        length = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float32).clamp_min(self.eps)
        y = (x / length).mul_(self.gamma.float().view(-1, 1, 1, 1) * self.gamma.shape[0] ** 0.5)
        return (F.silu(y, inplace=True) if self.act else y).to(x.dtype)


class Resnet(nn.Module):
    """y = shortcut(x) + conv2(norm2(conv1(norm1(x)))), norms with SiLU; subclasses own the parts."""

    norm1: nn.Module
    conv1: CausalConv3d
    norm2: nn.Module
    conv2: CausalConv3d
    #: A 1x1x1 convolution where the widths differ.
    conv_shortcut: CausalConv3d | None

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        h = self.conv1(self.norm1(x), state)
        h = self.conv2(self.norm2(h), state)
        if self.conv_shortcut is not None:
            x = self.conv_shortcut(x)
        return x + h if torch.is_grad_enabled() else h.add_(x)


class ResnetBlock(Resnet):
    def __init__(self, c_in: int, c_out: int, groups: int) -> None:
        super().__init__()
        self.norm1 = NormAct(c_in, groups)
        self.conv1 = CausalConv3d(c_in, c_out)
        self.norm2 = NormAct(c_out, groups)
        self.conv2 = CausalConv3d(c_out, c_out)
        self.conv_shortcut = CausalConv3d(c_in, c_out, (1, 1, 1)) if c_in != c_out else None


class FrameAttention(nn.Module):
    """Single-head attention among the H*W positions of each frame, with a residual around it.

    Subclasses own the parts: a `norm` without activation, and the four projections as (weight [C, C], bias [C]).
    """

    norm: nn.Module

    def projections(self) -> list[tuple[Tensor, Tensor]]:
        """Of queries, keys, values and the result."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        b, c, t, h, w = x.shape
        tokens = self.norm(x).permute(0, 2, 3, 4, 1).reshape(b * t, 1, h * w, c)
        *inputs, output = self.projections()
        y = F.scaled_dot_product_attention(*(F.linear(tokens, *p) for p in inputs))
        y = F.linear(y, *output).reshape(b, t, h, w, c).permute(0, 4, 1, 2, 3)
        return x + y


class SpatialAttention(FrameAttention):
    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.group_norm = NormAct(channels, groups, act=False)
        self.to_q = nn.Linear(channels, channels)
        self.to_k = nn.Linear(channels, channels)
        self.to_v = nn.Linear(channels, channels)
        self.to_out = nn.ModuleList([nn.Linear(channels, channels)])

    @property
    def norm(self) -> NormAct:
        return self.group_norm

    def projections(self) -> list[tuple[Tensor, Tensor]]:
        return [(p.weight, p.bias) for p in (self.to_q, self.to_k, self.to_v, self.to_out[0])]


class MidBlock(nn.Module):
    """Resnet, attention, resnet at the lowest resolution."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([ResnetBlock(channels, channels, groups) for _ in range(2)])
        self.attentions = nn.ModuleList([SpatialAttention(channels, groups)])

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        x = self.resnets[0](x, state)
        x = self.attentions[0](x)
        return self.resnets[1](x, state)


class Upsample(nn.Module):
    """1x1x1 expansion, pixel shuffle (x2 in height and width, and in time where `temporal`), causal 3x3x3 conv.

    The expansion's output channel is ((row * 2 + column) * z + frame) * C + c. A clip's first latent has no second
    frame: T latents become 2T - 1 frames in the first call and 2T in later ones.
    """

    def __init__(self, channels: int, temporal: bool) -> None:
        super().__init__()
        self.z = 2 if temporal else 1
        self.upscale_conv = CausalConv3d(channels, channels * 4 * self.z, (1, 1, 1))
        self.conv = CausalConv3d(channels, channels)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        starts = self.conv.starts(state)
        b, c, t, h, w = x.shape
        x = self.upscale_conv(x).view(b, 2, 2, self.z, c, t, h, w)
        x = x.permute(0, 4, 5, 3, 6, 1, 7, 2).reshape(b, c, t * self.z, 2 * h, 2 * w)
        if starts and self.z == 2:
            x = torch.cat((x[:, :, :1], x[:, :, 2:]), 2)
        return self.conv(x, state)


class Downsample(nn.Module):
    """Zero row below and column to the right, then a strided conv: (1,3,3) in space, causal (3,3,3) in time too."""

    def __init__(self, channels: int, temporal: bool) -> None:
        super().__init__()
        kt = 3 if temporal else 1
        self.conv = CausalConv3d(channels, channels, (kt, 3, 3), (2 if temporal else 1, 2, 2), padding=0)

    def forward(self, x: Tensor, state: State | None = None) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)), state)
