"""Training forward of the SeedVR2 network: the engine's parameters and mathematics in a layout that trains fast.

Activations are [B, T, H, W, C] (channels last), whole clips only, no State. A single frame runs as 2-D convolutions:
its causal history is copies of itself, so the three time taps of a kernel add up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...engine.network.ops.attention import SplitAttention
from ...engine.network.ops.conv import ClipConv
from ...engine.network.ops.down import Downsample
from ...engine.network.ops.norm import GroupNormAct
from ...engine.network.ops.resnet import Resnet
from ...engine.network.ops.up import Upsample
from ...engine.network.plain import Network
from ...engine.network.tree import Branch


def _conv2d(x: Tensor, weight: Tensor, bias: Tensor, stride: int, pad: int) -> Tensor:
    """Convolve [B, T, H, W, C] frame by frame; the permutes are views, so cuDNN sees channels-last memory."""
    y = F.conv2d(x.flatten(0, 1).permute(0, 3, 1, 2), weight, bias, stride, pad)
    return y.permute(0, 2, 3, 1).unflatten(0, x.shape[:2])


def conv(m: ClipConv, x: Tensor, frozen_past: bool = False) -> Tensor:
    """Convolve. frozen_past: single frames train the present tap alone (the others stay as they are)."""
    weight, bias = m.weight.to(x.dtype), m.bias.to(x.dtype)
    kt, kh, _ = m.kernel_size
    step, stride, pad = m.stride[0], m.stride[1], m.padding[1]
    if kh == 1:
        return F.linear(x, weight.flatten(1), bias)
    if kt == 1:
        return _conv2d(x, weight[:, :, 0], bias, stride, pad)
    if x.shape[1] == 1:
        past = weight[:, :, 0] + weight[:, :, 1]
        return _conv2d(x, weight[:, :, 2] + (past.detach() if frozen_past else past), bias, stride, pad)
    x = torch.cat((x[:, :1], x[:, :1], x), 1).permute(0, 4, 1, 2, 3)
    return F.conv3d(x, weight, bias, (step, stride, stride), (0, pad, pad)).permute(0, 2, 3, 4, 1)


def norm(m: GroupNormAct, x: Tensor) -> Tensor:
    b, t, h, w, c = x.shape
    grouped = x.float().reshape(b, t, h * w, m.num_groups, c // m.num_groups)
    var, mean = torch.var_mean(grouped, (2, 4), correction=0, keepdim=True)
    y = ((grouped - mean) * torch.rsqrt(var + m.eps)).reshape(x.shape) * m.weight + m.bias
    return (F.silu(y) if m.act else y).to(x.dtype)


def resnet(m: Resnet, x: Tensor, frozen_past: bool) -> Tensor:
    h = conv(m.conv1, norm(m.norm1, x), frozen_past)
    h = conv(m.conv2, norm(m.norm2, h), frozen_past)
    return h + (x if m.conv_shortcut is None else conv(m.conv_shortcut, x))


def attention(m: SplitAttention, x: Tensor) -> Tensor:
    b, t, h, w, c = x.shape
    tokens = norm(m.group_norm, x).reshape(b * t, 1, h * w, c)
    q, k, v = (F.linear(tokens, p.weight.to(x.dtype), p.bias.to(x.dtype)) for p in (m.to_q, m.to_k, m.to_v))
    y = F.scaled_dot_product_attention(q, k, v)
    out = m.to_out[0]
    return x + F.linear(y, out.weight.to(x.dtype), out.bias.to(x.dtype)).reshape(x.shape)


def mid(m: Branch, x: Tensor, frozen_past: bool) -> Tensor:
    return resnet(m.resnets[1], attention(m.attentions[0], resnet(m.resnets[0], x, frozen_past)), frozen_past)


def down(m: Downsample, x: Tensor, frozen_past: bool) -> Tensor:
    return conv(m.conv, F.pad(x, (0, 0, 0, 1, 0, 1)), frozen_past)


def up(m: Upsample, x: Tensor, frozen_past: bool) -> Tensor:
    b, t, h, w, c = x.shape
    weight, bias = m.upscale_conv.weight.to(x.dtype).flatten(1), m.upscale_conv.bias.to(x.dtype)
    z = m.z
    if t == 1 and z == 2:  # the second frame of a clip's first latent is dropped, so do not compute it
        weight, bias, z = weight.view(4, 2, c, c)[:, 0].flatten(0, 1), bias.view(4, 2, c)[:, 0].flatten(), 1
    x = F.linear(x, weight, bias).view(b, t, h, w, 2, 2, z, c)
    x = x.permute(0, 1, 6, 2, 4, 3, 5, 7).reshape(b, t * z, 2 * h, 2 * w, c)
    if z == 2:
        x = torch.cat((x[:, :1], x[:, 2:]), 1)
    return conv(m.conv, x, frozen_past)


def encode(model: Network, x: Tensor, dtype: torch.dtype = torch.bfloat16, frozen_past: bool = False) -> Tensor:
    """Encode x [B, F, H, W, 3] in -1..1 to float32 moments [B, T, H // 8, W // 8, 2 * latent]."""
    m = model.encoder
    x = conv(m.conv_in, x.to(dtype), frozen_past)
    for block in m.down_blocks:
        for layer in block.resnets:
            x = resnet(layer, x, frozen_past)
        for layer in getattr(block, "downsamplers", ()):
            x = down(layer, x, frozen_past)
    x = norm(m.conv_norm_out, mid(m.mid_block, x, frozen_past))
    return conv(m.conv_out, x, frozen_past).float()


def decode(model: Network, z: Tensor, dtype: torch.dtype = torch.bfloat16, frozen_past: bool = False) -> Tensor:
    """Decode z [B, T, h, w, latent] (unscaled) to float32 [B, 4(T - 1) + 1, 8h, 8w, 3], about -1..1, not clamped."""
    m = model.decoder
    x = mid(m.mid_block, conv(m.conv_in, z.to(dtype), frozen_past), frozen_past)
    for block in m.up_blocks:
        for layer in block.resnets:
            x = resnet(layer, x, frozen_past)
        for layer in getattr(block, "upsamplers", ()):
            x = up(layer, x, frozen_past)
    return conv(m.conv_out, norm(m.conv_norm_out, x), frozen_past).float()
