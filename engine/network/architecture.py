"""Describe an architecture to the engine: the keys of its files, its sizes, its networks as Programs."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from .packing import SIDE, PackedLatents
from .plain import Network
from .program import Program
from .sections import Sections

Shapes = Mapping[str, tuple[int, ...]]
#: Channels of a network's levels, from full to lowest resolution.
Widths = tuple[int, ...]
#: Groups of most published networks' norms; files with another number give it in their metadata (norm_num_groups).
DEFAULT_GROUPS = 32
#: Name in a checkpoint's metadata of the JSON text that lies beside its file, in files under diffusers' names.
BESIDE = "config.json"


@dataclass(frozen=True)
class Sizes:
    """Sizes that many families have and no others. Widths go from full to lowest resolution, e.g. (128, 256, 512, 512);
    None: that component is absent from the file."""

    encoder_widths: Widths | None
    decoder_widths: Widths | None
    latent_channels: int = 16
    norm_groups: int | None = DEFAULT_GROUPS


class Prunable:
    """Sizes of networks whose residual blocks may be `pruned` to their shortcuts. Their text, which names the uses of
    prebuilt kernels, does not tell of blocks where none is."""

    pruned: tuple[str, ...]

    def __repr__(self) -> str:
        shown = (f for f in fields(self) if f.name != "pruned" or self.pruned)  # type: ignore[arg-type]
        return f"{type(self).__qualname__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in shown)})"


@dataclass(frozen=True)
class KeySet:
    """The tensor names by which a family's files are recognised: all names of one entry of `keys` must be in the file.

    Each entry names tensors of a decoder or of an encoder, at least two that no family later in the registry has, so
    that a single foreign tensor never changes a file's family. native: maps names in a file to the family's original
    ones (None: the name has none); absent if files have only one set of names. title: name in messages, for families
    that are not run.
    """

    name: str
    keys: tuple[tuple[str, ...], ...]
    native: Callable[[list[str]], dict[str, str | None]] | None = None
    title: str = ""

    def fits(self, present: set[str]) -> bool:
        """Return whether a file with these names belongs to the family."""
        return any(present.issuperset(names) for names in self.keys)


def in_either_half(*names: str) -> tuple[tuple[str, ...], ...]:
    """Return the keys of a family by names that its decoder and its encoder have."""
    return tuple(tuple(f"{half}.{name}" for name in names) for half in ("decoder", "encoder"))


@dataclass(frozen=True)
class Draws:
    """Normal distributions of random weights that keep a family's activations of order one. Standard deviations:
    `matrices` / fan-in^0.5 for matrices, `norms` (around 1) for norms' weights, `vectors` for other vectors.

    named: (end of a parameter's name, mean, deviation) of exceptions. fixed: (name, values) of parameters that are not
    drawn, one value for all elements or one for each.
    """

    matrices: float = 1.2
    norms: float = 0.2
    vectors: float = 0.1
    named: tuple[tuple[str, float, float], ...] = ()
    fixed: tuple[tuple[str, tuple[float, ...]], ...] = ()


@dataclass(frozen=True)
class Published:
    """A family's published VAE: its name for people, its sizes, and how its files are named and found.

    config: the sizes, as from `Architecture.configure`. files: a regular expression for the names of its files,
    whatever their case. words: search terms for it.
    """

    title: str
    config: Any
    files: str
    words: tuple[str, ...]
    #: Metadata of its files: (key, value).
    metadata: tuple[tuple[str, str], ...] = ()
    #: Random weights, for benchmarks without its files.
    draws: Draws = Draws()
    #: Published files of the family with other sizes: (regular expression for their names, sizes).
    others: tuple[tuple[str, Any], ...] = ()

    def sizes(self, file: str) -> Any:
        """Return the sizes of the networks in a published file of this name."""
        return next((sizes for name, sizes in self.others if re.search(name, file, re.IGNORECASE)), self.config)


@dataclass(frozen=True)
class Architecture:
    """One VAE family: its keys, compression factors, and the functions that read and describe its networks.

    `configure(shapes, norm_groups)` reads the sizes from a file's tensor shapes; `encoder(config)` and
    `decoder(config)` return Programs, of the components that the file has (`program`).
    """

    keys: KeySet
    spatial: int
    temporal: int
    #: External latents are the network's times this.
    scale: float
    configure: Callable[[Shapes, int | None], Any]
    encoder: Callable[[Any], Program]
    decoder: Callable[[Any], Program]
    #: The meaning of precision "auto" on a GPU that computes in it.
    native: str = "fp16"
    #: ComfyUI's own class runs in fp16 as well as in bf16, the native type; fp16_fast then has activations in fp16.
    fp16: bool = False
    #: None: plans need a file.
    published: Published | None = None
    #: Returns the fields that differ for a file's sizes, with their values.
    sized: Callable[[Any], dict[str, Any]] | None = None
    #: Returns the module between the network's latents and external ones, with its name in the file.
    packing: Callable[[Any], tuple[str, PackedLatents]] | None = None
    #: External latents of pictures have an axis for time nevertheless.
    timed: bool = False
    #: Latents are frames of one clip, although each becomes one frame; ComfyUI has them, as pictures, in a batch.
    joined: bool = False
    #: ComfyUI's latents of it may have channels and time in one axis, [B, C * T, h, w].
    folded: bool = False
    #: ComfyUI's own VAE of this family encodes only whole latents, from the middle of the frame.
    crops: bool = True
    #: Parameters that every file of it holds, but networks of other programs do not: (name, values).
    constants: tuple[tuple[str, tuple[float, ...]], ...] = ()
    #: Full-size pixels per step that fill a GPU. At 1280x720, one frame per step of a network that works at full size
    #: is as fast as eight (H200).
    step_pixels: int = 1 << 20
    #: Replaces `configure` if metadata are needed besides a file's shapes.
    described: Callable[[Shapes, Mapping[str, object]], Any] | None = None
    #: The sections of clips whose latents are all made of frames of their own. With more than one latent they count the
    #: frames of a decode, too.
    sections: Sections | None = None
    #: Its products take a file's int8 codes as they are.
    coded: bool = False
    #: ComfyUI's class of such a network, whose rule of blending tiles depends on its version.
    host: str = ""
    #: Files of this layout hold VAEs with different latents, which only their weights tell apart.
    several: bool = False
    #: An even number of latents decodes to `temporal` frames of each, of the first one too, and all frames are encoded,
    #: those that fill no latent with the first.
    pairs: bool = False
    #: Turns the parameters of a file of this name into those of the network, where they differ. Raises InputError.
    prepared: Callable[[Mapping[str, Tensor], str], dict[str, Tensor]] | None = None
    #: Parameters that stay in fp32 whatever the type of the others.
    wide: tuple[str, ...] = ()
    #: Returns the name of a file's sizes, where they are not the published ones; "" if they have none.
    variant: Callable[[Any], str] = lambda _: ""
    #: A regular expression for names of tensors that its files may have, on which no frame and no latent depends.
    unused: str = r"(?!)"
    #: Turns sizes into those of a network with diffusers' numbers, of a family that has others there than in ComfyUI.
    in_diffusers: Callable[[Any], Any] | None = None

    def activations(self, asked: str, half_sums: bool) -> str:
        """Return the type of activations, "fp16" or "bf16", of an approximate precision such as "int8".

        half_sums: the GPU multiplies faster with sums in fp16.
        """
        return "fp16" if self.fp16 and half_sums and asked == "fp16_fast" else self.native

    def frames(self, latents: int) -> int:
        """Return the frames that `latents` of a clip decode to."""
        if self.pairs and latents % 2 == 0:
            return self.temporal * latents
        return self.temporal * (latents - 1) + 1 if self.counted is None else self.counted.decoded(latents)

    def latents(self, frames: int) -> int:
        """Return the latents that `frames` of a clip are encoded to; trailing frames that fill none are not read."""
        return (frames - 1) // self.temporal + 1 if self.counted is None else self.counted.encoded(frames)

    @property
    def counted(self) -> Sections | None:
        """Return the sections by which frames and latents are counted, if there are any."""
        return self.sections if self.sections is not None and self.sections.latents > 1 else None

    @property
    def in_tiles(self) -> bool:
        """Return whether its networks divide frames and clips themselves, as a part of the model."""
        return self.sections is not None and self.sections.in_tiles

    def reads(self, first: int, end: int) -> tuple[int, int]:
        """Return the frames [a, b) that must be there before latents [first, end) of a clip can be encoded."""
        if self.sections is not None:
            return self.sections.reads(first, end)
        return self.temporal * first, self.temporal * (end - 1) + 1

    def filled(self, frames: int) -> int:
        """Return the least number of frames, from this one on, whose latents decode to the same number."""
        if self.pairs:
            return frames if frames % (2 * self.temporal) == 1 else frames + -frames % (2 * self.temporal)
        return frames + -(frames - 1) % self.temporal if self.counted is None else self.counted.filled(frames)

    def completed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a network's parameters with the constants of the components that it has."""
        halves = {name.partition(".")[0] for name in tensors}
        missing = ((n, v) for n, v in self.constants if n not in tensors and n.partition(".")[0] in halves)
        made = {name: torch.tensor(values, dtype=torch.float32, device="cpu") for name, values in missing}
        return {**tensors, **made}

    def config_of(self, shapes: Shapes, metadata: Mapping[str, object], norm_groups: int | None = None) -> Any:
        """Return the sizes of a file's networks. Raises InputError."""
        with self._possible():
            if self.described is not None:
                return self.described(shapes, metadata)
            return self.configure(shapes, norm_groups)

    @property
    def name(self) -> str:
        return self.keys.name

    def preparing(self, path: Path | None) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None:
        """Return `prepared` for this file."""
        return self.prepared and functools.partial(self.prepared, file="" if path is None else path.name)

    def build(self, config: Any) -> Network:
        """Build the network of these sizes. Raises InputError if no network has them."""
        with self._possible():
            halves = (self.program(half, config) for half in ("encoder", "decoder"))
            return Network(config, *halves, self.packing and self.packing(config))

    @contextmanager
    def _possible(self) -> Iterator[None]:
        """Turn errors in the body into InputError: files can hold any shapes and metadata, and what fails is the file's
        error."""
        try:
            yield
        except InputError:
            raise
        except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                f"its tensors' shapes or its metadata are not those of a {self.name} VAE ({type(error).__name__}); "
                "download the file again"
            ) from error

    def of(self, config: Any) -> Architecture:
        """Return this architecture with the compression of a file of these sizes."""
        return self if self.sized is None else replace(self, **self.sized(config))

    @property
    def still(self) -> bool:
        """Return whether it is for pictures: each latent is one, independent of the latents around it."""
        return self.temporal == 1 and not self.joined

    @property
    def flat(self) -> bool:
        """Return whether external latents have no axis for time."""
        return self.still and not self.timed

    @property
    def side(self) -> int:
        """Return the rows, and columns, of the network's latents per pixel of external latents."""
        return 1 if self.packing is None else SIDE

    def program(self, half: str, config: Any) -> Program | None:
        """Return the Program of "encoder" or "decoder"; None if the file lacks it."""
        return None if getattr(config, f"{half}_widths") is None else getattr(self, half)(config)

    def programs(self, config: Any) -> list[Program]:
        """Return the Programs of the components that exist."""
        return [p for half in ("encoder", "decoder") if (p := self.program(half, config)) is not None]


