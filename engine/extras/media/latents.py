"""Latent files: our own safetensors and ComfyUI's `.latent`."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import torch

from ... import log
from ...checkpoints.safetensors_file import Entry, opened, read_values
from ...errors import CheckpointError, InputError, one_line
from ...request import LatentLike, as_tensor, check_dense
from ...system.finite import all_finite
from ...system.words import many
from ..output.writing import naming, replacing, stamp, write_tensors
from . import latent_note

if TYPE_CHECKING:
    from ...network.architecture import Architecture

_LEGACY_SCALE = 1 / 0.18215  # ComfyUI's Load Latent applies it to files without the version marker


class DecodesLatents(Protocol):
    """The part of a loaded VAE that says how latents lie in a file."""

    latent_channels: int
    architecture: Architecture


def write_latent(path: str | Path, latent: LatentLike, metadata: Mapping[str, str] | None = None) -> None:
    """Write a host-scaled latent [B, C, T, h, w], or pictures' [B, C, h, w], with optional text metadata (`fps`, ...)
    and the note of the VAE that made it, if the tensor has one.

    The tensor is called `latent`; in a file ending in .latent it is `latent_tensor`, with a version marker, which is
    what ComfyUI's Load Latent reads. An existing file is replaced. Raises InputError for anything else than floats of
    such a shape.
    """
    note, latent = latent_note.found(latent), as_tensor(latent, "a latent")
    check_dense(latent, "a latent")
    if not latent.is_floating_point():
        raise InputError(f"a latent is a tensor of floats, not {latent.dtype}")
    if Path(path).suffix.lower() not in (".safetensors", ".latent"):
        raise InputError(f"{path}: a latent file ends in .safetensors or .latent")
    if latent.ndim not in (4, 5):
        raise InputError(f"{path}: latent shape {list(latent.shape)} is not [batch, channels, time, height, width]")
    if Path(path).suffix.lower() == ".latent":
        marker = torch.empty(0, dtype=torch.float32, device="cpu")
        tensors = {"latent_tensor": latent, "latent_format_version_0": marker}
    else:
        tensors = {"latent": latent}
    write_tensors(path, tensors, {**note, **(metadata or {})})


class LatentFile:
    """Host-scaled latents [B, C, T, h, w] of a file, read when they are needed: file[clip, :, first:end].

    Reads our own key `latent` and ComfyUI's `latent_tensor` (as in ComfyUI, a file without the marker
    `latent_format_version_0` is multiplied by 1/0.18215). SeedVR2's collapsed form [B, C*T, h, w] is unfolded, [C, T,
    h, w] gets a batch axis, [B, C, h, w] one in time; a shape that could be both is refused. Raises InputError for
    anything else, and for NaN or infinite values when they are read.
    """

    def __init__(
        self, path: str | Path, channels: DecodesLatents | int = 16, item: int | None = None, still: bool = False,
        joined: bool = False, folded: bool = True,
    ) -> None:  # fmt: skip
        """Read the header.

        Args:
            path: of the file.
            channels: the VAE that decodes it, which sets `still`, `joined` and `folded`; or C.
            item: the only clip of the file that is used.
            still: four axes are pictures, [B, C, h, w].
            joined: four axes are one clip, [T, C, h, w].
            folded: four axes may be the collapsed form of several latents in time.
        """
        if not isinstance(channels, int):
            a, channels = channels.architecture, channels.latent_channels
            still, joined, folded = a.still, a.joined, a.folded
        self.path = Path(path)
        with _opened(self.path) as (_, metadata, entries):
            self._stamp = stamp(self.path)
            #: Note of the VAE that made it, as from `latent_note.note_of`; empty if the file has none.
            self.vae_note = latent_note.in_metadata(metadata)
            comfy = "latent" not in entries
            self._entry = entries["latent_tensor" if comfy else "latent"]
            shape, kind = list(self._entry.shape), self._entry.dtype
        if kind not in _FLOATS:
            raise InputError(f"{path}: the latent is {_KINDS.get(kind, kind)}; a float type is needed")
        self._scale = 1.0
        if comfy and "latent_format_version_0" not in entries:
            log.once(f"{path}: no latent_format_version_0 marker, so it is multiplied by 1/0.18215 as ComfyUI does")
            self._scale = _LEGACY_SCALE
        self._joined = joined and len(shape) == 4 and shape[1] == channels and (comfy or shape[0] != channels)
        if still and len(shape) == 4:
            whole = [*shape[:2], 1, *shape[2:]]
        elif self._joined:
            whole = [1, channels, shape[0], *shape[2:]]
        else:
            whole = _five_axes(path, shape, channels, comfy, folded)
        if whole[1] != channels:
            raise InputError(f"{path}: has {whole[1]} channels, not {channels} (shape {whole})")
        if not self.vae_note:
            log.once(f"{path}: does not say which VAE made it; check that it is the one that decodes it")
        if not min(whole):
            raise InputError(f"{path}: the latent is empty (shape {whole})")
        if item is not None and not 0 <= item < whole[0]:
            raise InputError(f"--item {item}: {path} holds {many(whole[0], 'clip')}, numbered from 0")
        self._first = item or 0
        self.shape = torch.Size(whole if item is None else [1, *whole[1:]])

    def __getitem__(self, place: tuple[int, slice, slice]) -> torch.Tensor:
        """Return [C, n, h, w] in float32; the slice of channels must be all of them."""
        clip, _, frames = place
        clip, (first, end, _) = self._first + clip, frames.indices(self.shape[2])
        _, channels, count, height, width = self.shape
        plane, end = height * width, max(first, end)
        # Batch and channels come before time in every form but one.
        rows = [((clip * channels + c) * count + first) * plane for c in range(channels)]
        values = (end - first) * plane
        if self._joined:
            rows, values = [first * channels * plane], (end - first) * channels * plane
        with self._open() as file:
            parts = [read_values(file, self._entry, row, values, self.path).float() for row in rows]
        if self._joined:
            part = parts[0].view(-1, channels, height, width).movedim(0, 1)
        else:
            part = torch.stack(parts).view(channels, -1, height, width)
        if self._scale != 1.0:
            part = part * self._scale
        if not all_finite(part):
            raise InputError(f"{self.path}: the latent holds NaN or infinite values; it was broken before it was saved")
        return part

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        with _opened(self.path) as (file, _, _):
            if stamp(self.path) != self._stamp:
                raise InputError(f"{self.path}: was rewritten while it was read; start again")
            yield file

    def read(self) -> torch.Tensor:
        """Return everything as float32 [B, C, T, h, w], with the file's note of the VAE that made it."""
        return latent_note.marked(torch.stack([self[clip, :, :] for clip in range(self.shape[0])]), self.vae_note)


