"""Folders of frames that grow: one run at a time, and all frames that there should be."""

import sys

import pytest
import torch
from zerowaste_vae import InputError
from zerowaste_vae.engine.extras.media.pngs import PngWriter

FRAMES = torch.zeros(4, 8, 8, 3, dtype=torch.uint8)


def write(path, frames=FRAMES, **options):
    with PngWriter(path, **options) as writer:
        writer.write(frames)
    return writer


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked there")
def test_two_runs_do_not_write_one_folder(tmp_path):
    with PngWriter(tmp_path / "frames") as writer:
        writer.write(FRAMES)
        for resume in (False, True):
            with pytest.raises(InputError, match=r"frames\.part: another run is writing it; wait for it or choose"):
                PngWriter(tmp_path / "frames", resume=resume)
    assert writer.done == 4
    writer.finish()
    assert len(list((tmp_path / "frames").iterdir())) == 4
    with pytest.raises(InputError, match="frame 4 has shape"):
        write(tmp_path / "frames", [*FRAMES, torch.zeros(8, 8, 5)])
    assert PngWriter(tmp_path / "frames", resume=True).done == 4


def test_foreign_frames_refused(tmp_path):
    """Frames that another run wrote meanwhile are not taken for this run's."""
    writer = write(tmp_path / "frames", identity="one clip")
    (writer.part / "frame_000009.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"frames\.part: holds 5 frames, not 4: another run has written to it"):
        writer.finish()
    (writer.part / "frame_000009.png").unlink()
    (tmp_path / "frames").mkdir()
    writer = PngWriter(tmp_path / "frames", identity="one clip", resume=True, force=False)
    with pytest.raises(InputError, match="frames: another run has made it meanwhile; give --resume --force to"):
        writer.finish()
    assert writer.part.exists() and not any((tmp_path / "frames").iterdir())


def test_empty_run_leaves_nothing(tmp_path):
    with pytest.raises(InputError, match="NaN"):
        write(tmp_path / "frames", torch.full((1, 8, 8, 3), torch.nan))
    assert not list(tmp_path.iterdir())