def colours_of(config: Any) -> tuple[int, int]:
    """Return the channels of an input pixel of networks of these sizes, and of an output pixel."""
    return getattr(config, "encoder_colours", 3), getattr(config, "decoder_colours", 3)


def level_widths(shapes: Shapes, names: list[str]) -> Widths | None:
    """Return the sizes of these biases (they survive every file dialect); None if one of them is missing."""
    if not all(n in shapes for n in names):
        return None
    return tuple(length(shapes, n) for n in names)


def both_widths(
    shapes: Shapes, levels: int, down: str, up: str, upward: bool = True
) -> tuple[Widths | None, Widths | None]:
    """Return the widths of the encoder and of the decoder.

    down, up: the name of a level's bias in each, with {} for its number. upward: the decoder counts its levels from the
    lowest resolution; False: from the highest."""
    numbers = range(levels)
    return (
        level_widths(shapes, [down.format(i) for i in numbers]),
        level_widths(shapes, [up.format(i) for i in (reversed(numbers) if upward else numbers)]),
    )


def latent_of(shapes: Shapes, first: str, last: str, usual: int, axes: int = 5) -> int:
    """Return the channels of a latent: those that the decoder reads, if the weight of its first layer has kept its
    shape, else half of those that the encoder's last layer makes; `usual` if the file has neither.

    first, last: names of these layers. axes: of a convolution's weight."""
    weight = shapes.get(f"decoder.{first}.weight", ())
    return weight[1] if len(weight) == axes else length(shapes, f"encoder.{last}.bias", 2 * usual) // 2


