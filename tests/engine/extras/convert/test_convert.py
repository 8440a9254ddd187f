"""convert_checkpoint and save_checkpoint: what is written is what is read, by us and by the gguf package."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae.engine import load
from zerowaste_vae.engine.checkpoints import Checkpoint, read_checkpoint
from zerowaste_vae.engine.errors import CheckpointError, InputError
from zerowaste_vae.engine.extras.cli.convert import decode_psnr
from zerowaste_vae.engine.extras.convert import convert, convert_checkpoint, save_checkpoint
from zerowaste_vae.engine.extras.convert.quantize import TYPES

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.fixture(scope="session")
def half_file(make_vae_file, tmp_path_factory):
    """A seeded SeedVR2 VAE of widths 32 to 64 as fp16 safetensors, as the published file is."""
    path = tmp_path_factory.mktemp("half") / "vae_fp16.safetensors"
    source = load_file(make_vae_file((32, 64, 64, 64), (32, 64, 64, 64), 8))
    save_file({n: t.half() for n, t in source.items()}, path, {"norm_num_groups": "8"})
    return path


@pytest.mark.parametrize("kind", TYPES)
def test_gguf_package_reads_the_same(half_file, tmp_path, kind):
    path = tmp_path / "out.gguf"
    result = convert_checkpoint(half_file, path, kind)
    source, ours = load_file(half_file), read_checkpoint(path)
    assert ours.metadata["norm_num_groups"] == "8" and result.bytes_written == path.stat().st_size
    assert {n: t.shape for n, t in ours.tensors.items()} == {n: t.shape for n, t in source.items()}
    reader = gguf.GGUFReader(path)
    assert len(reader.tensors) == len(source)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(values.reshape(-1), ours.tensors[tensor.name].float().numpy().reshape(-1)), tensor.name
    for name, error in result.errors.items():
        measured = (ours.tensors[name].double() - source[name].double()).norm() / source[name].double().norm()
        assert error == pytest.approx(float(measured), rel=1e-6)
    assert all(torch.equal(ours.tensors[n].half(), t) for n, t in source.items() if n not in result.errors)


@pytest.mark.parametrize("kind", ["q8_0", "q6_k", "q5_1", "q4_k"])
def test_convolutions_are_really_quantised(half_file, tmp_path, kind):
    result = convert_checkpoint(half_file, tmp_path / "out.gguf", kind)
    for name, tensor in load_file(half_file).items():
        plain = tensor.ndim < 2 or "conv_in" in name or "conv_out" in name
        assert result.types[name] == ("F16" if plain else kind.upper()), name


def test_size_and_quality_of_q8_0(make_vae_file, tmp_path):
    """53 % of f16: 34 bytes for 32 values instead of 64, and a few tensors in full."""
    source = tmp_path / "f16.safetensors"
    weights = load_file(make_vae_file((32, 64, 128, 128), (32, 64, 128, 128), 8))
    save_file({n: t.half() for n, t in weights.items()}, source, {"norm_num_groups": "8"})
    result = convert_checkpoint(source, tmp_path / "q8.gguf", "q8_0")
    assert 34 / 64 < result.bytes_written / source.stat().st_size < 0.56
    z = torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    reference = load(source, device="cpu")
    assert decode_psnr(reference, load(tmp_path / "q8.gguf", device="cpu"), z) > 42  # measured 43.8


def test_there_and_back_is_bit_equal(half_file, tmp_path):
    """f16 through GGUF and back; and f32 and bf16 sources keep their values in a type that holds them."""
    convert_checkpoint(half_file, tmp_path / "a.gguf", "f16")
    convert_checkpoint(tmp_path / "a.gguf", tmp_path / "b.safetensors", "f16")
    before, after = load_file(half_file), load_file(tmp_path / "b.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    assert read_checkpoint(tmp_path / "b.safetensors").metadata == {"norm_num_groups": "8"}
    # A quantised file converted to f32 holds the values it decodes to.
    convert_checkpoint(half_file, tmp_path / "q.gguf", "q4_k")
    result = convert_checkpoint(tmp_path / "q.gguf", tmp_path / "q.safetensors", "f32")
    decoded = read_checkpoint(tmp_path / "q.gguf").tensors
    assert not result.errors and set(result.types.values()) == {"F32"}
    assert all(torch.equal(t.float(), decoded[n].float()) for n, t in load_file(tmp_path / "q.safetensors").items())


def test_metadata_both_ways(tmp_path):
    tensors = {"a.weight": torch.ones(2, 3)}
    metadata = {"norm_num_groups": 8, "scale": 0.5, "on": True, "names": ["a", "b"], "n": [1, -2], "big": -(2**40)}
    save_checkpoint(Checkpoint(tensors, metadata), tmp_path / "a.gguf", "f32")
    again = read_checkpoint(tmp_path / "a.gguf").metadata
    assert {k: again[k] for k in metadata} == metadata and again["general.architecture"] == "unknown"
    convert_checkpoint(tmp_path / "a.gguf", tmp_path / "a.safetensors", "f32")
    assert read_checkpoint(tmp_path / "a.safetensors").metadata == {
        "norm_num_groups": "8", "scale": "0.5", "on": "true", "names": '["a", "b"]', "n": "[1, -2]",
        "big": str(-(2**40)),
    }  # fmt: skip


def test_strided_tensors_saved(tmp_path):
    """Transposed and strided tensors are saved with the values that they show."""
    tensors = {"a.weight": torch.arange(64.0).reshape(8, 8).t(), "b.weight": torch.ones(4).expand(3, 4)}
    tensors["c.weight"] = tensors["a.weight"]  # shared memory
    for name in ("a.gguf", "a.safetensors"):
        save_checkpoint(Checkpoint(tensors), tmp_path / name, "f32")
        read = read_checkpoint(tmp_path / name).tensors
        assert all(torch.equal(read[n], t) for n, t in tensors.items())


def test_prefixed_merged_and_diffusers_sources(tmp_path, craft, wan_weights):
    """A stable-diffusion.cpp file becomes one with the real shapes; diffusers names stay what they were."""
    infos, data = [], b""
    for name, tensor in wan_weights.items():
        stored = tensor.flatten(0, 1) if tensor.ndim == 5 else tensor
        infos.append(craft.tensor("vae." + name, tuple(stored.shape), 1, len(data)))
        data += stored.numpy().tobytes() + bytes(-stored.numel() * 2 % 32)
    (tmp_path / "sd.gguf").write_bytes(craft.build([], infos, data))
    convert_checkpoint(tmp_path / "sd.gguf", tmp_path / "a.safetensors", "f16")
    read = load_file(tmp_path / "a.safetensors")
    assert all(torch.equal(read[n], t) for n, t in wan_weights.items())
    names = {"decoder.mid_block.resnets.0.norm1.gamma": torch.ones(8, 1, 1, 1)}
    save_file(names, tmp_path / "d.safetensors")
    convert_checkpoint(tmp_path / "d.safetensors", tmp_path / "d.gguf", "f16")
    assert read_checkpoint(tmp_path / "d.gguf", native_names=False).tensors.keys() == names.keys()


def test_what_cannot_be_converted(half_file, tmp_path):
    def refused(error, words, *args, **kwargs):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(error, match=words) as caught:
            convert_checkpoint(*args, **kwargs)
        assert len(str(caught.value).splitlines()) == 1
        assert sorted(tmp_path.iterdir()) == before

    (tmp_path / "there.gguf").write_bytes(b"mine")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    (tmp_path / "folder.gguf").mkdir()
    save_file({"a.weight": torch.full((2, 2), 1e6)}, tmp_path / "large.safetensors")
    save_file({"a.weight": torch.ones(2, 2, dtype=torch.bool)}, tmp_path / "bool.safetensors")
    out = tmp_path / "out.gguf"
    refused(InputError, "exists", half_file, tmp_path / "there.gguf", "f16")
    refused(InputError, "folder", half_file, tmp_path / "folder.gguf", "f16", force=True)
    refused(InputError, "does not exist", half_file, tmp_path / "no" / "out.gguf", "f16")
    refused(InputError, "q9_0", half_file, out, "q9_0")
    refused(InputError, "end in", half_file, tmp_path / "out.bin", "f16")
    refused(InputError, "cannot hold", half_file, tmp_path / "out.safetensors", "q8_0")
    refused(InputError, "same file", tmp_path / "large.safetensors", tmp_path / "large.safetensors", "f32", force=True)
    refused(InputError, "bool", tmp_path / "bool.safetensors", out, "f16")
    refused(CheckpointError, "65504", tmp_path / "large.safetensors", out, "f16")
    refused(CheckpointError, "truncated", tmp_path / "bad.gguf", out, "f16")
    refused(CheckpointError, "No such file", tmp_path / "none.gguf", out, "f16")
    assert (tmp_path / "there.gguf").read_bytes() == b"mine"
    assert convert_checkpoint(half_file, tmp_path / "there.gguf", "f16", force=True).path == tmp_path / "there.gguf"


@pytest.mark.parametrize("name", ["out.gguf", "out.safetensors"])
def test_full_disk_leaves_nothing(half_file, tmp_path, monkeypatch, name):
    """The disk fills in the middle of the file: the old output, the input and the folder are as before."""
    target = tmp_path / name
    target.write_bytes(b"old")
    before = half_file.read_bytes()

    def fill(*args, **kwargs):
        next(tmp_path.glob(".*.part")).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(convert, "write_gguf" if name.endswith("gguf") else "write_tensors", fill)
    if name.endswith("safetensors"):
        monkeypatch.setattr(convert, "write_tensors", lambda path, *a: (path.write_bytes(b"half"), fill()))
    with pytest.raises(CheckpointError, match="No space left") as caught:
        convert_checkpoint(half_file, target, "f16", force=True)
    assert str(caught.value).startswith(str(target))
    assert target.read_bytes() == b"old" and half_file.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the size of files")
@pytest.mark.parametrize("name", ["out.gguf", "out.safetensors"])
def test_file_size_limit_stops_the_real_write(half_file, tmp_path, name):
    """The system itself refuses to let the file grow."""
    script = """
