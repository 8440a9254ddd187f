"""GGUF headers: what is accepted, and that every lie in a field is refused in one line."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys

import pytest
import torch
from zerowaste_vae.engine.checkpoints import gguf_types, read_checkpoint
from zerowaste_vae.engine.errors import CheckpointError, InputError

VALUES = [i / 2 - 4 for i in range(16)]
DATA = struct.pack("<16f", *VALUES)
HUGE = (2**40, 2**62, 2**63, 2**64 - 1)
# 3 * this is 16 modulo 2^64.
WRAPS_TO_16 = 16 * pow(3, -1, 2**64) % 2**64


def assert_refused(path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    for word in words:
        assert word in message


def accepted_files(c) -> dict[str, bytes]:
    w = c.tensor("a.weight", (4, 4))
    flat = c.tensor("a.weight", (16,))
    key = "comfy.gguf.orig_shape.a.weight"
    five = [2, 2, 2, 2, 1]
    return {
        "plain": c.build([c.entry("general.architecture", c.STRING, "pig")], [w], DATA),
        "no metadata": c.build([], [w], DATA),
        "version 2": c.build([], [w], DATA, version=2),
        "empty architecture": c.build([c.entry("general.architecture", c.STRING, "")], [w], DATA),
        "architecture is a number": c.build([c.entry("general.architecture", 4, 7)], [w], DATA),
        "trailing bytes": c.build([], [w], DATA + b"\xff" * 100),
        "gap": c.build([], [c.tensor("a.weight", (4, 4), offset=4096)], bytes(4096) + DATA),
        "alignment 8": c.build([c.entry("general.alignment", 4, 8)], [w], DATA, align=8),
        "five dimensions": c.build([], [c.tensor("a.weight", (2, 2, 2, 2, 1))], DATA),
        "recorded shape int32": c.build([c.entry(key, c.ARRAY, (5, five))], [flat], DATA),
        "recorded shape int64": c.build([c.entry(key, c.ARRAY, (11, five))], [flat], DATA),
        "recorded shape uint32": c.build([c.entry(key, c.ARRAY, (4, five))], [flat], DATA),
        "recorded shape uint64": c.build([c.entry(key, c.ARRAY, (10, five))], [flat], DATA),
        "recorded shape of another tensor": c.build(
            [c.entry("comfy.gguf.orig_shape.other", c.ARRAY, (5, [3, 3]))], [flat], DATA
        ),
    }


def refused_files(c) -> dict[str, tuple[bytes, str]]:
    w = c.tensor("a.weight", (4, 4))
    flat = c.tensor("a.weight", (16,))
    good = c.build([], [w], DATA)

    def recorded(kind: int, items: list) -> bytes:
        return c.build([c.entry("comfy.gguf.orig_shape.a.weight", c.ARRAY, (kind, items))], [flat], DATA)

    def one(*args, **kwargs) -> bytes:
        return c.build([], [c.tensor(*args, **kwargs)], DATA)

    def key(*args, **kwargs) -> bytes:
        return c.build([c.entry(*args, **kwargs)], [w], DATA)

    swapped = good[:4] + good[4:8][::-1] + good[8:]
    files = {
        "version 1": (c.build([], [w], DATA, version=1), "version 1"),
        "big endian": (swapped, "big-endian"),
        "no tensors": (c.build(), "no tensors"),
        "a tensor too few": (c.build([], [w], DATA, counts=(2, 0)), "tensor 1"),
        "a key too few": (c.build([], [w], DATA, counts=(1, 1)), "name of tensor 0"),
        "empty key": (key("", 0, 1), "key 0"),
        "key not UTF-8": (key(b"\xff\xfe", 0, 1), "UTF-8"),
        "text not UTF-8": (key("k", c.STRING, b"\xff\xfe"), "UTF-8"),
        "key twice": (c.build([c.entry("k", 0, 1)] * 2, [w], DATA), "twice"),
        "boolean 2": (key("k", 7, 2), "boolean"),
        "array of boolean 2": (key("k", c.ARRAY, (7, [1, 2])), "boolean"),
        "unknown value type": (c.build([c.text("k") + struct.pack("<IQ", 13, 0)], [w], DATA), "type 13"),
        "unknown element type": (c.build([c.text("k") + struct.pack("<IIQ", 9, 13, 1)], [w], DATA), "type 13"),
        "nested arrays": (c.build([c.text("k") + struct.pack("<IIQ", 9, 9, 1) * 3000], [w], DATA), "nested"),
        "array past the end": (key("k", c.ARRAY, (10, []), count=1000), "8000 bytes"),
        "array of texts past the end": (key("k", c.ARRAY, (8, []), count=1000), "8000 bytes"),
        "arrays together": (
            c.build([c.entry(f"k{i}", c.ARRAY, (0, [0] * 2**18)) for i in range(17)], [w], DATA), "k16",
        ),
        "arrays of texts together": (
            c.build([c.entry(f"k{i}", c.ARRAY, (8, [""] * 2**18)) for i in range(5)], [w], DATA), "k4",
        ),
        "alignment as 64 bit": (key("general.alignment", 10, 32), "alignment"),
        "alignment as text": (key("general.alignment", c.STRING, "32"), "alignment"),
        "alignment as array": (key("general.alignment", c.ARRAY, (4, [32])), "alignment"),
        "shard": (key("split.count", 2, 3), "merge"),
        "rank 65": (one("a", (1,) * 65), "65 dimensions"),
        "rank 2^32-1": (one("a", (4, 4), rank=2**32 - 1), "dimensions"),
        "empty dimension": (one("a", (4, 0)), "empty shape"),
        "product wraps to 0": (one("a", (2**32, 2**32)), str(2**64)),
        "product wraps to 16": (one("a", (WRAPS_TO_16, 3)), "elements"),
        "bytes wrap": (one("a", (2**62,)), "elements"),
        "removed type": (one("a", (4, 4), 31), "removed"),
        "type without decoder": (one("a", (32, 32), 9), "Q8_1"),
        "unknown type": (one("a", (4, 4), 999), "999"),
        "row does not divide": (one("a", (32, 3, 3, 3), 8), "Q8_0"),
        "scalar block type": (one("a", (), 8), "Q8_0"),
        "name twice": (c.build([], [w, w], DATA), "twice"),
        "empty name": (one("", (4, 4)), "name"),
        "name with NUL": (one("a\0b", (4, 4)), "control"),
        "name not UTF-8": (one(b"\xff", (4, 4)), "UTF-8"),
        "long name": (one("x" * 513, (4, 4)), "513"),
        "offset unaligned": (one("a", (4, 4), offset=4), "alignment"),
        "offset past the end": (one("a", (4, 4), offset=2**20), "truncated"),
        "offset wraps backwards": (one("a", (4, 4), offset=2**64 - 32), "truncated"),
        "overlap": (c.build([], [w, c.tensor("b", (4, 4), offset=32)], DATA + bytes(32)), "overlap"),
        "recorded product": (recorded(5, [2, 2, 2, 3]), "24 elements"),
        "recorded -1": (recorded(5, [-1, 4]), "positive"),
        "recorded 0": (recorded(5, [0, 16]), "positive"),
        "recorded empty": (recorded(5, []), "positive"),
        "recorded floats": (recorded(6, [4.0, 4.0]), "positive"),
        "recorded seven": (recorded(5, [16, 1, 1, 1, 1, 1, 1]), "positive"),
        "recorded product wraps": (recorded(10, [3, WRAPS_TO_16]), "elements"),
        "recorded scalar": (c.build([c.entry("comfy.gguf.orig_shape.a.weight", 5, 16)], [flat], DATA), "positive"),
        "NaN": (c.build([], [w], struct.pack("<16f", *[float("nan")] * 16)), "a.weight contains NaN"),
        "infinity": (c.build([], [w], struct.pack("<16f", *VALUES[1:], float("-inf"))), "a.weight contains NaN"),
    }
    block = struct.pack("<e", float("inf")) + bytes(range(32))
    rows = c.tensor("a.weight", (4096, 32), 8)
    files["infinite scale"] = (c.build([], [rows], bytes(34) * 4095 + block), "a.weight contains NaN")
    files["NaN scale"] = (c.build([], [rows], b"\xff\x7f" + bytes(range(32)) + bytes(34) * 4095), "contains NaN")
    for n in (0, 1, 3, 48, 2**31):
        files[f"alignment {n}"] = (key("general.alignment", 4, n), "alignment")
    for n in HUGE:
        files[f"{n} tensors"] = (c.build([], [w], DATA, counts=(n, 0)), "tensors")
        files[f"{n} keys"] = (c.build([], [w], DATA, counts=(1, n)), "keys")
        files[f"key of {n}"] = (c.build([c.text("k", n)], [w], DATA), "key 0")
        files[f"text of {n}"] = (c.build([c.text("k") + struct.pack("<IQ", 8, n)], [w], DATA), "value of k")
        files[f"array of {n}"] = (key("k", c.ARRAY, (0, []), count=n), "array")
        files[f"name of {n}"] = (c.build([], [c.text("a", n)], DATA, counts=(1, 0)), "name")
        files[f"size {n}"] = (one("a", (n,)), "elements")
    return files


def test_accepted(craft, save):
    for name, blob in accepted_files(craft).items():
        tensor = read_checkpoint(save(blob)).tensors["a.weight"]
        assert tensor.flatten().tolist() == VALUES, name
    assert tuple(read_checkpoint(save(accepted_files(craft)["recorded shape int64"])).tensors["a.weight"].shape) == (
        2, 2, 2, 2, 1,
    )  # fmt: skip


def test_refused(craft, save):
    for name, (blob, words) in refused_files(craft).items():
        try:
            assert_refused(save(blob), words)
        except BaseException:
            print("case:", name)
            raise


def test_every_truncation_is_refused(craft, save):
    blob = craft.build(
        [craft.entry("general.architecture", craft.STRING, "wan"), craft.entry("n", craft.ARRAY, (5, [1, 2]))],
        [craft.tensor("a.weight", (4, 4))],
        DATA,
    )
    for length in range(len(blob)):
        assert_refused(save(blob[:length]))


def test_scalars_and_plain_types(craft, save):
    """gguf-py writes scalars with rank 0; integers and F64 come as they are."""
    data = struct.pack("<f28x", 2.5) + struct.pack("<4d", 1, 2, 3, 1e300) + struct.pack("<4i", 1, -2, 3, 4)
    infos = [craft.tensor("s", (), 0), craft.tensor("d", (4,), 28, 32), craft.tensor("i", (2, 2), 26, 64)]
    tensors = read_checkpoint(save(craft.build([], infos, data))).tensors
    assert tensors["s"].shape == () and tensors["s"].item() == 2.5
    assert tensors["d"].dtype == torch.float64 and tensors["d"][3] == 1e300
    assert tensors["i"].dtype == torch.int32 and tensors["i"].tolist() == [[1, -2], [3, 4]]


def test_metadata_become_python_values(craft, save):
    entries = [
        craft.entry("norm_num_groups", 4, 8),
        craft.entry("scale", 12, 0.9152),
        craft.entry("flag", 7, 1),
        craft.entry("config", craft.STRING, '{"vae": {}}'),
        craft.entry("names", craft.ARRAY, (8, ["a", "ü"])),
        craft.entry("flags", craft.ARRAY, (7, [1, 0])),
    ]
    metadata = read_checkpoint(save(craft.build(entries, [craft.tensor("a", (16,))], DATA))).metadata
    assert metadata == {
        "norm_num_groups": 8, "scale": 0.9152, "flag": True, "config": '{"vae": {}}', "names": ["a", "ü"],
        "flags": [True, False],
    }  # fmt: skip


# Runs in a fresh process: a hang ends by the timeout, and its peak memory is the files' own.
SHARED_CASES = """
import sys, torch
from zerowaste_vae.engine.checkpoints import gguf_types, read_checkpoint
from zerowaste_vae.engine.errors import CheckpointError, InputError
def peak():  # KiB
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
before = peak()
for path in sys.argv[1:]:
    try:
        read_checkpoint(path)
        print("accept")
    except CheckpointError as error:
        assert str(error).startswith(path) and len(str(error).splitlines()) == 1
        print("reject")
assert peak() - before < 200 * 1024, (before, peak())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory from /proc")
def test_shared_hostile_files(shared, tmp_path):
    folder = shared / "gguf" / "hostile"
    spec = importlib.util.spec_from_file_location("craft_hostile", folder / "craft.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    accept = set(json.loads((folder / "expected.json").read_text())["accept"])
    assert accept < module.cases.keys() and len(module.cases) == 112
    for name, (blob, _) in module.cases.items():
        (tmp_path / name).write_bytes(blob)
    paths = [str(tmp_path / name) for name in module.cases]
    out = subprocess.run(
        [sys.executable, "-c", SHARED_CASES, *paths], capture_output=True, text=True, check=False, timeout=180
    )
    assert out.returncode == 0, out.stderr
    got = dict(zip(module.cases, out.stdout.split(), strict=True))
    assert got == {name: "accept" if name in accept else "reject" for name in module.cases}


def test_missing_gguf_package(monkeypatch):
    """It is one line with the command that installs it."""
    gguf_types.types.cache_clear()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InputError) as said:
        gguf_types.types()
    cure = f'"{sys.executable}" -m pip install "gguf>=0.13.0"'
    assert str(said.value) == f"GGUF files need the Python package gguf, which is missing. Install it with: {cure}"
