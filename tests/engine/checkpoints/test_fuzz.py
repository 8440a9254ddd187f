"""Seeded mutations of valid files: read, or refused in one line; never another exception, a hang or a flood of memory.

ZEROWASTE_FUZZ sets the number of mutations (default 2,000) for a longer run by hand.
"""

from __future__ import annotations

import os
import random
import struct
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.checkpoints import read_checkpoint
from zerowaste_vae.engine.errors import CheckpointError

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

COUNT = int(os.environ.get("ZEROWASTE_FUZZ", "2000"))
INTERESTING = (0, 1, 2, 3, 7, 8, 9, 13, 31, 32, 255, 2**16, 2**31, 2**32 - 1, 2**33, 2**40, 2**62, 2**63, 2**64 - 1)
MEMORY_LIMIT_MB = 200


def valid_files(folder: Path, weights: dict[str, torch.Tensor]) -> list[bytes]:
    """A GGUF with every kind of value and several tensor types, a merged one, and two safetensors files."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(folder / "a.gguf", "wan")
    writer.add_uint32("norm_num_groups", 8)
    writer.add_bool("flag", True)
    writer.add_float64("scale", 0.5)
    writer.add_array("names", ["a", "b", "ccc"])
    writer.add_array("numbers", [1, 2, 3])
    for name, tensor in weights.items():
        writer.add_tensor(name, tensor.numpy())
    kinds = gguf.GGMLQuantizationType
    for name, kind in (("q8", kinds.Q8_0), ("q4", kinds.Q4_0)):
        rows = gguf.quants.quantize(rng.standard_normal((2, 256), dtype=np.float32), kind)
        writer.add_array(f"comfy.gguf.orig_shape.{name}.weight", [2, 4, 4, 4, 4])
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=kind)
    writer.add_tensor("q4k.weight", np.full((1, 144), 17, np.uint8), raw_dtype=kinds.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(weights, folder / "a.safetensors", {"norm_num_groups": "8"})
    scaled = {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), "a.scale_weight": torch.tensor(2.0)}
    save_file({"vae." + n: t for n, t in (weights | scaled).items()}, folder / "b.safetensors")
    return [(folder / name).read_bytes() for name in ("a.gguf", "a.gguf", "a.safetensors", "b.safetensors")]


def mutate(rng: random.Random, blob: bytes) -> bytes:
    """One to four edits, most of them in the header: flips, foreign lengths, cuts, insertions, repeats."""
    data = bytearray(blob)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if rng.random() < 0.15 else rng.randrange(min(len(data), 4096))
        edit = rng.randrange(7)
        if edit == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif edit == 1:
            data[at] = rng.randrange(256)
        elif edit in (2, 3):
            size, form = rng.choice([(4, "<I"), (8, "<Q")])
            value = rng.choice(INTERESTING) if edit == 2 else rng.getrandbits(8 * size)
            data[at : at + size] = struct.pack(form, value % 2 ** (8 * size))
        elif edit == 4:
            del data[rng.randrange(len(data)) :]
        elif edit == 5:
            data[at:at] = rng.randbytes(rng.randint(1, 16))
        else:
            other = rng.randrange(len(data))
            data[at : at + 16] = data[other : other + rng.randint(1, 32)]
        if not data:
            break
    return bytes(data)


def peak_mb() -> float:
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory from /proc")
def test_mutated_files(tmp_path, wan_weights):
    files = valid_files(tmp_path, wan_weights)
    path = tmp_path / "mutated"
    for blob in files:
        path.write_bytes(blob)
        read_checkpoint(path)
    rng = random.Random(20250101)
    before, outcomes = peak_mb(), Counter()
    for i in range(COUNT):
        path.write_bytes(mutate(rng, files[i % len(files)]))
        try:
            tensors = read_checkpoint(path).tensors
        except CheckpointError as error:
            assert str(error).startswith(str(path)) and len(str(error).splitlines()) == 1, (i, error)
            outcomes["refused"] += 1
        except Exception as error:
            raise AssertionError(f"mutation {i} raised {type(error).__name__}: {error}") from error
        else:
            assert all(torch.isfinite(t).all() for t in tensors.values() if t.is_floating_point()), i
            outcomes["read"] += 1
    print(dict(outcomes))
    # Both must occur often, or the mutations test nothing.
    assert min(outcomes["read"], outcomes["refused"]) > COUNT // 20
    assert peak_mb() - before < MEMORY_LIMIT_MB
