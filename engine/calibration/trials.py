"""Run samples of a clip through one component of a VAE under different policies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from ..network.fused import FusedDecoder, fuse
from ..network.hosted import lent
from ..network.plain import Half
from ..options import Options
from ..precision.forms import Operands
from ..precision.policy import EXACT, Policy, Ranges, eligible
from ..precision.table import Table
from ..system.devices import empty_device_cache
from .sampling import Reader, Saturation, Watch, decibel, decode, encode, level, mse, white_noise


class Trials:
    """Trials of policies on samples of a clip, by the pixels' difference from those of the exact policy.

    samples: from sampling.latent_samples or video_samples, on the device. An encoder's latents are decoded by the exact
    decoder and compared in pixels. Packed weights of every policy tried are kept until this object is dropped.
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
        """Return ranges and work of all convolutions, measured on the exact network.

        Ranges are NaN or infinite where values of the samples are. An encoder's ranges are those of the samples and of
        white noise. Without noise, textures saturate: with it, an int8 encode of the demo VAE, of 5 frames of a clip
        that was not measured, gains 5.2 dB (57.7), and the largest error of a latent falls from 1.1 to 0.1. Latents
        have no such extremes: noise would cost an int8 decode 1.2 dB.

        Args:
            source: as in `Table`.
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
        """Return the mean square error in pixels of each eligible convolution alone in 8 bit.

        Args:
            kind: "fp8" or "int8".
            ranges: of the convolutions' inputs.
            tick: called after each convolution.
        """
        found, half = {}, getattr(self._model, self.half)
        there, *_ = lent(self._samples[0].device, *half.everything())  # once: all of it is read for each
        for key in eligible(half):
            found[key] = mse(self._run(Policy({key: kind}, ranges), half=there), self._exact)
            tick()
        return found

    def quality(self, policy: Policy) -> tuple[float, Saturation]:
        """Return the PSNR in dB against the exact policy, and the saturation of 8-bit operands."""
        saturation = Saturation()
        return decibel(mse(self._run(policy, saturation), self._exact)), saturation

    @cached_property
    def _exact(self) -> list[Tensor]:
        return self._run(EXACT)

    @cached_property
    def _judge(self) -> FusedDecoder:
        return fuse(self._model.decoder, self._dtype, self._options, device=self._samples[0].device)

    def _run(self, policy: Policy, watch: Watch | None = None, half: Half | None = None) -> list[Tensor]:
        """Return the samples' pixels. half: the component with its weights on the device, to avoid fetching them."""
        out = self._half(policy, self._samples, watch, half)
        return out if self.half == "decoder" else [decode(self._judge, z) for z in out]

    def _half(
        self, policy: Policy, samples: list[Tensor], watch: Watch | None, half: Half | None = None
    ) -> list[Tensor]:
        operands = Operands(self._dtype, policy, self._packed, winograd=self._options.winograd)
        half = half or getattr(self._model, self.half)
        network = fuse(half, self._dtype, self._options, operands, samples[0].device)
        if samples[0].is_cuda:
            # Memory that libraries take for good (cuBLAS's workspace, at its first product) would lie in blocks that
            # packing has freed, and keep all of them reserved: 0.4 GB for the published decoder.
            empty_device_cache()
        through = decode if self.half == "decoder" else encode
        return [through(network, sample, watch) for sample in samples]
