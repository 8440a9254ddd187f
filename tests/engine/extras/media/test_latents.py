"""Latent files: our own, ComfyUI's, collapsed ones, and those that must be refused."""

import errno
import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae.engine import InputError
from zerowaste_vae.engine.extras.media.latents import (
    LatentFile,
    LatentWriter,
    latent_metadata,
    read_latent,
    write_latent,
)


def test_round_trip_with_notes(tmp_path):
    latent = torch.randn(2, 16, 3, 4, 5)
    write_latent(tmp_path / "a.safetensors", latent, {"fps": "25"})
    assert torch.equal(read_latent(tmp_path / "a.safetensors"), latent)
    assert latent_metadata(tmp_path / "a.safetensors") == {"fps": "25"}
    assert set(load_file(tmp_path / "a.safetensors")) == {"latent"}


def test_half_precision_becomes_float32(tmp_path):
    latent = torch.randn(1, 16, 1, 2, 2).half()
    write_latent(tmp_path / "a.safetensors", latent)
    assert torch.equal(read_latent(tmp_path / "a.safetensors"), latent.float())


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(2, 16, 5, 2, 3), (2, 16 * 5, 2, 3)])
def test_any_float_is_read_piece_by_piece(tmp_path, kind, shape):
    latent = torch.randn(shape).to(getattr(torch, kind))
    save_file({"latent": latent}, tmp_path / "a.safetensors")
    file, whole = LatentFile(tmp_path / "a.safetensors"), latent.float().view(2, 16, 5, 2, 3)
    assert all(torch.equal(file[1, :, a:b], whole[1, :, a:b]) for a, b in ((0, 1), (1, 4), (4, 9)))
    assert torch.equal(LatentFile(tmp_path / "a.safetensors", item=1)[0, :, 2:3], whole[1, :, 2:3])


def test_rewritten_latent_refused(tmp_path):
    """A latent file that is rewritten while it is read is refused."""
    path = tmp_path / "a.safetensors"
    write_latent(path, torch.zeros(1, 16, 5, 2, 3))
    file = LatentFile(path)
    assert not file[0, :, :2].any()
    write_latent(path, torch.ones(1, 16, 5, 2, 3))
    with pytest.raises(InputError, match=r"a\.safetensors: was rewritten while it was read"):
        file[0, :, 2:4]


def test_comfyui_files(tmp_path, caplog):
    latent = torch.randn(1, 16, 3, 4, 5)
    # What ComfyUI's Save Latent writes: the tensor, an empty marker and the workflow as metadata.
    marked = {"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}
    save_file(marked, tmp_path / "new.latent", {"prompt": "{}"})
    save_file({"latent_tensor": latent}, tmp_path / "old.latent")
    assert torch.equal(read_latent(tmp_path / "new.latent"), latent)
    assert torch.allclose(read_latent(tmp_path / "old.latent"), latent / 0.18215)
    assert "0.18215" in caplog.text


def test_writing_for_comfyui(tmp_path):
    latent = torch.randn(1, 16, 3, 4, 5)
    write_latent(tmp_path / "a.latent", latent)
    stored = load_file(tmp_path / "a.latent")
    assert torch.equal(stored["latent_tensor"], latent) and stored["latent_format_version_0"].numel() == 0
    assert torch.equal(read_latent(tmp_path / "a.latent"), latent)


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ((2, 48, 4, 5), (2, 16, 3, 4, 5)),
        ((1, 16, 4, 5), (1, 16, 1, 4, 5)),
        ((16, 3, 4, 5), (1, 16, 3, 4, 5)),
    ],
    ids=["collapsed", "collapsed, one latent", "no batch axis"],
)
def test_four_axes(tmp_path, stored, read):
    latent = torch.randn(stored)
    save_file({"latent": latent}, tmp_path / "a.safetensors")
    assert torch.equal(read_latent(tmp_path / "a.safetensors"), latent.reshape(read))


def test_comfyui_batch_axis(tmp_path):
    latent = torch.randn(16, 32, 2, 2)
    save_file({"latent_tensor": latent, "latent_format_version_0": torch.empty(0)}, tmp_path / "a.latent")
    assert read_latent(tmp_path / "a.latent").shape == (16, 16, 2, 2, 2)


