"""Outputs appear complete or not at all."""

import errno
import io
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from zerowaste_vae.engine import InputError
from zerowaste_vae.engine.extras.media.mp4 import Mp4Writer, write_mp4
from zerowaste_vae.engine.extras.media.mp4_format import Format
from zerowaste_vae.engine.extras.media.pngs import PngWriter, write_png_folder
from zerowaste_vae.engine.extras.output import patience
from zerowaste_vae.engine.extras.output.cache import keep
from zerowaste_vae.engine.extras.output.writing import (
    Unplaced,
    check_target,
    replacing,
    unwritable,
    write_tensors,
    write_text,
)


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
        patch.setattr(patience, "pause", lambda seconds: None)
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
    """The old folder returns if the new one cannot be put in its place, which stays beside it."""
    target = tmp_path / "frames"
    target.mkdir()
    (target / "old").write_text("old")
    real = os.replace

    def fails_for_the_new_one(source, destination):
        if str(source).endswith(".part"):
            raise PermissionError(errno.EACCES, "busy", str(destination))
        real(source, destination)

    monkeypatch.setattr(os, "replace", fails_for_the_new_one)
    with pytest.raises(Unplaced, match=r"busy.*the finished one is") as caught, replacing(target) as temporary:
        temporary.mkdir()
        (temporary / "new").write_text("new")
    assert (target / "old").read_text() == "old" and (caught.value.kept / "new").read_text() == "new"
    assert len(list(tmp_path.iterdir())) == 2 and caught.value.kept.name in str(caught.value)


def test_a_finished_file_is_not_discarded(tmp_path, monkeypatch):
    """Its name is held by another program: it stays, under one that opens by its suffix. A cache keeps none."""
    target, real = tmp_path / "a.json", os.replace
    target.write_text("old")

    def held(source, destination):
        if str(destination) == str(target):
            raise PermissionError(errno.EACCES, "in use", str(source))
        real(source, destination)

    monkeypatch.setattr(os, "replace", held)
    said = r"cannot be written \(in use\); the finished one is a\.[0-9a-f]{8}\.json in its folder"
    with pytest.raises(Unplaced, match=said) as caught:
        write_text(target, "new")
    assert caught.value.errno == errno.EACCES and caught.value.filename == str(target)
    assert target.read_text() == "old" and caught.value.kept.read_text() == "new"
    caught.value.kept.unlink()
    keep(target, lambda path: write_text(path, "new"))
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"]


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
from zerowaste_vae.engine.extras.media.mp4 import write_mp4
from zerowaste_vae.engine.extras.output.writing import write_tensors
from zerowaste_vae.engine.extras.media.mp4 import write_mp4
from zerowaste_vae.engine.extras.media.pngs import write_png_folder
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


@pytest.mark.parametrize(("number", "said", "meant"), [
    (112, "There is not enough space on the disk", errno.ENOSPC),
    (39, "Le disque est plein", errno.ENOSPC),
    (5, "Access is denied", errno.EACCES),
    (32, "The process cannot access the file because it is being used by another process", errno.EACCES),
    (1450, "Insufficient system resources exist", errno.EIO),
])  # fmt: skip
def test_errors_of_windows_in_its_own_words(tmp_path, monkeypatch, number, said, meant):
    """safetensors gives Windows' numbers, which are others than C's; where the system has C's, they are those."""
    def full(*_, **__):
        raise safetensors.SafetensorError(f"Error while serializing: I/O error: {said}. (os error {number})")

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    for platform, expected in (("win32", meant), ("linux", number)):
        monkeypatch.setattr(sys, "platform", platform)
        with pytest.raises(OSError) as caught:
            write_tensors(tmp_path / "a.safetensors", {"x": torch.zeros(1)})
        assert caught.value.errno == expected and caught.value.strerror == f"cannot be written ({said})"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [39, 112])
def test_a_full_disk_by_windows_number(tmp_path, number):
    """C takes the first for a wrong argument."""
    error = OSError(errno.EINVAL, "The disk is full")
    error.winerror = number
    assert unwritable(error, tmp_path / "a").errno == errno.ENOSPC
    assert unwritable(OSError(errno.EINVAL, "wrong"), tmp_path / "a").errno == errno.EINVAL


class ShortPaths:
    """A system that takes paths of 259 characters, and folders of 247, as Windows does without its long paths."""

    def __init__(self, monkeypatch, base):
        self.base = str(base)
        for holder, name, most in ((io, "open", 259), (os, "replace", 259), (os, "mkdir", 247), (Path, "touch", 259)):
            monkeypatch.setattr(holder, name, self.short(getattr(holder, name), most))

    def short(self, real, most):
        def checked(path, *rest, **options):
            if any(str(one).startswith(self.base) and len(str(one)) > most for one in (path, *rest)):
                raise FileNotFoundError(errno.ENOENT, "The system cannot find the path specified", str(path))
            return real(path, *rest, **options)

        return checked


@pytest.mark.parametrize("name", ["clip.mp4", "frames", "a" * 60 + ".mp4", "b" * 60])
def test_the_longest_name_is_tried_first(tmp_path, monkeypatch, name):
    """What is not refused is written; what is refused leaves nothing behind."""
    place, folder = tmp_path / ("d" * (150 - len(str(tmp_path)))), "." not in name
    place.mkdir()
    ShortPaths(monkeypatch, tmp_path)
    ends, frames = set(), torch.rand(2, 16, 16, 3)
    for length in range(5, 108, 3):
        inner = place / ("e" * length)
        target = inner / name
        try:
            inner.mkdir()
        except FileNotFoundError:
            break
        try:
            check_target(target, folder=folder)
        except InputError as error:
            assert re.search(r": its path is too long: a run needs \d+ characters here \(The system ", str(error))
            with pytest.raises(OSError, match="its path is too long"):
                PngWriter(target) if folder else Mp4Writer(target, Format(Fraction(24)))
            assert not list(inner.iterdir())
            ends.add("refused")
        else:
            for force in (False, True):
                writer = PngWriter(target, force=force) if folder else Mp4Writer(target, Format(Fraction(24)))
                with writer:
                    writer.write(frames)
                writer.finish()
                assert [each.name for each in inner.iterdir()] == [name]
            (write_png_folder if folder else write_tensors)(target, frames if folder else {"x": frames})
            ends.add("written")
    assert ends == {"refused", "written"}


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="its folder does not exist; create"):
        Mp4Writer(tmp_path / "none" / "a.mp4", Format(Fraction(24)))
    with pytest.raises(FileNotFoundError, match="its folder does not exist; create"):
        PngWriter(tmp_path / "none" / "frames")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_only_looks_writable(tmp_path, monkeypatch):
    """Windows does not tell before a file is made."""
    def denied(path, *_, **__):
        raise PermissionError(errno.EACCES, "Access is denied", str(path))

    monkeypatch.setattr(Path, "touch", denied)
    with pytest.raises(InputError, match=r"a\.mp4: its folder is not writable \(Access is denied\); choose another"):
        check_target(tmp_path / "a.mp4")
