"""Pack the pixels of latents into channels, normalised by statistics that a file carries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: Rows of network latents that become channels of one packed pixel, and the same number of columns.
SIDE = 2


class PackedLatents(nn.Module):
    """Convert between the network's latents [B, C, T, 2h, 2w] and external ones, [B, 4C, T, h, w], channel (c * 2 +
    row) * 2 + column, each normalised by its running mean and variance. This runs in fp32 on the host, because latents
    are small."""

    def __init__(self, channels: int, eps: float = 1e-4) -> None:
        """Register the statistics; `channels` is that of the network's latents."""
        super().__init__()
        self.eps = eps
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, torch.zeros(SIDE**2 * channels))

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Keep the type of the statistics wherever the network moves: nothing is rounded outside the network."""
        super()._apply(fn, recurse)
        for name, values in self._buffers.items():
            self._buffers[name] = values.float()
        return self

    def _statistics(self) -> tuple[Tensor, Tensor]:
        mean, variance = (t.detach().cpu().view(1, -1, 1, 1, 1) for t in (self.running_mean, self.running_var))
        return mean, (variance + self.eps).sqrt()

    def unpack(self, z: Tensor) -> Tensor:
        """Return external latents [B, 4C, T, h, w] as the network's, [B, C, T, 2h, 2w]."""
        mean, deviation = self._statistics()
        b, c, t, h, w = z.shape
        z = (z.float().cpu() * deviation + mean).view(b, c // SIDE**2, SIDE, SIDE, t, h, w)
        return z.permute(0, 1, 4, 5, 2, 6, 3).reshape(b, c // SIDE**2, t, SIDE * h, SIDE * w)

    def pack(self, z: Tensor) -> Tensor:
        """Invert `unpack`; a last odd row or column is dropped."""
        mean, deviation = self._statistics()
        b, c, t, h, w = *z.shape[:3], z.shape[3] // SIDE, z.shape[4] // SIDE
        z = z[..., : SIDE * h, : SIDE * w].float().cpu().reshape(b, c, t, h, SIDE, w, SIDE)
        return (z.permute(0, 1, 4, 6, 2, 3, 5).reshape(b, SIDE**2 * c, t, h, w) - mean) / deviation


class Repacked(PackedLatents):
    """The same without statistics: external latents have the network's units."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self._buffers.clear()

    def _statistics(self) -> tuple[Tensor, Tensor]:
        return torch.zeros((), dtype=torch.float32, device="cpu"), torch.ones((), dtype=torch.float32, device="cpu")
