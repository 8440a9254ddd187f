"""The outward face of a VAE object: its form in a terminal, for completion, and under copy and pickle."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn, TypeVar

import torch

#: The documented attributes and methods of a VideoVAE.
SHOWN = (
    "arch", "can_decode", "can_encode", "decode", "decode_raw", "device", "dtype", "encode", "encode_raw",
    "encode_stream", "frames", "last_report", "latent_channels", "options", "path", "plan_decode", "plan_encode",
    "precision", "release", "scale", "spatial", "stream", "temporal",
)  # fmt: skip
T = TypeVar("T")


class Face:
    """The answers of a loaded VAE to `repr`, `dir`, `copy` and `pickle`."""

    arch: str
    precision: str
    device: torch.device
    path: Path | None

    def __repr__(self) -> str:
        """Return its family, precision, device and file."""
        return f"<VideoVAE {self.arch}, {self.precision} on {self.device}{f', {self.path}' if self.path else ''}>"

    def __dir__(self) -> list[str]:
        """Return the documented names only, for completion."""
        return list(SHOWN)

    def __copy__(self: T) -> T:
        """Return a view with the same weights, as `copy.copy` makes it; pickling is refused below."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled."""
        raise TypeError("a VideoVAE cannot be pickled: give other processes the file's path and `load` it there")
