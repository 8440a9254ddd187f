"""MP4 in fragments: a file that a kill or a full disk cuts off plays to its last complete fragment, and more can be
appended. PyAV's muxer alone leaves half a fragment at the end, and appends nothing."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ...errors import InputError

_MEDIA = (b"moof", b"mdat")


class Scan(NamedTuple):
    """State of a fragmented file: the bytes up to the end of its last complete fragment, its fragments and their
    samples, and the header's bytes (b"": not even the header is complete)."""

    size: int
    fragments: int
    samples: int
    header: bytes


def scan(path: Path) -> Scan:
    """Find the complete part of a file with one track."""
    size = fragments = samples = waiting = 0
    header = b""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        file.seek(0)
        while True:
            at = file.tell()
            length, kind = _box(file)
            if not length or at + length > end:
                return Scan(size, fragments, samples, header)
            if kind == b"moov":
                file.seek(0)
                header = file.read(at + length)
                size = at + length
            elif kind == b"moof":
                file.seek(at)
                waiting = _samples(file.read(length))
                if not waiting:  # damaged
                    return Scan(size, fragments, samples, header)
            elif kind == b"mdat":
                size, fragments, samples = at + length, fragments + 1, samples + waiting
            file.seek(at + length)


def _box(file: BinaryIO) -> tuple[int, bytes]:
    head = file.read(8)
    if len(head) < 8:
        return 0, b""
    length, kind = struct.unpack(">I4s", head)
    if length == 1:
        more = file.read(8)
        length = struct.unpack(">Q", more)[0] if len(more) == 8 else 0
    return length, kind


def _samples(moof: bytes) -> int:
    """Return the sample count in the boxes moof/traf/trun of one track."""
    count, waiting = 0, [(8, len(moof))]
    while waiting:
        at, end = waiting.pop()
        while at + 8 <= end:
            length, kind = struct.unpack_from(">I4s", moof, at)
            if length < 8:
                break
            if kind == b"traf":
                waiting.append((at + 8, min(at + length, end)))
            elif kind == b"trun" and at + 16 <= min(at + length, end):
                count += struct.unpack_from(">I", moof, at + 12)[0]
            at += length
    return count


class Appended:
    """A file to which a muxer appends fragments, after existing ones or as a new file.

    The header, which the muxer writes first, must equal the existing one.
    """

    def __init__(self, path: Path, before: Scan | None) -> None:
        """Open the file. before: its scan, to go on at the end of its last complete fragment; None: start a new
        file."""
        self._path, self._header, self._skips = path, b"" if before is None else before.header, before is not None
        #: Bytes up to the end of the last complete fragment, or of the header.
        self.complete = 0 if before is None else before.size
        self._file = path.open("wb" if before is None else "r+b", buffering=0)
        self._file.truncate(self.complete)
        self._file.seek(self.complete)
        self._waiting: list[bytes] = []
        self._head = b""
        self._left = 0
        self._kind = b""

    def write(self, data: bytes) -> int:
        """Take parts of boxes of any size from the muxer."""
        total, data = len(data), bytes(data)
        while data:
            if not self._left:
                need = 16 if self._head[:4] == b"\0\0\0\1" else 8
                self._head, data = self._head + data[: need - len(self._head)], data[need - len(self._head) :]
                if len(self._head) == 8 and self._head[:4] == b"\0\0\0\1":
                    continue
                if len(self._head) < need:
                    continue
                self._kind = self._head[4:8]
                length = self._head[8:] if need == 16 else self._head[:4]
                self._left = int.from_bytes(length, "big") - need
                self._put(self._head)
                self._head = b""
            part, data = data[: self._left], data[self._left :]
            self._left -= len(part)
            self._put(part)
            if not self._left:
                self._end()
        return total

    def _put(self, data: bytes) -> None:
        if self._skips and self._kind not in _MEDIA:
            if self._header[: len(data)] != data:
                raise InputError(f"{self._path}: another version of the encoder wrote it; delete it to start over")
            self._header = self._header[len(data) :]
            return
        self._waiting.append(data)

    def _end(self) -> None:
        """Write a box when it is complete."""
        if self._kind in (b"moov", b"mdat") and self._waiting:
            # Write a fragment in one go: players refuse a file that ends within a fragment's beginning.
            data = memoryview(b"".join(self._waiting))
            self._waiting.clear()
            left = data
            while left:
                left = left[self._file.write(left) :]
            self.complete += len(data)

    def close(self) -> None:
        """Close the file with complete fragments only."""
        try:
            self._file.truncate(self.complete)
        finally:
            self._file.close()
