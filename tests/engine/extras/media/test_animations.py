"""Animated pictures as clips, and one line for each kind of event in a clip."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from PIL import Image, features
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.extras.media.clips import Clip

DROPPED = "transparency is dropped, the colours below it are used"
KINDS = {"gif": True, "png": True, "webp": features.check("webp"), "avif": features.check("avif")}


def pictures(count: int = 5, alpha: bool = False) -> list[Image.Image]:
    made = [Image.fromarray(np.full((48, 64, 3), 40 * n % 256, np.uint8)) for n in range(count)]
    for n, picture in enumerate(made):
        if alpha:
            picture.putalpha(255 - 50 * n)
    return made


def save(path, frames, duration, **options):
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=duration, **options)
    return path


@pytest.mark.parametrize("duration, fps", [(40, 25), ([30, 40, 30, 40, 500], Fraction(200, 7))])
@pytest.mark.parametrize("kind", KINDS)
def test_an_animation_is_a_clip(tmp_path, kind, duration, fps, caplog):
    """The last frame may stay longer."""
    if not KINDS[kind]:
        pytest.skip(f"this Pillow writes no {kind}")
    clip = Clip(save(tmp_path / f"a.{kind}", pictures(), duration))
    frames = list(clip.integers())
    assert [f.shape for f in frames] == [(48, 64, 3)] * 5 and clip.count in (5, None)
    assert [int(f.mean()) for f in frames] == pytest.approx([0, 40, 80, 120, 160], abs=2)
    if duration == 40 or kind in ("png", "webp"):  # FFmpeg counts the last frame of the others, too
        assert clip.fps == fps and not caplog.records
    assert len(list(clip)) == 5  # from the start again


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_uneven_frames_are_said_once(tmp_path, kind, caplog):
    clip = Clip(save(tmp_path / f"a.{kind}", pictures(), [40, 40, 200, 40, 40]))
    assert clip.fps == 25 and len(list(clip)) == len(list(clip)) == 5
    assert [r.getMessage().count("its frame rate varies") for r in caplog.records] == [1]


def test_frames_without_a_time_last_as_long_as_in_browsers(tmp_path):
    assert Clip(save(tmp_path / "a.png", pictures(), 0)).fps == 10


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_the_alpha_channel_of_an_animation(tmp_path, kind, caplog):
    """Taken where it is wanted, else one line for all frames."""
    path = save(tmp_path / f"a.{kind}", pictures(alpha=True), 40, lossless=True)
    assert [f[0, 0].tolist() for f in Clip(path, 4).integers()] == [[40 * n] * 3 + [255 - 50 * n] for n in range(5)]
    assert not caplog.records
    assert len(list(Clip(path))) == 5
    assert [r.getMessage().endswith(DROPPED) for r in caplog.records] == [True]


def test_the_picture_for_other_programs_is_no_frame(tmp_path):
    save(tmp_path / "a.png", pictures(), 40, default_image=True)
    clip = Clip(tmp_path / "a.png")
    assert clip.count == 4 and [int(f.mean()) for f in clip.integers()] == [40, 80, 120, 160]


@pytest.mark.skipif(not KINDS["avif"], reason="this Pillow writes no AVIF")
def test_stills_of_the_same_format_stay_pictures(tmp_path, caplog):
    for alpha in (False, True):
        pictures(alpha=alpha)[1].save(tmp_path / "a.avif")
        assert len(list(Clip(tmp_path / "a.avif"))) == 1
    assert [r.getMessage().endswith(DROPPED) for r in caplog.records] == [True]


@pytest.mark.parametrize("kind", ["png", "webp"])
def test_an_animation_that_is_cut_off(tmp_path, kind):
    noise = [Image.fromarray(np.random.default_rng(n).integers(0, 255, (48, 64, 3), np.uint8)) for n in range(5)]
    path = save(tmp_path / f"a.{kind}", noise, 40, lossless=True)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 7 // 10])
    with pytest.raises(InputError, match=r"a\.\w+: cannot be read as an image"):
        list(Clip(path))


def test_a_folder_of_pictures_has_a_line_for_each_kind(tmp_path, caplog):
    """Not one for each picture."""
    for n, picture in enumerate(pictures(20)):
        picture.putalpha(100)
        picture.save(tmp_path / f"f{n:03}.png")
    assert len(list(Clip(tmp_path))) == 20
    (line,) = [r.getMessage() for r in caplog.records]
    assert "f000.png: transparency is dropped" in line
