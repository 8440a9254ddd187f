"""read_checkpoint: told apart by content, safetensors edge cases, prefixes, and files that change under it."""

from __future__ import annotations

import builtins
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae.engine.checkpoints import read_checkpoint, reading
from zerowaste_vae.engine.errors import CheckpointError
from zerowaste_vae.engine.extras.convert import convert_checkpoint
from zerowaste_vae.engine.loader import load

SAMPLES = {
    "wan21.pig_fp32-f16": ("wan2.1", 0.0),
    "wan21.gc_t1-bf16": ("wan2.1", 2**-8),
    "wan21.flat-q8_0": ("wan2.1", 0.5 / 127 * 1.01),  # half a step, and the scale itself is rounded to fp16
    "ltxv095.pig_fp32-f16": ("ltx_v2", 0.0),
}


def refusal(path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message


def raw_safetensors(header: dict | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize("sample", SAMPLES)
def test_shared_samples_load_to_their_weights(shared, sample):
    """Relative to each tensor's largest value: exact for f16, rounding of the type for the others."""
    reference, bound = SAMPLES[sample]
    weights = load_file(shared / "golden" / "other" / f"{reference}.weights.safetensors")
    tensors = read_checkpoint(shared / "gguf" / "samples" / f"{sample}.gguf").tensors
    assert {n for n in weights if not n.startswith("encoder.downsamples.")} == tensors.keys()
    for name, tensor in tensors.items():
        assert tensor.shape == weights[name].shape
        error = (tensor.double() - weights[name].double()).abs().max() / weights[name].double().abs().max()
        assert error <= bound, name


def test_safetensors_equals_the_library(tmp_path):
    kinds = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool)
    tensors = {str(k): (torch.arange(-4, 8).reshape(3, 4) / 2).to(k) for k in kinds}
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, {"norm_num_groups": "8", "note": "x"})
    checkpoint = read_checkpoint(str(path))
    assert checkpoint.metadata == {"norm_num_groups": "8", "note": "x"} and checkpoint.path == path
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        read = checkpoint.tensors[name]
        assert read.dtype == tensor.dtype and torch.equal(read, tensor)


def test_content_decides_not_the_suffix(tmp_path, craft, save):
    save_file({"a": torch.ones(3)}, tmp_path / "really_safetensors.gguf")
    assert read_checkpoint(tmp_path / "really_safetensors.gguf").tensors["a"].tolist() == [1, 1, 1]
    blob = craft.build([], [craft.tensor("a", (3,))], struct.pack("<3f", 1, 2, 3))
    assert read_checkpoint(save(blob, "really_gguf.safetensors")).tensors["a"].tolist() == [1, 2, 3]


