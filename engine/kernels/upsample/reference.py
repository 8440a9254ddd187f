"""The plain pair of layers that the composed kernels replace, on channels-last frames, in the precision of its
input."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def plain_pair(x: Tensor, expand: Tensor, expand_bias: Tensor, conv: Tensor, conv_bias: Tensor) -> Tensor:
    """Run expansion, shuffle and causal 3x3x3 conv on a clip from its start: [T, H, W, C] -> [z * T - (z - 1), 2H, 2W,
    K]."""
    t, h, w, c = x.shape
    z = expand.shape[0] // (4 * c)
    u = F.linear(x, expand.flatten(1), expand_bias).view(t, h, w, 2, 2, z, c)
    u = u.permute(0, 5, 1, 3, 2, 4, 6).reshape(t * z, 2 * h, 2 * w, c)
    if z == 2:
        u = torch.cat((u[:1], u[2:]))
    u = torch.cat((u[:1], u[:1], u)).permute(3, 0, 1, 2)[None]
    return F.conv3d(u, conv, conv_bias, padding=(0, 1, 1))[0].permute(1, 2, 3, 0)
