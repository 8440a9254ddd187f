"""Tile geometry: covered frames, no slivers, weights that sum to one and never vanish."""

import pytest
import torch
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.network.tiles import axis, check_tile, grid


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 31, 135, 240])
@pytest.mark.parametrize(("size", "overlap"), [(2, 0), (2, 1), (8, 3), (8, 7), (16, 2), (64, 16), (128, 16)])
@pytest.mark.parametrize("blend", [True, False])
def test_axis_covers_and_weights_sum_to_one(length, size, overlap, blend):
    a = axis(length, size, overlap, blend)
    assert a.starts[0] == 0
    assert a.starts[-1] + a.size == length
    assert all(0 < q - p <= a.size - min(overlap, size - 1) for p, q in zip(a.starts, a.starts[1:], strict=False))
    total = torch.zeros(length * 8)
    for i, (lo, hi) in enumerate(a.spans()):
        weight = a.weights(i, 8)
        assert weight.numel() == 8 * a.size
        if blend:
            assert weight.min() > 0
        total[8 * lo : 8 * hi] += weight
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-6)


def test_one_tile():
    """A tile that covers the frame is the frame."""
    g = grid(5, 7, 56, 16, 8)
    assert len(g) == 1
    assert torch.equal(g.rows.weights(0, 8), torch.ones(40))


def test_pixels_round_tile_down_and_overlap_up():
    g = grid(100, 100, 100, 20, 8)
    assert g.rows.size == 12
    assert all(12 - (q - p) >= 3 for p, q in zip(g.rows.starts, g.rows.starts[1:], strict=False))


@pytest.mark.parametrize(
    ("tile", "overlap", "says"),
    [(15, 0, "tile=15"), (-8, 0, "tile=-8"), (64, 64, "than tile=64"), (64, 80, "overlap=80"), (64, -1, "overlap=-1")],
)
def test_impossible_tiles_are_refused(tile, overlap, says):
    with pytest.raises(InputError, match=says):
        check_tile(tile, overlap, 8)


def test_possible_tiles_are_accepted():
    check_tile(0, 64, 8)
    check_tile(16, 15, 8)
    with pytest.raises(InputError, match="at least 32 pixels"):
        check_tile(16, 0, 16)