import resource, signal, sys
from zerowaste_vae.engine.extras.convert import convert_checkpoint
from zerowaste_vae.engine.errors import CheckpointError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    convert_checkpoint(sys.argv[1], sys.argv[2], "f16")
except CheckpointError as error:
    print(error)
"""
    out = subprocess.run(
        [sys.executable, "-c", script, str(half_file), str(tmp_path / name)], capture_output=True, text=True, check=True
    )
    assert out.stdout == f"{tmp_path / name}: cannot be written (File too large)\n"
    assert list(tmp_path.iterdir()) == []


def test_interrupt_leaves_nothing(half_file, tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(half_file, tmp_path / "out.gguf", "q8_0", progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["value", "shape", "name"])
def test_read_back_catches_a_wrong_file(half_file, tmp_path, monkeypatch, change):
    real = convert.read_checkpoint

    def wrong(path, **kwargs):
        checkpoint = real(path, **kwargs)
        name = "decoder.mid_block.resnets.0.conv1.weight" if change == "shape" else "decoder.conv_in.bias"
        if path != half_file:
            tensor = checkpoint.tensors.pop(name)
            if change == "value":
                tensor[0] += 1
            tensor = tensor.flatten(0, 1) if change == "shape" else tensor
            checkpoint.tensors["x" if change == "name" else name] = tensor
        return checkpoint

    monkeypatch.setattr(convert, "read_checkpoint", wrong)
    with pytest.raises(CheckpointError, match="read back"):
        convert_checkpoint(half_file, tmp_path / "out.gguf", "q8_0")
    assert list(tmp_path.iterdir()) == []


def test_summary_says_what_was_written(half_file, tmp_path):
    plain = convert_checkpoint(half_file, tmp_path / "a.gguf", "f16").summary()
    assert f"{len(load_file(half_file))} tensors F16" in plain[0] and "equal" in plain[1]
    result = convert_checkpoint(half_file, tmp_path / "b.gguf", "q4_0")
    worst = max(result.errors, key=result.errors.get)
    assert f"{len(result.errors)} tensors Q4_0" in result.summary()[0] and worst in result.summary()[1]
