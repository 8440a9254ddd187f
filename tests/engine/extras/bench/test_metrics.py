import math

import pytest
import torch
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.extras.bench.metrics import chunk_starts, compare, psnr, ssim, tile_edges

ROWS, COLUMNS, STARTS = [48], [64, 96], [5, 9]


def scene(frames=12, height=80, width=136):
    """A moving pattern with edges, in 0.1..0.9."""
    t, y, x = (torch.arange(n).float() for n in (frames, height, width))
    t = t[:, None, None]
    waves = torch.sin(x / 9 + t / 3) * torch.cos(y / 7)[:, None] + ((x // 16 + t) % 2) * 0.5
    return (0.4 + 0.2 * waves[..., None] * torch.tensor([1.0, 0.8, 0.6])).clamp(0.1, 0.9)


def noisy(clip, amount=0.01, seed=0):
    return clip + amount * torch.randn(clip.shape, generator=torch.Generator().manual_seed(seed))


def found(a, b):
    return compare(a, b, ROWS, COLUMNS, STARTS)


def test_clean_clips():
    """Clean clips have no findings."""
    clip = scene()
    same = found(clip, clip)
    assert same.psnr == math.inf and same.max_error == 0 and same.ssim == pytest.approx(1)
    assert same.seam_rows.ratio == same.jump.ratio == same.chunk_jump.ratio == 0 and same.findings == []
    assert same.record()["psnr"] == "inf"
    for seed in range(3):
        assert found(noisy(clip, seed=seed), clip).findings == []
    rounded = (clip * 255).round() / 255
    assert found(rounded, clip).findings == []
    assert found(clip.half().float(), clip).findings == []


@pytest.mark.parametrize("amount", [0.004, -0.004])
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_seam(amount, noise):
    """A planted seam is found in its place."""
    clip = scene()
    result = noisy(clip, noise)
    result[:, :, 96:] += amount
    (seam,) = [text for text in found(result, clip).findings if text.startswith("seam")]
    assert "column 96" in seam
    result = noisy(clip, noise)
    result[:, 48:] += amount
    (seam,) = [text for text in found(result, clip).findings if text.startswith("seam")]
    assert "row 48" in seam


def test_seam_of_changing_sign():
    """A seam whose sign changes along it is found."""
    clip = scene()
    result = noisy(clip)
    result[:, :40, 64:] += 0.01
    result[:, 40:, 64:] -= 0.01
    seam = found(result, clip).findings[0]
    assert seam.startswith("seam at column 64")


def test_jump():
    """A planted jump of one frame is found."""
    clip = scene()
    for noise in (0.0, 0.01):
        result = noisy(clip, noise)
        result[7] += 0.004
        c = found(result, clip)
        assert c.jump.at in (7, 8) and [t for t in c.findings if t.startswith(f"jump at frame {c.jump.at}")]
        result = noisy(clip, noise)
        result[5:] += 0.004
        c = found(result, clip)
        assert c.chunk_jump.at == c.jump.at == 5 and c.chunk_jump.ratio > 2


def test_colour_shift():
    """A planted colour shift is found and named."""
    clip = scene()
    result = noisy(clip) + torch.tensor([0.0, 0.0, -0.004])
    c = found(result, clip)
    assert c.findings == [t for t in c.findings if t.startswith("colour shift")] and len(c.findings) == 1
    assert c.shift[2] == pytest.approx(-0.004, abs=2e-4) and abs(c.shift[0]) < 2e-4


def test_definitions():
    """The figures equal their definitions."""
    a, b = noisy(scene(3)), scene(3)
    c = compare(a, b)
    error = (a.double() - b.double()).square()
    assert c.psnr == pytest.approx(-10 * math.log10(error.mean()))
    assert c.worst_psnr == pytest.approx(-10 * math.log10(error.mean((1, 2, 3)).max()))
    assert c.max_error == pytest.approx((a - b).abs().max().item(), abs=1e-7)
    assert (c.seam_rows, c.chunk_jump) == (None, None) and (c.frames, c.height, c.width) == (3, 80, 136)
    assert psnr(4e-4, 2.0) == pytest.approx(40.0)


@pytest.mark.parametrize("size", [(80, 136), (11, 11), (12, 37)])
def test_ssim(size):
    """SSIM equals its published definition."""
    metrics = pytest.importorskip("skimage.metrics")
    a, b = noisy(scene(1, *size), 0.05)[0], scene(1, *size)[0]
    theirs = metrics.structural_similarity(
        a.double().numpy(), b.double().numpy(), channel_axis=2, data_range=1.0,
        gaussian_weights=True, sigma=1.5, use_sample_covariance=False,
    )  # fmt: skip
    assert ssim(a, b) == pytest.approx(theirs, abs=1e-9)


def test_small_clips():
    """One frame, and frames smaller than the window, can be compared."""
    c = compare(scene(1, 8, 9), noisy(scene(1, 8, 9)))
    assert c.jump is None and c.ssim is None and c.frames == 1


def test_streaming():
    """Clips are read one frame at a time."""
    taken = {"a": 0, "b": 0}

    def frames(name, other):
        for frame in scene(6):
            assert taken[name] - taken[other] in (0, -1, 1)
            taken[name] += 1
            yield frame

    assert compare(frames("a", "b"), frames("b", "a")).frames == 6


@pytest.mark.parametrize(
    ("a", "b", "options", "says"),
    [
        (scene(3), scene(4), {}, "first clip ends after 3"),
        (scene(4), scene(3), {}, "second clip ends after 3"),
        (scene(2), scene(2, 80, 128), {}, "80x128x3"),
        (scene(0), scene(0), {}, "no frames"),
        (scene(2, 0, 4), scene(2, 0, 4), {}, "not 0x4x3 and 0x4x3"),
        (scene(2), scene(2) / 0, {}, "frame 0 holds NaN or infinite values"),
        (scene(2), scene(2), {"rows": [80]}, "row 80"),
        (scene(2), scene(2), {"columns": [0]}, "column 0"),
        (scene(2), scene(2), {"starts": [2]}, "chunk start 2"),
    ],
)
def test_compare_errors(a, b, options, says):
    """Clips that cannot be compared are refused with the reason."""
    with pytest.raises(InputError, match=says):
        compare(a, b, **options)


def test_places():
    """Starts of chunks and edges of tiles are where they are cut."""
    assert chunk_starts(25, 2, 4) == [5, 13, 21]
    assert chunk_starts(25, 1, 4) == [1, 5, 9, 13, 17, 21]
    assert chunk_starts(5, 4, 4) == []
    assert tile_edges(192, 224, 128, 64) == ([64, 128], [48, 96, 128, 176])
    assert tile_edges(192, 224, 96, 0) == ([96], [80, 144])
    with pytest.raises(InputError, match="tile=8"):
        tile_edges(192, 224, 8, 0)
