"""Samples of a clip through one half of a VAE under different policies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from ..network.fused import FusedDecoder, fuse
from ..network.hosted import lent
from ..network.plain import Half
from ..operands.forms import Operands
from ..operands.policy import EXACT, Policy, Ranges, eligible
from ..options import Options
from ..run.devices import empty_device_cache
from .sampling import Reader, Saturation, Watch, decibel, decode, encode, level, mse, white_noise
from .table import Table


class Trials:
    """Runs `samples` (sampling.latent_samples or video_samples, on the device) and compares pixels with those of the
    exact policy. Latents of an encoder are judged by what the exact decoder makes of them.

    Packed weights of every policy tried are held until this goes.
    """

    def __init__(
        self, model: nn.Module, half: str, dtype: torch.dtype, options: Options, samples: list[Tensor]
    ) -> None:
        self.half = half
        self._model = model
        self._dtype = dtype
        self._options = options
        self._samples = samples
        self._packed: dict = {}

    def table(self, source: str) -> Table:
        """Ranges and work of all convolutions, read off the exact network; ranges are NaN or infinite where values of
        the samples are. source: as in Table.

        An encoder's ranges are those of the samples and of white noise. Without that, textures saturate: an int8 encode
        of the demo VAE, of 5 frames of a clip held back, gains 5.2 dB (57.7), and the largest error of a latent falls
        from 1.1 to 0.1. Latents hold no such extremes: noise would cost an int8 decode 1.2 dB.
        """
        reader = Reader()
        self._half(EXACT, self._samples, reader)
        ranges = reader.ranges()
        if self.half == "encoder":
            edge, noise = Reader(), white_noise(self._samples[0])
            own = getattr(self._model.encoder.program, "own", None)
            self._half(EXACT, [noise if own is None else own.in_units((noise + 1) / 2)], edge)
            noisy = edge.ranges()
            ranges = {key: found.united(noisy[key]) for key, found in ranges.items()}
        return Table(source, ranges, dict(reader.flops), levels={source: level(self._samples)})

    def errors(self, kind: str, ranges: Ranges, tick: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Mean square error in pixels of each eligible convolution alone in 8 bit."""
        found, half = {}, getattr(self._model, self.half)
        there, *_ = lent(self._samples[0].device, *half.everything())  # once: all of it is read for each
        for key in eligible(half):
            found[key] = mse(self._run(Policy({key: kind}, ranges), half=there), self._exact)
            tick()
        return found

    def quality(self, policy: Policy) -> tuple[float, Saturation]:
        """(dB against the exact policy, how many 8-bit operands were saturated)."""
        saturation = Saturation()
        return decibel(mse(self._run(policy, saturation), self._exact)), saturation

    @cached_property
    def _exact(self) -> list[Tensor]:
        return self._run(EXACT)

    @cached_property
    def _judge(self) -> FusedDecoder:
        return fuse(self._model.decoder, self._dtype, self._options, device=self._samples[0].device)

    def _run(self, policy: Policy, watch: Watch | None = None, half: Half | None = None) -> list[Tensor]:
        """Pixels of the samples. half: with its weights on the device, where they wait elsewhere and are not fetched
        for this alone."""
        out = self._half(policy, self._samples, watch, half)
        return out if self.half == "decoder" else [decode(self._judge, z) for z in out]

    def _half(
        self, policy: Policy, samples: list[Tensor], watch: Watch | None, half: Half | None = None
    ) -> list[Tensor]:
        operands = Operands(self._dtype, policy, self._packed, winograd=self._options.winograd)
        half = half or getattr(self._model, self.half)
        network = fuse(half, self._dtype, self._options, operands, samples[0].device)
        if samples[0].is_cuda:
            # What libraries take for good (cuBLAS's workspace, at its first product) would lie in blocks that packing
            # has left, and keep all of them reserved: 0.4 GB of the published decoder's.
            empty_device_cache()
        through = decode if self.half == "decoder" else encode
        return [through(network, sample, watch) for sample in samples]
