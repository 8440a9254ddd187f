"""LTX-2.5's diffusion decoder as one step: four stages of blocks turn latents into features of every patch of a frame,
then blocks that see these features turn noise into pixels."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...kernels.targets import kernels_for
from ...network.program import Step
from ...network.state import State
from ...network.tree import graft
from ...network.values import CAUSAL, Size, Style, Taps, Work
from ...runtime.pinned import page_locked
from ..ltx.conditioned import WAVES, waves_of
from .block_weights import Block, Norms, Weight, Weights
from .kernels.blocks import fuses
from .memory import needed
from .neighbours import GROUP, Attend, Dropped, Frames, Grouped, Kernel, Station, Up, in_groups
from .passes import AHEAD, Joined, Passes, Waiting
from .sampling import COLOURS, ONE_STEP, Enter, Leave, Sampling

#: Vectors of a timestep's modulation, and those that the blocks use: scale and shift of each norm.
VECTORS, USED = 7, (0, 1, 3, 4)
Part = Callable[[str], nn.Module]
T = TypeVar("T")
#: Vectors of a token that a block reads and writes where all else is fused: of the products before the attention 1 and
#: 3, of the attention with the product after it 3 and 1 besides the token, and of the gate 1 and 1.
BLOCK_VALUES = 11


@dataclass
class Given:
    """What a clip's way through the decoder depends on beside latents and weights (`State.given`).

    noise: returns that of a frame of the clip or tile, at least [3, H, W]. passes: in which the clip goes through, as
    of Steps. check: called meanwhile; may raise. kind: type of the operands of products that scale them as they come,
    "fp8" or "int8"; None: that of the weights. kept: values that are made once for all clips, from the weights alone;
    the caller may keep them for later clips on the same stream."""

    noise: Callable[[int], Tensor] | None = None
    passes: int = 1
    check: Callable[[], None] = lambda: None
    kind: str | None = None
    kept: dict[Hashable, Any] = field(default_factory=dict)

    def keeps(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, which depends on the weights alone and is called for the first clip that needs it; calls in
        any mode of torch can use it."""
        if key not in self.kept:
            with torch.inference_mode(False), torch.no_grad():
                self.kept[key] = make()
        return self.kept[key]


class DiffusionBlock(Block):
    def __init__(self, width: int, head: int) -> None:
        super().__init__(width, head)
        self.context_proj = nn.Linear(width, width)
        self.scale_shift_table = nn.Parameter(torch.zeros(VECTORS, width))


