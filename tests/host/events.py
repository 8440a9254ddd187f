"""What a running ComfyUI sends over its websocket."""

from __future__ import annotations

import base64
import json
import os
import socket
import struct


class Socket:
    """As much of a websocket client as listening to ComfyUI takes."""

    def __init__(self, port: int, path: str) -> None:
        self._raw = socket.create_connection(("127.0.0.1", port), timeout=60)
        key = base64.b64encode(os.urandom(16)).decode()
        self._raw.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._stream = self._raw.makefile("rb")
        assert b" 101 " in self._stream.readline()
        while self._stream.readline().strip():
            pass

    def message(self, timeout: float) -> dict | bytes | None:
        """The next message: JSON, or the bytes of a binary one; None for pings."""
        self._raw.settimeout(timeout)
        opcode, text, last = 0, b"", False
        while not last:
            first, length = self._stream.read(2)
            last, opcode = bool(first & 0x80), opcode or first & 0x0F
            length &= 0x7F
            if length >= 126:
                (length,) = struct.unpack(">H", self._stream.read(2)) if length == 126 else struct.unpack(
                    ">Q", self._stream.read(8)
                )  # fmt: skip
            text += self._stream.read(length)
        return json.loads(text) if opcode == 1 else text if opcode == 2 else None

    def close(self) -> None:
        self._stream.close()
        self._raw.close()
