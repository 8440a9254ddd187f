"""Outputs appear complete or not at all."""

import errno
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from zerowaste_vae.engine import InputError
from zerowaste_vae.engine.media.mp4 import write_mp4
from zerowaste_vae.engine.system.writing import check_target, replacing, write_tensors


def test_check_target(tmp_path, monkeypatch):
    (tmp_path / "a.mp4").write_bytes(b"old")
    (tmp_path / "frames").mkdir()
    (tmp_path / "frames" / "frame_000000.png").write_bytes(b"old")
    assert check_target(tmp_path / "new.mp4") == tmp_path / "new.mp4"
    assert check_target(tmp_path / "a.mp4", force=True)
    assert check_target(tmp_path / "frames", force=True, folder=True)
    refused = {
        "exists already": [("a.mp4", False, False), ("frames", False, True)],
        "folder does not exist": [("nowhere/a.mp4", True, False)],
        "is a folder": [("frames", True, False)],
        "is a file": [("a.mp4", True, True)],
        "is not a file name": [("frames/..", True, True)],
    }
    for reason, calls in refused.items():
        for name, force, folder in calls:
            with pytest.raises(InputError, match=reason):
                check_target(tmp_path / name, force, folder)
    (tmp_path / "frames" / "letter.txt").write_text("mine")
    with pytest.raises(InputError, match=r"letter\.txt"):
        check_target(tmp_path / "frames", force=True, folder=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is not a file name"):
        check_target(".", force=True, folder=True)


def test_unwritable_folder(tmp_path, monkeypatch):
    """It is refused before any work."""
    monkeypatch.setattr(os, "access", lambda path, mode: not (path == tmp_path and mode == os.W_OK))
    with pytest.raises(InputError, match="not writable"):
        check_target(tmp_path / "a.mp4")


def test_replacing_names_the_target_in_errors(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught, replacing(tmp_path / "a.bin") as temporary:
        temporary.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary))
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path / "a.bin")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="whole paths are shorter there")
def test_names_are_as_long_as_they_can_be(tmp_path):
    for name in ("a" * 255, "ü" * 127, "例" * 85):
        target = check_target(tmp_path / name)
        write_tensors(target, {"x": torch.zeros(1)})
        with replacing(target) as temporary:
            temporary.write_text(name)
        assert target.read_text() == name
        with pytest.raises(InputError, match=r"the name is too long \(25[6-9], the file system takes 255\); choose"):
            check_target(tmp_path / f"{name}éé")
    write_mp4(tmp_path / f"{'b' * 246}.mp4", torch.zeros(1, 16, 16, 3), 25)


def test_first_error_is_raised(tmp_path, monkeypatch):
    """Cleaning up does not hide the first error."""
    def busy(path, missing_ok=False):
        raise PermissionError(errno.EACCES, "busy", str(path))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as caught:
        patch.setattr("pathlib.Path.unlink", busy)
        with replacing(tmp_path / "a.bin"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert caught.value.filename == str(tmp_path / "a.bin")


def test_an_input_is_not_replaced(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"input")
    os.link(tmp_path / "a.safetensors", tmp_path / "link.safetensors")
    for name in ("a", "link"):
        for inputs in ([tmp_path / "a.safetensors"], [None, tmp_path / "link.safetensors"]):
            with pytest.raises(InputError, match=rf"{name}\.safetensors: input and output are the same file; choose"):
                check_target(tmp_path / f"{name}.safetensors", True, inputs=inputs)
    assert check_target(tmp_path / "b.safetensors", inputs=[tmp_path / "a.safetensors", tmp_path / "none"])


def test_folder_put_back(tmp_path, monkeypatch):
    """The old folder returns if the new one cannot be put in its place."""
    target = tmp_path / "frames"
    target.mkdir()
    (target / "old").write_text("old")
    real = os.replace

    def fails_for_the_new_one(source, destination):
        if str(source).endswith(".part"):
            raise PermissionError(errno.EACCES, "busy", str(destination))
        real(source, destination)

    monkeypatch.setattr(os, "replace", fails_for_the_new_one)
    with pytest.raises(PermissionError), replacing(target) as temporary:
        temporary.mkdir()
    assert (target / "old").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_tensors_are_written_as_the_umask_says(tmp_path):
    tensor = torch.arange(6.0).reshape(2, 3).t()  # not contiguous
    write_tensors(tmp_path / "a.safetensors", {"x": tensor}, {"fps": "24"})
    assert torch.equal(load_file(tmp_path / "a.safetensors")["x"], tensor)
    (tmp_path / "plain").touch()
    assert (tmp_path / "a.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_full_disk_leaves_nothing(tmp_path):
    """A limit of 20 kB per file makes the system refuse the write, as a full disk does."""
    program = """
import resource, signal, sys, torch
from zerowaste_vae.engine.media.mp4 import write_mp4
from zerowaste_vae.engine.system.writing import write_tensors
from zerowaste_vae.engine.media.mp4 import write_mp4
from zerowaste_vae.engine.media.pngs import write_png_folder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
noise = torch.rand(8, 128, 128, 3)
for write in (
    lambda: write_mp4("a.mp4", noise, 25),
    lambda: write_png_folder("frames", noise),
    lambda: write_tensors("a.safetensors", {"x": noise}),
):
    try:
        write()
    except OSError as error:
        print(error.filename, error.strerror)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["a.mp4", "frames", "a.safetensors"], done.stdout + done.stderr
    assert all("cannot be written" in line and "too large" in line for line in lines), lines
    assert not list(tmp_path.iterdir())