class Embedding(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        graft(self, "mlp.0", nn.Linear(WAVES, channels))
        graft(self, "mlp.2", nn.Linear(channels, channels))


class Modulation(nn.Module):
    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(channels, VECTORS * width)


@dataclass(frozen=True)
class Stage:
    """Blocks of one width whose tokens attend to a window of `kernel`; then every token becomes `stride` samples."""

    width: int
    layers: int
    kernel: Kernel
    stride: Kernel


@dataclass(frozen=True)
class NeighbourDecoder(Step):
    """The decoder from latents to pixels.

    Attributes:
        c_in: channels of a latent.
        head: channels of a head, in all blocks.
        stages: in order; the last stage's samples are features of patches.
        width, layers, kernel: of the blocks that turn noise into pixels.
        patch: pixels of a patch's side.
        embedding: channels of a timestep's embedding.
    """

    c_in: int
    head: int
    stages: tuple[Stage, ...]
    width: int
    layers: int
    kernel: Kernel
    patch: int
    embedding: int
    sampling: Sampling = ONE_STEP
    name: str = "diff_blocks"
    late = True
    bounded = True
    cycle = GROUP
    launches = True
    plain_only = "its products and its attention run as they are"

    @property
    def scales(self) -> bool:  # type: ignore[override]
        """Return whether the blocks from noise to pixels take 8-bit operands. Those before them do not: they are a
        sixth of the work, and an error in them passes through all that follow. In dB against fp32, random weights, on a
        CPU: published widths 40.2 in bf16, 40.1 in int8 and 38.9 in fp8; eight blocks of 128 channels 43.2, 42.3 and
        37.4, with those before them 38.4 and 29.1."""
        return fuses(self.width, self.head, torch.bfloat16)

    @property
    def ghosts(self) -> int:
        """Return the copies of its last latent that follow a clip, for windows that look ahead."""
        return self.stages[0].kernel[0] // 2 * 2

    @property
    def time(self) -> tuple[int, int]:  # type: ignore[override]
        return math.prod(s.stride[0] for s in self.stages), 1

    @property
    def space(self) -> tuple[int, int]:  # type: ignore[override]
        return self.patch * math.prod(s.stride[1] for s in self.stages), 1

    def modules(self, style: Style) -> dict[str, nn.Module]:
        values, first = COLOURS * self.patch**2, self.stages[0].width
        parts: dict[str, nn.Module] = {"conv_in": nn.Linear(self.c_in, first)}
        widths = [*(s.width for s in self.stages[1:]), self.width]
        for i, (stage, after) in enumerate(zip(self.stages, widths, strict=True)):
            parts |= {f"det_stages.{i}.{j}": Block(stage.width, self.head) for j in range(stage.layers)}
            parts[f"upsamples.{i}.proj"] = nn.Linear(stage.width, after * math.prod(stage.stride))
        parts |= {
            "t_embedder": Embedding(self.embedding), "shared_adaln": Modulation(self.embedding, self.width),
            "conv_in_x_t": nn.Linear(values, self.width), "norm_out": Weight(self.width),
            "conv_out": nn.Linear(self.width, values),
        }  # fmt: skip
        return parts | {f"{self.name}.{i}": DiffusionBlock(self.width, self.head) for i in range(self.layers)}

    def plain(self, part: Part, x: Tensor, state: State) -> Tensor:
        return torch.cat(list(self.each(part, x, state)), 2)

    def each(self, part: Part, x: Tensor, state: State) -> Iterator[Tensor]:
        """Decode the clip's next latent [1, C, 1, h, w]; frames come out once all that their windows hold are there."""
        if x.shape[0] != 1 or x.shape[2] != 1:
            raise ValueError(f"this decoder takes one latent of one clip at a time, not {list(x.shape)}")
        way = state.once(self.name, lambda: self._way(part, state))
        enter = part("conv_in")
        tokens = F.linear(x[0].permute(1, 2, 3, 0).to(enter.weight.dtype), enter.weight, enter.bias)
        if state.ending:
            tokens = tokens.repeat(1 + self.ghosts, 1, 1, 1)
        made = False
        for frames in way.push(Frames(tokens, state.ending)):
            made = True
            yield frames.tokens.permute(3, 0, 1, 2)[None]
        if not made:
            rows, columns = (n * self.space[0] for n in x.shape[3:])
            yield x.new_empty(1, COLOURS, 0, rows, columns)

    def _way(self, part: Part, state: State) -> Passes:
        """Return all stations, in as many passes as the state asks for."""
        begins, given = 0 if state.place is None else state.place.origin, state.given or Given()
        features, blocks = list(self._features(part, given, begins)), self.sampling.steps * self.layers
        pictures = list(self._pictures(part, given, self.time[0] * begins))
        if given.passes == 1:
            return Passes([*features, *self._up(part), *pictures], (), given.check)
        size = -(-blocks // (given.passes - 1))
        edges = [0, *_begins(pictures, size), len(pictures)]

        def row(first: int, last: int, left: Waiting) -> list[Station]:
            return [*self._up(part), *([Joined(left)] if first else ()), *pictures[first:last]]

        return Passes(features, [functools.partial(row, *edge) for edge in itertools.pairwise(edges)], given.check)

    def _features(self, part: Part, given: Given, begins: int) -> Iterator[Station]:
        """Yield the stations that turn latents into the last stage's tokens. begins: the first latent."""
        rate, last = 1, len(self.stages) - 1
        blocks = [part(f"det_stages.{i}.{j}") for i, stage in enumerate(self.stages) for j in range(stage.layers)]
        norms, each = given.keeps((self.name, "norms before"), lambda: Norms.of(blocks)), enumerate(blocks)
        for i, stage in enumerate(self.stages):
            yield Grouped()
            for at, block in itertools.islice(each, stage.layers):
                weights = functools.partial(_weights, given, (self.name, "before", at), block, norms[at])
                yield Attend(weights, stage.kernel, begins=rate * begins, early=i < last)
            yield Up(part(f"upsamples.{i}.proj"), stage.stride) if i < last else Dropped(self.ghosts * rate)
            rate *= stage.stride[0]

    def _up(self, part: Part) -> Iterator[Station]:
        """Yield the stations that turn the last stage's tokens into features of patches."""
        last = len(self.stages) - 1
        stride = self.stages[last].stride
        yield Up(part(f"upsamples.{last}.proj"), stride, max(GROUP // stride[0], 1))
        yield Grouped()

    def _pictures(self, part: Part, given: Given, begins: int = 0) -> Iterator[Station]:
        """Yield the stations that turn features into pixels. begins: the first frame."""
        blocks = [part(f"{self.name}.{i}") for i in range(self.layers)]
        norms = given.keeps((self.name, "norms"), lambda: Norms.of(blocks))
        keeps, last = self.sampling.velocity or self.sampling.steps > 1, self.layers - 1
        for step in range(self.sampling.steps):
            made = given.keeps((self.name, "modulation", step), lambda step=step: self._modulation(part, blocks, step))
            yield Enter(self.patch, part("conv_in_x_t"), blocks[0].context_proj, given.noise, keeps)
            for i, block in enumerate(blocks):
                modulation = [made[i, used] for used in USED]  # a list of indices would be copied to the device
                more = norms[i], modulation, given.kind
                weights = functools.partial(_weights, given, (self.name, step, i), block, *more)
                yield Attend(weights, self.kernel, blocks[i + 1].context_proj if i < last else None, begins)
            yield Leave(self.patch, part("norm_out").weight, part("conv_out"), self.sampling, step)

    def _modulation(self, part: Part, blocks: Sequence[DiffusionBlock], step: int) -> Tensor:
        """Return every block's vectors at a timestep, float32 [layers, VECTORS, C]."""
        adaln, device = part("shared_adaln").proj, part("shared_adaln").proj.weight.device
        h = waves_of(self.sampling.multiplier * self.sampling.time(step), device)
        for name in ("0", "2"):
            linear = part("t_embedder").mlp.get_submodule(name)
            h = F.silu(F.linear(h, linear.weight.float(), linear.bias.float()))
        vectors = F.linear(h, adaln.weight.float(), adaln.bias.float()).view(VECTORS, self.width)
        return vectors + torch.stack([b.scale_shift_table for b in blocks]).float()

    def taps(self, style: Style) -> Taps:
        """Return the latents that a frame depends on: windows reach as far again where a clip begins or ends. Those
        after it also make its groups whole: products of fewer rows may have other bits."""
        reach, rate = 0, 1
        for stage in self.stages:
            reach += (stage.layers + 1) * (stage.kernel[0] // 2) * self.time[0] // rate
            rate *= stage.stride[0]
        reach += (self.sampling.steps * self.layers + 1) * (self.kernel[0] // 2)
        reach = math.ceil(reach / rate) + 1
        return Taps(reach, reach + GROUP // 2)

    def size(self, size: Size, starts: bool) -> Size:
        made = super().size(size, starts)
        return made._replace(channels=COLOURS)

    def channels(self, channels: int) -> int:
        return COLOURS

    @property
    def passes(self) -> tuple[int, ...]:
        """Return the numbers of passes that a clip can take, from most memory to least: all at once, or features first
        and then the blocks, at once or in so many parts."""
        blocks = self.sampling.steps * self.layers
        return (1, *sorted({1 + -(-blocks // -(-blocks // n)) for n in (1, 2, 4, blocks)}))

    def memory(
        self, latents: int, height: int, width: int, itemsize: int, passes: int = 1, kernels: bool = True
    ) -> int:
        return needed(self, latents, height, width, itemsize, passes, kernels)

    @property
    def held(self) -> int:
        """Return the most frames of the last stage that are held back as those of ghosts may be."""
        return in_groups(self.ghosts * self.time[0] // self.stages[-1].stride[0]) + GROUP

    def parked(self, latents: int, height: int, width: int, itemsize: int, passes: int) -> int:
        """Return the bytes of host memory in which a clip waits between passes."""
        if passes == 1:
            return 0
        last, tokens = self.stages[-1], height * width * self.space[0] ** 2 // self.patch**2
        frames = self.time[0] * (latents - 1) + 1
        groups = -(-(frames // last.stride[0] + 1) // GROUP)
        before = tokens // (last.stride[1] * last.stride[2])
        size = groups * page_locked(GROUP * before * last.width * itemsize)
        if passes > 2:
            groups, noisy = -(-frames // GROUP) + AHEAD, 0
            if self.sampling.velocity or self.sampling.steps > 1:
                noisy = page_locked(4 * GROUP * tokens * COLOURS * self.patch**2)
            size += groups * (page_locked(GROUP * tokens * self.width * itemsize) + noisy)
        return size

    def work(self, size: Size, style: Style = CAUSAL) -> Work:
        frames, h, w, _ = size
        tokens, pixels = frames * h * w, COLOURS * self.patch**2
        flop, values = 2.0 * tokens * self.c_in * self.stages[0].width, tokens * (self.c_in + self.stages[0].width)
        widths = [*(s.width for s in self.stages[1:]), self.width]
        for stage, after in zip(self.stages, widths, strict=True):
            samples = math.prod(stage.stride)
            flop += stage.layers * block_flop(tokens, stage.width, stage.kernel, (frames, h, w))
            flop += 2.0 * tokens * stage.width * after * samples
            values += tokens * (stage.layers * BLOCK_VALUES * stage.width + stage.width + after * samples)
            frames, h, w = frames * stage.stride[0] - (stage.stride[0] - 1), h * stage.stride[1], w * stage.stride[2]
            tokens = frames * h * w
        one = self.layers * block_flop(tokens, self.width, self.kernel, (frames, h, w), 1)
        one += 4.0 * tokens * self.width * pixels
        flop += self.sampling.steps * one
        # Each of these blocks reads the context, too; noise becomes tokens, and tokens a picture.
        values += self.sampling.steps * tokens * ((self.layers * (BLOCK_VALUES + 1) + 2) * self.width + 2 * pixels)
        return Work(flop, flop, values)


def _weights(given: Given, key: Hashable, block: Block, *others: Any) -> Weights:
    """Return a block's weights, made for the first clip that needs them in the order of the kernels that run now.

    Args:
        given: that of the clip; a station must not hold the State itself, as a circle would keep a clip's memory until
            it is collected.
        others: as of `Weights.of`.
    """
    here = kernels_for(block.attn.qkv.weight.device, "auto")
    if key in given.kept and given.kept[key][0] != here:
        del given.kept[key]
    return given.keeps(key, lambda: (here, Weights.of(block, *others).without(block)))[1].whole(block)


def _begins(stations: Sequence[Station], size: int) -> list[int]:
    """Return the stations with which passes after the first begin, if each pass has `size` blocks."""
    begins, count = [], 0
    for i, station in enumerate(stations):
        if count == size and isinstance(station, (Attend, Enter)):
            begins.append(i)
            count = 0
        count += isinstance(station, Attend)
    return begins


def block_flop(tokens: int, width: int, kernel: Kernel, size: tuple[int, int, int], more: int = 0) -> float:
    """Return the FLOP of one block. more: further products of width x width."""
    seen = math.prod(min(k, n) for k, n in zip(kernel, size, strict=True))
    return 2.0 * tokens * width**2 * (16 + more) + 4.0 * tokens * seen * width