def length(shapes: Shapes, name: str, absent: int = 0) -> int:
    """Return the size of a bias; `absent` if the file has none. Raises InputError if it is empty."""
    shape = shapes.get(name, (absent,))
    if name in shapes and (not shape or 0 in shape):
        raise InputError(f"{name} has the shape {shape}: a list of numbers is needed; download the file again")
    return shape[0]


def rows(shapes: Shapes, row: str) -> int:
    """Count the numbered parts in a row, up to the last one of which the file has at least two tensors; gaps count as
    missing parts. One tensor alone is no part of a network."""
    found = (re.match(rf"{re.escape(row)}\.(\d{{1,3}})\.", name) for name in shapes)
    numbers = Counter(int(m[1]) for m in found if m)
    return 1 + max((number for number, tensors in numbers.items() if tensors > 1), default=-1)


def holds(shapes: Shapes, *places: str) -> bool:
    """Return whether a file has any tensor of one of these layers."""
    return any(name.startswith(f"{place}.") for place in places for name in shapes)


def pruned_blocks(shapes: Shapes, blocks: Iterable[str], shortcut: str = "shortcut") -> tuple[str, ...]:
    """Return the names of those residual blocks of which a file holds at most the shortcut: a block that lacks only a
    part of its other tensors is damaged, not pruned."""
    kept = {name[: m.start()] for name in shapes for m in re.finditer(rf"\.(?!{shortcut}\.)", name)}
    return tuple(name for name in blocks if name not in kept)


def groups_of(norm_groups: int | None, *widths: Widths | None) -> int:
    """Return the group count for norms of all these widths; None: the default number, if it divides all. Raises
    InputError."""
    normed = [w for each in widths for w in each or ()]
    if norm_groups is None:
        if any(w % DEFAULT_GROUPS for w in normed):
            raise InputError(
                f"widths {normed} do not all divide into {DEFAULT_GROUPS} norm groups and the file names no "
                "norm_num_groups; pass norm_groups=N"
            )
        return DEFAULT_GROUPS
    if norm_groups < 1 or any(w % norm_groups for w in normed):
        raise InputError(f"norm_groups={norm_groups} does not divide all widths {normed}")
    return norm_groups