class Bomb:
    """Unpickling this makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


@pytest.mark.parametrize("name", ["vae.pt", "vae.ckpt", "vae.safetensors", "vae.gguf"])
@pytest.mark.parametrize("protocol", [0, 2, 4, "zip"])
def test_pickles_are_refused_unopened(tmp_path, name, protocol):
    trap = tmp_path / "opened"
    path = tmp_path / name
    if protocol == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickle.dumps(Bomb(str(trap))))
    else:
        path.write_bytes(pickle.dumps(Bomb(str(trap)), protocol=protocol))
    message = refusal(path)
    assert protocol == 0 or "pickle" in message
    assert not trap.exists()


@pytest.mark.parametrize(
    ("blob", "words"),
    [
        (b"", "empty"),
        (b"GG", "neither"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "git lfs pull"),
        (b"\n<!DOCTYPE html><html></html>", "web page"),
        (b'{"metadata": {}, "weight_map": {}}', "merge the shards"),
        (b"\0" * 4096, "neither"),
    ],
)
def test_other_kinds_of_files(save, blob, words):
    assert words in refusal(save(blob, "vae.safetensors"))


def test_damaged_safetensors(save):
    item = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    none, data = {**item, "data_offsets": [0, 0]}, struct.pack("<2f", 1, 2)
    assert read_checkpoint(save(raw_safetensors({"a": item}, data))).tensors["a"].tolist() == [1, 2]
    whole = raw_safetensors({"a": item}, data)
    for length in range(len(whole)):
        refusal(save(whole[:length]))
    cases = {
        "longer than its tensors": raw_safetensors({"a": item}, data + b"\0"),
        "offsets past the end": raw_safetensors({"a": {**item, "data_offsets": [0, 80], "shape": [20]}}, data),
        "offsets swapped": raw_safetensors({"a": {**item, "data_offsets": [8, 0]}}, data),
        "overlap": raw_safetensors({"a": item, "b": item}, data),
        "shape of another size": raw_safetensors({"a": {**item, "shape": [3]}}, data),
        "negative shape": raw_safetensors({"a": {**item, "shape": [-2]}}, data),
        "overflowing shape": raw_safetensors({"a": {**item, "shape": [2**62, 8]}}, data),
        "no elements": raw_safetensors({"a": {**none, "shape": [0, 2**63]}, "b": item}, data),
        "no elements, strides": raw_safetensors({"a": {**none, "shape": [0, 2**62, 2]}, "b": item}, data),
        "unknown type": raw_safetensors({"a": {**item, "dtype": "F31"}}, data),
        "no tensors": raw_safetensors({"__metadata__": {"a": "b"}}),
        "not a table": raw_safetensors(b'{"a": 1}'),
        "deep": raw_safetensors(b'{"a":' + b"[" * 100_000),
        "not UTF-8": raw_safetensors(b'{"\xff": {}}'),
        "header length": struct.pack("<Q", 2**40) + b"{}",
        "NaN": raw_safetensors({"a": item}, struct.pack("<2f", 1, float("nan"))),
        "infinity": raw_safetensors({"a": item}, struct.pack("<2f", 1, float("inf"))),
    }
    for name, blob in cases.items():
        message = refusal(save(blob))
        assert name not in ("NaN", "infinity") or "tensor a contains NaN" in message
        assert "no elements" not in name or "damaged safetensors header: tensor a has the shape (0, " in message


def test_one_shard_is_not_a_checkpoint(tmp_path):
    for name, refused in (("vae-00001-of-00003", True), ("vae-00001-of-00001", False), ("vae-1-of-3", False)):
        path = tmp_path / f"{name}.safetensors"
        save_file({"a": torch.ones(1)}, path)
        if refused:
            assert "one of 3 shards" in refusal(path)
        else:
            assert read_checkpoint(path).tensors.keys() == {"a"}


def test_names_cannot_break_the_one_line(save):
    item = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    bad = "bad\nname\x1b[31m\u202edne\u200b"
    message = refusal(save(raw_safetensors({bad: item}, struct.pack("<f", float("nan")))))
    assert "bad name?[31m?dne? contains NaN" in message
    keys = raw_safetensors({bad + "x" * 5000: item}, struct.pack("<f", 1))
    with pytest.raises(CheckpointError) as raised:
        load(save(keys), device="cpu")
    assert "bad name?[31m?dne?x" in str(raised.value) and len(str(raised.value)) < 2000


def test_places_that_are_no_files(tmp_path, monkeypatch):
    assert "folder" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "missing.gguf")
    with pytest.raises(CheckpointError, match="usable path"):
        read_checkpoint("nul\0byte.gguf")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        assert "regular file" in refusal(tmp_path / "pipe")
    path = tmp_path / "secret.gguf"
    path.write_bytes(b"GGUF")

    def denied(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(builtins, "open", denied)
    assert "Permission denied" in refusal(path)


@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_file_that_shrinks_while_it_is_read(tmp_path, craft, form):
    """Another program truncates the file after the first tensor: an error, where a mapped file would kill us."""
    count = 1 << 16
    path = tmp_path / f"vae.{form}"
    if form == "gguf":
        infos = [craft.tensor(n, (count,), 0, i * count * 4) for i, n in enumerate("abc")]
        path.write_bytes(craft.build([], infos, bytes(3 * count * 4)))
    else:
        save_file({n: torch.zeros(count) for n in "abc"}, path)
    half = path.stat().st_size // 2

    with pytest.raises(CheckpointError, match=r"shrank while tensor \w was being read"):
        read_checkpoint(path, progress=lambda done, total: os.truncate(path, half))


def test_disk_error_while_reading(save, craft, monkeypatch):
    path = save(craft.build([], [craft.tensor("a", (16,))], bytes(64)))

    def broken(*args, **kwargs):
        raise OSError(5, "Input/output error")

    real = builtins.open

    def opened(*args, **kwargs):
        file = real(*args, **kwargs)
        return type("Broken", (), {
            "read": file.read, "seek": file.seek, "fileno": file.fileno, "readinto": broken,
            "__enter__": lambda self: self, "__exit__": lambda self, *a: file.close(),
        })()  # fmt: skip

    monkeypatch.setattr(builtins, "open", opened)
    assert "Input/output error" in refusal(path)


def test_progress_counts_the_bytes_of_tensors(save, craft, monkeypatch, caplog):
    infos = [craft.tensor("a", (16,)), craft.tensor("b", (8,), 0, 64)]
    path = save(craft.build([], infos, bytes(96)))
    seen = []
    read_checkpoint(path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(64, 96), (96, 96)]
    monkeypatch.setattr(reading, "LOG_AFTER_SECONDS", -1.0)  # as if every step took long
    with caplog.at_level("INFO", "zerowaste_vae"):
        read_checkpoint(path)
    assert "reading vae.gguf" in caplog.text


@pytest.mark.parametrize("prefix", ["first_stage_model.", "vae.", "model.", "module."])
@pytest.mark.parametrize("form", ["gguf", "safetensors"])
def test_prefix_is_stripped(tmp_path, craft, wan_weights, prefix, form):
    """A full checkpoint: another model's tensor is dropped even if it could not be loaded (NaN)."""
    foreign = torch.full((4,), float("nan"), dtype=torch.float16)
    tensors = {prefix + n: t for n, t in wan_weights.items()} | {"diffusion.blocks.0.weight": foreign}
    path = tmp_path / f"full.{form}"
    if form == "safetensors":
        save_file(tensors, path)
    else:
        infos, data = [], b""
        for name, tensor in tensors.items():
            infos.append(craft.tensor(name, tuple(tensor.shape), 1, len(data)))
            data += tensor.numpy().tobytes()
            data += bytes(-len(data) % 32)
        path.write_bytes(craft.build([], infos, data))
    read = read_checkpoint(path).tensors
    assert read.keys() == wan_weights.keys()
    assert all(torch.equal(read[n], t) for n, t in wan_weights.items())


