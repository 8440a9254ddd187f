"""Files that another program holds for a moment, as scanners do on Windows, and for longer."""

import os
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine.extras.media.mp4 import Mp4Writer
from zerowaste_vae.engine.extras.media.mp4_format import Format
from zerowaste_vae.engine.extras.media.pngs import PngWriter, write_png_folder
from zerowaste_vae.engine.extras.output import patience
from zerowaste_vae.engine.extras.output.patience import WAITS, clear, remove, replace
from zerowaste_vae.engine.extras.output.writing import write_tensors


class Scanner:
    """Denies to rename or remove files: those whose name contains a text, for a number of tries. It notes the seconds
    of the pauses, which are not waited for."""

    def __init__(self, monkeypatch):
        self.name, self.renaming, self.removing, self.pauses = "", 0, 0, []
        rename, unlink = os.replace, Path.unlink
        monkeypatch.setattr(patience, "pause", self.pauses.append)
        monkeypatch.setattr(os, "replace", lambda a, b: rename(a, b) if self.lets(a, "renaming") else None)
        monkeypatch.setattr(Path, "unlink", lambda a: unlink(a) if self.lets(a, "removing") else None)

    def lets(self, path, kind):
        if self.name in Path(path).name and (left := getattr(self, kind)):
            setattr(self, kind, left - 1)
            raise PermissionError(13, "being used by another process", str(path))
        return True


@pytest.fixture
def scanner(monkeypatch):
    return Scanner(monkeypatch)


def test_seconds_of_patience(tmp_path, scanner):
    """A file is held as long as that at most; what is held for longer is an error, in the system's words."""
    (tmp_path / "a").touch()
    scanner.renaming = len(WAITS)
    replace(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").exists() and scanner.pauses == [*WAITS] and 2 <= sum(WAITS) <= 5
    scanner.removing = len(WAITS)
    remove(tmp_path / "b")
    remove(tmp_path / "b")  # it is gone
    scanner.renaming = scanner.removing = 1 << 20
    (tmp_path / "c").touch()
    with pytest.raises(PermissionError, match="another process"):
        replace(tmp_path / "c", tmp_path / "d")
    assert clear(tmp_path / "c") == "being used by another process" and (tmp_path / "c").exists()


def test_other_errors_are_not_tried_again(tmp_path, scanner):
    with pytest.raises(FileNotFoundError):
        replace(tmp_path / "none", tmp_path / "b")
    assert clear(tmp_path / "none") == "" and not scanner.pauses


def test_every_writer_bears_a_scanner(tmp_path, scanner):
    """One denial at each of their renamings and removals."""
    frames, names = torch.rand(3, 16, 16, 3), ["clip.mp4", "fold", "pngs", "x.safetensors"]
    for again in range(2):  # the second time folders are replaced
        scanner.renaming = scanner.removing = 1
        with PngWriter(tmp_path / "pngs") as pngs:
            pngs.write(frames)
        scanner.renaming = scanner.removing = 1
        pngs.finish()
        with Mp4Writer(tmp_path / "clip.mp4", Format(Fraction(24))) as clip:
            clip.write(frames)
        scanner.renaming = scanner.removing = 1
        clip.finish()
        scanner.renaming = 1
        write_png_folder(tmp_path / "fold", frames)
        scanner.renaming = 1
        write_tensors(tmp_path / "x.safetensors", {"frames": frames})
        assert sorted(each.name for each in tmp_path.iterdir()) == names, again
        assert [len(list((tmp_path / name).iterdir())) for name in ("fold", "pngs")] == [3, 3]


def test_a_part_that_cannot_be_removed(tmp_path, scanner, caplog):
    """The result is there, and a line says what is left."""
    with Mp4Writer(tmp_path / "clip.mp4", Format(Fraction(24))) as clip:
        clip.write(torch.rand(3, 16, 16, 3))
    scanner.name, scanner.removing = "clip.part.mp4", 1 << 20
    clip.finish()
    assert (tmp_path / "clip.mp4").exists() and clip.part.exists()
    assert "clip.part.mp4: is not needed any more and could not be removed (being used" in caplog.text
    clip.discard()  # no error either


def test_pngs_stay_in_their_part(tmp_path, scanner):
    """A folder that cannot get its name, and one of whose frames one cannot: both go on from there."""
    writer = PngWriter(tmp_path / "a")
    with writer:
        writer.write(torch.rand(4, 16, 16, 3))
    scanner.renaming = 1 << 20
    with pytest.raises(PermissionError, match=r"cannot be written \(being used by another process\): '.*a'"):
        writer.finish()
    scanner.renaming, scanner.name = 0, "frame_000003.png"
    again = PngWriter(tmp_path / "a", resume=True)
    assert again.done == 4
    again.finish()
    assert len(list((tmp_path / "a").iterdir())) == 4
    scanner.renaming = 1 << 20
    with pytest.raises(PermissionError), PngWriter(tmp_path / "b") as broken:
        broken.write(torch.rand(5, 16, 16, 3))
    assert broken.done == 3 and sorted(each.name for each in broken.part.glob("f*"))[:3] == [
        f"frame_{number:06d}.png" for number in range(3)
    ]