def read_latent(
    path: str | Path, channels: DecodesLatents | int = 16, still: bool = False, joined: bool = False,
    folded: bool = True, item: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return all latents of a file as float32 [B, C, T, h, w], with the file's note of the VAE that made it.

    Args: as for LatentFile: `read_latent(path, vae)`. Raises InputError.
    """
    return LatentFile(path, channels, item, still, joined, folded).read()


def latent_metadata(path: str | Path) -> dict[str, str]:
    """Return the text metadata of a latent file (header only), empty for most files made elsewhere."""
    with _opened(Path(path)) as (_, metadata, _):
        return metadata


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, dict[str, str], dict[str, Entry]]]:
    check_file(path)
    try:
        with opened(path) as (file, metadata, entries):
            if not entries.keys() & {"latent", "latent_tensor"}:
                found = ", ".join(one_line(name, 100) for name in sorted(entries)[:3])
                raise InputError(f"{path}: not a latent file, it has no tensor latent or latent_tensor (found {found})")
            yield file, metadata, entries
    except CheckpointError as error:
        reason = str(error).removeprefix(f"{one_line(path)}: ")
        raise InputError(f"{path}: not a readable safetensors latent file ({reason})") from error


def check_file(path: Path) -> None:
    """Raise InputError if there is no ordinary file."""
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if not path.is_file():
        raise InputError(f"{path}: is a {'folder' if path.is_dir() else 'pipe or a device'}, not a file")


def _five_axes(path: str | Path, shape: list[int], channels: int, batched: bool, folded: bool) -> list[int]:
    """Return the shape as [B, C, T, h, w]."""
    if len(shape) == 5:
        return shape
    if len(shape) == 4:
        collapsed = shape[1] == channels or (folded and shape[1] > 0 and shape[1] % channels == 0)
        unbatched = shape[0] == channels and not batched
        if collapsed and unbatched:
            raise InputError(
                f"{path}: shape {shape} may mean [channels, time, height, width] or"
                f" [batch, {channels} x time, height, width]; save it with five axes"
            )
        if collapsed:
            return [shape[0], channels, shape[1] // channels, *shape[2:]]
        if unbatched:
            return [1, *shape]
    raise InputError(f"{path}: shape {shape} is not [batch, {channels}, time, height, width]")


class LatentWriter:
    """A latent file of one clip whose latents arrive one after the other.

    `with LatentWriter(path) as w: w.write(latent)` for each part, then `w.finish(notes)`. The latents wait on the disk,
    in the folder of the file, in the order of arrival; the file has them channel by channel.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._waiting: BinaryIO | None = None
        self._shape: list[int] = []
        self._note: dict[str, str] = {}

    def __enter__(self) -> LatentWriter:
        with naming(self.path):
            self._waiting = tempfile.TemporaryFile(dir=self.path.parent)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        # Closing writes what still waits in memory; its error would hide the first one.
        with suppress(OSError) if kind is not None else naming(self.path):
            self._waiting.close()

    def write(self, latent: LatentLike) -> None:
        """Add latents [1, C, n, h, w], all of one C, h and w. The first one's note of the VAE that made it goes into
        the file. Raises InputError for anything else than floats of such a shape."""
        note, latent = latent_note.found(latent), as_tensor(latent, "a latent")
        check_dense(latent, "a latent")
        given = list(latent.shape)
        if latent.ndim != 5 or given[0] != 1 or not latent.is_floating_point():
            raise InputError(f"{self.path}: each part is floats [1, channels, time, height, width], not {latent.dtype} "
                             f"{given}")  # fmt: skip
        if not self._shape:
            self._shape, self._note = [*given[:2], 0, *given[3:]], note
        if (given[1], *given[3:]) != (self._shape[1], *self._shape[3:]):
            raise InputError(f"{self.path}: a part of {given} does not fit those before, {self._shape}")
        self._shape[2] += given[2]
        with naming(self.path):
            self._waiting.write(latent[0].transpose(0, 1).float().cpu().contiguous().numpy().tobytes())

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._shape)

    def finish(self, metadata: Mapping[str, str] | None = None) -> None:
        """Write the file in its place; call this inside the `with`. Raises InputError where nothing was written."""
        if not self._shape:
            raise InputError(f"{self.path}: no latents were written")
        _, channels, count, height, width = self._shape
        size = 4 * math.prod(self._shape)
        tensor = {"dtype": "F32", "shape": self._shape, "data_offsets": [0, size]}
        if self.path.suffix.lower() == ".latent":
            marker = {"dtype": "F32", "shape": [0], "data_offsets": [size, size]}
            header: dict[str, Any] = {"latent_tensor": tensor, "latent_format_version_0": marker}
        else:
            header = {"latent": tensor}
        if notes := {**self._note, **(metadata or {})}:
            header["__metadata__"] = notes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with replacing(self.path) as temporary, temporary.open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            plane = 4 * height * width
            for channel in range(channels):
                for frame in range(count):
                    self._waiting.seek((frame * channels + channel) * plane)
                    out.write(self._waiting.read(plane))


#: safetensors' names of the types that latents may have, and torch's names of others that occur.
_FLOATS = frozenset({"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2"})
_KINDS = {"I8": "int8", "U8": "uint8", "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool"}
