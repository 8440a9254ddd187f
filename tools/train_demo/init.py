"""Starting weights: a network that already carries signal, and its step from single frames to clips."""

from __future__ import annotations

import torch
from torch import nn

from ...engine.network.ops.attention import SplitAttention
from ...engine.network.ops.conv import ClipConv
from ...engine.network.ops.down import Downsample
from ...engine.network.ops.norm import GroupNormAct
from ...engine.network.ops.resnet import Resnet
from ...engine.network.ops.up import Upsample
from ...engine.network.plain import Network

#: variance of SiLU of a unit normal about its second moment; convolutions after GroupNormAct see inputs of this power
SILU_POWER = 0.36


def _present_only(conv: nn.Conv3d, power: float = 1.0) -> None:
    """Set random weights in the last time tap that keep unit variance for inputs of mean square `power`; past taps
    0."""
    fan = conv.in_channels * conv.kernel_size[1] * conv.kernel_size[2]
    nn.init.zeros_(conv.weight)
    nn.init.normal_(conv.weight[:, :, -1], std=(power * fan) ** -0.5)
    nn.init.zeros_(conv.bias)


@torch.no_grad()
def start(model: Network, seed: int) -> None:
    """Initialise in place: residual branches near zero, upsampling nearest-neighbour, latents of about unit std."""
    torch.manual_seed(seed)
    for m in model.modules():
        if isinstance(m, GroupNormAct):
            nn.init.ones_(m.weight)
            nn.init.zeros_(m.bias)
        elif isinstance(m, ClipConv):
            _present_only(m)
    for m in model.modules():
        if isinstance(m, Resnet):
            _present_only(m.conv1, SILU_POWER)
            _present_only(m.conv2, SILU_POWER)
            m.conv2.weight.mul_(0.2)
        elif isinstance(m, SplitAttention):
            for linear in (m.to_q, m.to_k, m.to_v):
                nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
                nn.init.zeros_(linear.bias)
            nn.init.zeros_(m.to_out[0].weight)
            nn.init.zeros_(m.to_out[0].bias)
        elif isinstance(m, Upsample):
            c = m.conv.in_channels
            m.upscale_conv.weight.mul_(0.3)
            m.upscale_conv.weight.view(-1, c, c).add_(torch.eye(c))
            m.conv.weight.mul_(0.3)
            m.conv.weight[:, :, -1, 1, 1].add_(torch.eye(c))
        elif isinstance(m, Downsample):
            m.conv.weight.mul_(0.9)
    out = model.encoder.conv_out
    half = out.out_channels // 2
    _present_only(out, SILU_POWER)
    out.weight[half:].mul_(0.1)
    out.bias[half:] = -4.0
    _present_only(model.decoder.conv_out, SILU_POWER)
    model.decoder.conv_out.weight.mul_(0.3)


@torch.no_grad()
def inflate(model: Network) -> None:
    """Prepare for clips after training on single frames: second sub-frames start as copies of the first, time strides
    average two."""
    for m in model.modules():
        if isinstance(m, Upsample) and m.z == 2:
            c = m.conv.in_channels
            weight, bias = m.upscale_conv.weight.view(4, 2, c, c), m.upscale_conv.bias.view(4, 2, c)
            weight[:, 1], bias[:, 1] = weight[:, 0], bias[:, 0]
        elif isinstance(m, Downsample) and m.conv.kernel_size[0] == 3:
            m.conv.weight[:, :, 1:] = 0.5 * m.conv.weight[:, :, 2:]
