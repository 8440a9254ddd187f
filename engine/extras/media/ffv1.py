"""The checksums of FFV1: FFmpeg's decoder conceals slices whose sum is wrong, and does not report them."""

from __future__ import annotations

import zlib

#: Bytes after each slice: its length in the first 3 of 8, then a byte for errors, and the checksum.
_LENGTH, _FOOTER = 3, 8
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


class Checksums:
    """Detects changed slices in a stream's packets; packets of a stream without checksums always pass."""

    def __init__(self) -> None:
        self._there: bool | None = None

    def differ(self, packet: object) -> bool:
        """Return whether a packet (bytes, or an object that converts to bytes) is damaged. The first packet shows
        whether the stream has checksums."""
        data = bytes(packet)
        if not data:
            return False
        if self._there is None:
            self._there = whole(data)
        return self._there and not whole(data)


def whole(data: bytes) -> bool:
    """Return whether a packet is a row of slices with correct checksums."""
    end = len(data)
    while end > 0:
        at = end - _FOOTER
        start = at - int.from_bytes(data[at : at + _LENGTH], "big") if at >= 0 else -1
        # FFV1 sums bits from the highest on, zlib from the lowest: reversing the bits of each byte makes them equal.
        if start < 0 or zlib.crc32(data[start:end].translate(_REVERSED), 0xFFFFFFFF) != 0xFFFFFFFF:
            return False
        end = start
    return True
