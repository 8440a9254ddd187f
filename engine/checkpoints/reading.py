"""Open and read a weight file without trusting it: regular files only, ordinary reads, one-line errors.

Files are read, never mapped: a mapped file that another program truncates kills the process with SIGBUS.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import BinaryIO

import torch

from ..errors import CheckpointError, one_line
from ..log import info
from ..system.finite import all_finite

LOG_AFTER_SECONDS = 5.0
# Cancelling and progress stay responsive, and the kernel copies at full speed well before this size.
READ_CHUNK = 16 << 20

ProgressCallback = Callable[[int, int], None]


def failure(path: Path, message: str) -> CheckpointError:
    """Return a CheckpointError that names the file and fits on one line."""
    return CheckpointError(f"{one_line(str(path))}: {one_line(message, 1000)}")


def os_failure(path: Path, error: OSError, action: str) -> CheckpointError:
    """Return an error of the operating system as a one-line CheckpointError."""
    return failure(path, f"cannot {action}: {error.strerror or type(error).__name__}")


@contextmanager
def open_regular(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Provide the opened file and its size in bytes. Folders, pipes and devices are refused before they can block."""
    try:
        # Before open(): opening a pipe would wait for a writer.
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise failure(path, "is a folder; name the weight file inside it")
        if not stat.S_ISREG(mode):
            raise failure(path, "is not a regular file")
        file = open(path, "rb")  # noqa: SIM115 - closed below, and errors of the body must not look like open errors
    except OSError as error:
        raise os_failure(path, error, "open the file") from error
    except ValueError as error:  # a NUL byte in the path
        raise failure(path, f"is not a usable path ({error})") from error
    with file:
        yield file, os.fstat(file.fileno()).st_size


def read_into(file: BinaryIO, offset: int, target: memoryview, path: Path, what: str) -> None:
    """Fill `target` (bytes) from `offset`; raise CheckpointError if the file ends early."""
    try:
        file.seek(offset)
        done = 0
        while done < len(target):
            got = file.readinto(target[done : done + READ_CHUNK])
            if not got:
                raise failure(path, f"the file shrank while {what} was being read; copy or download it again")
            done += got
    except OSError as error:
        raise os_failure(path, error, f"read {what}") from error


def read_tensor_bytes(file: BinaryIO, offset: int, size: int, path: Path, what: str) -> torch.Tensor:
    """Return `size` bytes at `offset` as a new uint8 tensor; `.view(dtype)` makes it the tensor without a copy."""
    raw = allocate((size,), torch.uint8, path, what)
    read_into(file, offset, memoryview(raw.numpy()), path, what)
    return raw


def allocate(shape: tuple[int, ...], dtype: torch.dtype, path: Path, what: str) -> torch.Tensor:
    """Return an uninitialised CPU tensor; running out of memory is the file's error, in one line."""
    try:
        return torch.empty(shape, dtype=dtype, device="cpu")
    except (RuntimeError, MemoryError) as error:
        size = torch.Size(shape).numel() * dtype.itemsize
        raise failure(path, f"not enough memory for {what} ({size / 2**30:.2f} GB)") from error


class Progress:
    """Counts bytes read, reports them to the caller, and logs a line every few seconds when a load is slow."""

    def __init__(self, path: Path, total: int, callback: ProgressCallback | None) -> None:
        self.path, self.total, self.callback = path, total, callback
        self.done = 0
        self.next_log = monotonic() + LOG_AFTER_SECONDS

    def add(self, count: int) -> None:
        self.done += count
        if self.callback:
            self.callback(self.done, self.total)
        if monotonic() >= self.next_log:
            self.next_log = monotonic() + LOG_AFTER_SECONDS
            info(f"reading {self.path.name}: {self.done / 2**20:.0f} of {self.total / 2**20:.0f} MiB")


def check_finite(name: str, tensor: torch.Tensor, path: Path) -> None:
    """Refuse a tensor with NaN or infinity, by its name."""
    if tensor.is_floating_point() and not all_finite(tensor):
        raise not_finite(name, path)


def not_finite(name: str, path: Path) -> CheckpointError:
    return failure(path, f"tensor {name} contains NaN or infinity; the file is damaged or was converted wrongly")
