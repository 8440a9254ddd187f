"""A GGUF builder that can lie in every field, and a small network's weights in several dialects."""

from __future__ import annotations

import struct
from types import SimpleNamespace

import pytest
import torch

FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def text(value: bytes | str, length: int | None = None) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def entry(key: bytes | str, kind: int, value: object, count: int | None = None) -> bytes:
    """A key/value; for kind ARRAY `value` is (element kind, list) and `count` may lie about its length."""
    head = text(key) + struct.pack("<I", kind)
    if kind == STRING:
        return head + text(value)
    if kind == ARRAY:
        element, items = value
        body = b"".join(text(i) if element == STRING else struct.pack("<" + FORMATS[element], i) for i in items)
        return head + struct.pack("<IQ", element, len(items) if count is None else count) + body
    return head + struct.pack("<" + FORMATS[kind], value)


def tensor(name: bytes | str, shape: tuple, type_id: int = 0, offset: int = 0, rank: int | None = None) -> bytes:
    """A tensor info; `shape` in torch order, `rank` may lie."""
    head = text(name) + struct.pack("<I", len(shape) if rank is None else rank)
    return head + struct.pack(f"<{len(shape)}QIQ", *reversed(shape), type_id, offset)


def build(entries=(), tensors=(), data=b"", *, magic=b"GGUF", version=3, counts=None, align=32) -> bytes:
    tensor_count, key_count = counts or (len(tensors), len(entries))
    head = magic + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % align) + data


@pytest.fixture(scope="session")
def craft() -> SimpleNamespace:
    return SimpleNamespace(build=build, entry=entry, tensor=tensor, text=text, STRING=STRING, ARRAY=ARRAY)


@pytest.fixture
def save(tmp_path):
    """save(bytes, name) -> path."""

    def write(blob: bytes, name: str = "vae.gguf"):
        path = tmp_path / name
        path.write_bytes(blob)
        return path

    return write


@pytest.fixture(scope="session")
def wan_shapes() -> dict[str, tuple[int, ...]]:
    """Some of Wan 2.1's keys: 5-D, 4-D and linear-like convolutions, gammas, and a temporal one."""
    return {
        "decoder.conv1.weight": (8, 16, 3, 3, 3),
        "decoder.conv1.bias": (8,),
        "decoder.middle.0.residual.0.gamma": (8, 1, 1, 1),
        "decoder.middle.0.residual.2.weight": (8, 8, 3, 3, 3),
        "decoder.middle.0.residual.2.bias": (8,),
        "decoder.middle.1.norm.gamma": (8, 1, 1),
        "decoder.middle.1.to_qkv.weight": (24, 8, 1, 1),
        "decoder.middle.1.to_qkv.bias": (24,),
        "decoder.upsamples.3.resample.1.weight": (4, 8, 3, 3),
        "decoder.upsamples.3.resample.1.bias": (4,),
        "decoder.upsamples.3.time_conv.weight": (16, 8, 3, 1, 1),
        "decoder.upsamples.3.time_conv.bias": (16,),
        "decoder.upsamples.4.shortcut.weight": (8, 4, 1, 1, 1),
        "decoder.upsamples.4.shortcut.bias": (8,),
        "conv2.weight": (16, 16, 1, 1, 1),
        "conv2.bias": (16,),
    }


@pytest.fixture(scope="session")
def wan_weights(wan_shapes) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=g).half() for name, shape in wan_shapes.items()}