def test_names_of_an_unknown_model_stay(tmp_path):
    save_file({"model.a": torch.ones(1), "model.b": torch.ones(1)}, tmp_path / "a.safetensors")
    assert read_checkpoint(tmp_path / "a.safetensors").tensors.keys() == {"model.a", "model.b"}


@pytest.mark.parametrize("part", ["weight.absmax", "qweight", "wscales", "weight._data", "weight_s_rel", "SCB"])
def test_packed_formats_found(tmp_path, part):
    """Other programs' packed weights are known by the tensors stored with them."""
    path = tmp_path / "a.safetensors"
    save_file({"a.weight": torch.zeros(4, 2, dtype=torch.int8), f"a.{part}": torch.ones(4)}, path)
    assert f"a.{part} is of a weight packed in a way that is not supported" in refusal(path)


def test_packed_weights_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"a.weight": torch.zeros(4, dtype=torch.uint8), "a.weight_scale": torch.ones(1)}, path)
    assert "a.weight is quantised" in refusal(path)
    save_file({"a.weight": torch.zeros(4, 2, dtype=torch.float8_e4m3fn), "a.weight_scale": torch.ones(4, 2)}, path)
    assert "scale of a.weight" in refusal(path)
    save_file({"a.weight": torch.full((4,), float("nan")).to(torch.float8_e4m3fn)}, path)
    assert "a.weight contains NaN" in refusal(path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak memory from /proc")
def test_memory_is_the_result_and_little_else(tmp_path):
    """64 MB of F32 and 64 MB decoded from Q8_0, read in a fresh process: no second copy of either."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "wan")
    writer.add_tensor("f", np.zeros((1 << 14, 1 << 10), np.float32))
    writer.add_tensor(
        "q", np.zeros((1 << 14, (1 << 10) // 32 * 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    script = """
import sys
import gguf.quants
from zerowaste_vae.engine.checkpoints import read_checkpoint
def status(key):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) / 1024
before = status("VmRSS")
kept = read_checkpoint(sys.argv[1])
print(status("VmHWM") - before)
"""
    out = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "a.gguf")], capture_output=True, text=True, check=True
    )
    assert float(out.stdout) < 128 + 40


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf"])
def test_shapes_only(tmp_path, make_vae_file, suffix):
    path = make_vae_file()
    if suffix == ".gguf":
        path = tmp_path / "small.gguf"
        convert_checkpoint(make_vae_file(), path, "q8_0")
    whole, header = read_checkpoint(path), read_checkpoint(path, shapes_only=True)
    assert {n: t.shape for n, t in header.tensors.items()} == {n: t.shape for n, t in whole.tensors.items()}
    assert header.metadata == whole.metadata
    assert all(t.is_meta for t in header.tensors.values())
