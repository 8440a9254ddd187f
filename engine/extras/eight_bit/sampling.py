"""Run samples of a clip through a component of a VAE: ranges of its convolutions, saturation, the cost of policies."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor, nn

from ...kernels.conv3d.types import QUANT_MAX
from ...network.fused import FusedDecoder, FusedEncoder, fuse
from ...network.offload import lent
from ...network.plain import Half
from ...network.steps import Latents, Steps
from ...options import Options
from ...precision.forms import Operands
from ...precision.policy import EXACT, Policy, Range, Ranges, eligible
from ...runtime.weights import Conv
from ...system.devices import empty_device_cache
from .table import Table

Watch = Callable[[Conv, Tensor], None]
#: A sample has this many latents (5 frames) of at most SIDE x SIDE latent pixels: 256 x 256 pixels. Decoded with one
#: frame per step it takes 0.6 GB in addition to 0.9 GB of weights at the published widths, less than any later run.
LATENTS = 2
SIDE = 32
#: Samples of a clip, spread from its first to its last frames and from the upper left to the lower right corner.
COUNT = 6


def latent_samples(z: Tensor | Latents, side: int = SIDE) -> list[Tensor]:
    """Return up to COUNT parts [LATENTS, h', w', C] of the first clip of [B, C, T, h, w].

    Each is decoded as a clip of its own. h' and w' are at most `side` latent pixels."""
    return [
        z[0, :, t : t + LATENTS][..., y : y + side, x : x + side].permute(1, 2, 3, 0)
        for t, y, x in _places((z.shape[2], LATENTS), z.shape[3:], side)
    ]


def video_samples(video: Tensor, side: int = SIDE) -> list[Tensor]:
    """Return up to COUNT parts [5 or 1 frames, H', W', 3] of a clip [F, H, W, 3], each to be encoded by itself.

    H' and W' are at most 8 * `side` pixels."""
    frames = 4 * (LATENTS - 1) + 1 if video.shape[0] >= 4 * (LATENTS - 1) + 1 else 1
    return [
        video[t : t + frames, y : y + 8 * side, x : x + 8 * side]
        for t, y, x in _places((video.shape[0], frames), video.shape[1:3], 8 * side)
    ]


def white_noise(video: Tensor) -> Tensor:
    """Return seeded noise in -1..1 of the type and shape of a video sample: textures that few clips contain."""
    generator = torch.Generator().manual_seed(0)
    return (2 * torch.rand(video.shape, generator=generator, dtype=torch.float32, device="cpu") - 1).to(video)


def _places(time: tuple[int, int], size: tuple[int, ...], side: int) -> list[tuple[int, int, int]]:
    """Return the places (time, row, column) where samples start, without repetition."""
    room = [max(time[0] - time[1], 0), *(max(n - side, 0) for n in size)]
    steps = [i / (COUNT - 1) for i in range(COUNT)]
    return list(dict.fromkeys((*(round(s * r) for r in room),) for s in steps))


@torch.no_grad()
def decode(network: FusedDecoder, z: Tensor, watch: Watch | None = None) -> Tensor:
    """Decode unscaled latents [D, h, w, C] to frames [F, s * h, s * w, 3], about -1..1, unclamped, on their device.

    Args:
        network: the fused decoder.
        z: latents.
        watch: called with each convolution and its input.
    """
    (d, h, w, _), frames = z.shape, network.piece or 1
    front, rest = network.plan_front(d, h, w, z.device), network.plan_tile(d, h, w, frames, z.device)
    out: list[Tensor] = []
    front.watch = rest.watch = watch
    front.allocate()
    network.front_chunk(front, z, lambda x: out.append(x.clone()))
    front.free()
    features = out.pop()
    rest.allocate()
    network.tile_chunk(rest, features, frames, lambda x: out.append(2 * x - 1))
    return torch.cat(out)


@torch.no_grad()
def encode(network: FusedEncoder, video: Tensor, watch: Watch | None = None) -> Tensor:
    """Encode frames [F, H, W, 3] in -1..1 to mean latents [T, h, w, C], on the video's device.

    Args:
        network: the fused encoder.
        video: frames.
        watch: called with each convolution and its input.
    """
    count, height, width, _ = video.shape
    latents, out = (count - 1) // network.every + 1, []
    lead, frames = (0, 1) if network.chunks is None else (network.chunks[0], 0)
    frames = 0 if network.piece else frames
    run = network.plan(latents, height, width, frames, video.device, clip=latents)
    run.watch = watch
    run.allocate()
    if network.gathers:
        for first, end in Steps(latents, lead=lead).spans(latents):
            part = video[max(0, 4 * first - 3) : 4 * end - 3]
            run.gathered[first:end].copy_(network.chunk(run, part, frames))
        network.gather(run, lambda moments: out.append(moments.clone()))
    else:
        out.append(network.chunk(run, video, frames).clone())
    moments = out.pop()
    return moments[..., : moments.shape[-1] // 2]


class Reader:
    """Watch for 16-bit networks: records the range of each convolution's input, and its operations."""

    def __init__(self) -> None:
        self._largest: dict[str, Tensor] = {}
        self._squares: dict[str, Tensor] = {}
        self._counts: dict[str, int] = defaultdict(int)
        self.flops: dict[str, int] = defaultdict(int)

    def __call__(self, conv: Conv, frames: Tensor) -> None:
        key, count = conv.key, frames[..., 0].numel()
        for frame in frames:  # one at a time, to save memory
            x = frame.flatten(0, 1).to(torch.float32, copy=True)  # it is squared in place
            largest, squares = x.abs().amax(0), x.square_().sum(0)
            self._largest[key] = torch.maximum(largest, self._largest.get(key, largest))
            self._squares[key] = squares + self._squares.get(key, 0.0)
        self._counts[key] += count
        self.flops[key] += conv.weight.flops_per_position * (count // math.prod(conv.stride))

    def ranges(self) -> dict[str, Range]:
        """Return the ranges by convolution key."""
        return {
            key: Range.of(self._largest[key], (squares / self._counts[key]).sqrt())
            for key, squares in self._squares.items()
        }


class Saturation:
    """Watch for 8-bit networks: counts the operands at the limits of their type (`count` of `total`)."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0

    def __call__(self, conv: Conv, frames: Tensor) -> None:
        if conv.dtype in QUANT_MAX:
            self.count += int((frames.float().abs() >= QUANT_MAX[conv.dtype]).sum())
            self.total += frames.numel()


def power(samples: list[Tensor]) -> float:
    """Return the sum of the squares of all values."""
    return float(torch.stack([s.double().square().sum() for s in samples]).sum())


def level(samples: list[Tensor]) -> float:
    """Return the root mean square of all values, to three digits."""
    return float(f"{math.sqrt(power(samples) / sum(s.numel() for s in samples)):.3g}")


def mse(a: list[Tensor], b: list[Tensor]) -> float:
    """Return the mean square difference of two lists of tensors of equal shapes."""
    squares = sum((x.double() - y.double()).square().sum().item() for x, y in zip(a, b, strict=True))
    return squares / sum(x.numel() for x in a)


def decibel(error: float) -> float:
    """Return the PSNR in dB (peak 2) of a mean square error of values in -1..1; infinite without error."""
    return math.inf if error == 0 else 10 * math.log10(4 / error)


def from_decibel(db: float) -> float:
    """Return the mean square error of values in -1..1 that a PSNR in dB (peak 2) allows."""
    return 4 / 10 ** (db / 10)


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
            self._half(EXACT, [self._model.encoder.program.in_units(noise, signed=True)], edge)
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
        half = half or getattr(self._model, self.half)
        winograd = self._options.winograd is True and not half.program.style.direct
        operands = Operands(self._dtype, policy, self._packed, winograd=winograd)
        network = fuse(half, self._dtype, self._options, operands, samples[0].device)
        if samples[0].is_cuda:
            # Memory that libraries take for good (cuBLAS's workspace, at its first product) would lie in blocks that
            # packing has freed, and keep all of them reserved: 0.4 GB for the published decoder.
            empty_device_cache()
        through = decode if self.half == "decoder" else encode
        return [through(network, sample, watch) for sample in samples]