REFUSED = {
    "ambiguous": (torch.zeros(16, 32, 2, 2), "five axes"),
    "rank": (torch.zeros(16, 4, 5), "is not"),
    "channels": (torch.zeros(1, 4, 3, 4, 5), "4 channels, not 16"),
    "four axes, channels": (torch.zeros(1, 20, 4, 5), "is not"),
    "zero frames": (torch.zeros(1, 16, 0, 4, 5), "empty"),
    "zero frames, collapsed": (torch.zeros(1, 0, 4, 5), "is not"),
    "NaN": (torch.full((1, 16, 1, 2, 2), float("nan")), "NaN"),
    "infinite": (torch.full((1, 16, 1, 2, 2), float("inf")), "NaN or infinite"),
    "integers": (torch.zeros(1, 16, 1, 2, 2, dtype=torch.int32), "float type"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_latents(tmp_path, case):
    tensor, reason = REFUSED[case]
    save_file({"latent": tensor}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=reason) as caught:
        read_latent(tmp_path / "a.safetensors")
    assert "a.safetensors" in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_no_latents(tmp_path):
    save_file({"decoder.conv_in.bias": torch.zeros(4)}, tmp_path / "vae.safetensors")
    header = json.dumps({"latent": {"dtype": "F32", "shape": [1, 16, 1, 8, 8], "data_offsets": [0, 4096]}}).encode()
    (tmp_path / "short.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))
    (tmp_path / "text.safetensors").write_text("hello")
    (tmp_path / "empty.safetensors").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for name in ("vae.safetensors", "short.safetensors", "text.safetensors", "empty.safetensors", "folder", "missing"):
        for read in (read_latent, latent_metadata):
            with pytest.raises(InputError) as caught:
                read(tmp_path / name)
            assert name in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with a name")
def test_places_that_are_no_files(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    device = "is a pipe or a device, not a file"
    for path, says in {"folder": "is a folder, not a file", "pipe": device, "/dev/null": device}.items():
        with pytest.raises(InputError, match=f"{path}: {says}"):
            read_latent(tmp_path / path)


def test_only_batches_are_written(tmp_path):
    with pytest.raises(InputError, match="is not"):
        write_latent(tmp_path / "a.safetensors", torch.zeros(16, 2, 2))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a.safetensors", "a.latent"])
def test_pictures_have_four_axes(tmp_path, name):
    """Read 16 pictures with 16 channels, too, and one whose channels could be frames of fewer."""
    for shape in ((16, 16, 3, 2), (1, 32, 2, 2)):
        z = torch.rand(shape)
        write_latent(tmp_path / name, z)
        assert torch.equal(read_latent(tmp_path / name, shape[1], still=True), z[:, :, None])
    with pytest.raises(InputError, match="has 32 channels, not 16"):
        read_latent(tmp_path / name, 16, still=True)


def test_a_batch_that_is_one_clip(tmp_path):
    """ComfyUI's of Stable Video Diffusion, of as many frames as channels too; in our own files that is no answer."""
    for count in (5, 4):
        z = torch.rand(count, 4, 3, 2)
        write_latent(tmp_path / "x.latent", z)
        file = LatentFile(tmp_path / "x.latent", 4, joined=True)
        assert file.shape == (1, 4, count, 3, 2) and torch.equal(file[0, :, 1:3], z[1:3].movedim(0, 1))
        assert torch.equal(file.read(), z.movedim(0, 1)[None])
    write_latent(tmp_path / "x.safetensors", z[:3])
    assert torch.equal(read_latent(tmp_path / "x.safetensors", 4, joined=True), z[:3].movedim(0, 1)[None])
    write_latent(tmp_path / "x.safetensors", z[None].transpose(1, 2))
    assert torch.equal(read_latent(tmp_path / "x.safetensors", 4, joined=True), z.movedim(0, 1)[None])
    write_latent(tmp_path / "x.safetensors", z)
    with pytest.raises(InputError, match="save it with five axes"):
        read_latent(tmp_path / "x.safetensors", 4, joined=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_full_disk_is_named_at_close(tmp_path, monkeypatch):
    """What waits in memory is written then; a first error is not hidden by it."""
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: open("/dev/full", "w+b", 1 << 20))  # noqa: SIM115
    for error in (None, InputError("the first")):
        with pytest.raises((OSError, InputError)) as raised, LatentWriter(tmp_path / "a.safetensors") as writer:
            writer.write(torch.zeros(1, 4, 1, 2, 2))
            if error is not None:
                raise error
        if error is not None:
            assert raised.value is error
        else:
            assert raised.value.filename == str(tmp_path / "a.safetensors")
            assert raised.value.strerror == f"cannot be written ({os.strerror(errno.ENOSPC)})"
    assert not list(tmp_path.iterdir())
