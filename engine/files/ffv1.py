"""The checksums of FFV1: FFmpeg's decoder fills in slices whose sum is wrong, and marks nothing."""

from __future__ import annotations

import zlib

#: Behind each slice: its length, a byte for errors, and its checksum.
_LENGTH, _FOOTER = 3, 8
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


class Checksums:
    """Whether the slices of a stream's packets are what was written; a stream without checksums never differs."""

    def __init__(self) -> None:
        self._there: bool | None = None

    def differ(self, packet: object) -> bool:
        """Tell whether a packet (bytes, or what gives them) is damaged, by the checksums that the first one shows."""
        data = bytes(packet)
        if not data:
            return False
        if self._there is None:
            self._there = whole(data)
        return self._there and not whole(data)


def whole(data: bytes) -> bool:
    """Tell whether a packet is a row of slices whose checksums are right."""
    end = len(data)
    while end > 0:
        at = end - _FOOTER
        start = at - int.from_bytes(data[at : at + _LENGTH], "big") if at >= 0 else -1
        # The sum is over bits from the highest on; zlib's, from the lowest: the same over bytes turned round.
        if start < 0 or zlib.crc32(data[start:end].translate(_REVERSED), 0xFFFFFFFF) != 0xFFFFFFFF:
            return False
        end = start
    return True
