"""A latent file notes the size of its clip before padding, and the rate."""

from fractions import Fraction

import pytest
import torch
from zerowaste_vae.engine.extras.cli.decode import crop, stored_rate
from zerowaste_vae.engine.extras.cli.encode import Padded
from zerowaste_vae.engine.families import DEFAULT


def test_pad_repeats_and_crop_undoes_it():
    clip = torch.rand(6, 9, 15, 3)
    padded = torch.stack(list(Padded(clip, 0, None, DEFAULT.filled, 8)))
    assert padded.shape == (9, 16, 16, 3) and torch.equal(padded[:6, :9, :15], clip)
    rows, columns, frames = (torch.arange(n).clamp(max=m) for n, m in ((16, 8), (16, 14), (9, 5)))
    assert torch.equal(padded, clip[frames][:, rows][:, :, columns])
    notes = {"frames": "6", "height": "9", "width": "15"}
    assert torch.equal(crop(padded[None], notes, 8)[0, :6], clip)
    whole = list(padded)
    assert all(a is b for a, b in zip(Padded(whole, 0, None, DEFAULT.filled, 8), whole, strict=True))
    for foreign in ({}, {"frames": "4", "height": "8", "width": "17"}, {"frames": "x", "height": "-9"}):
        assert crop(padded[None], foreign, 8).shape[1:] == padded.shape


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("25/2", Fraction(25, 2)), ("30000/1001", Fraction(30000, 1001)), ("29.97", Fraction(2997, 100)),
        ("1e4", 10_000), ("0.0001", Fraction(1, 10_000)), ("24." + "0" * 4000 + "1", 24), ("x", None), ("1/0", None),
        ("-3", None), ("1e5", None), ("1e-5000", None), ("1e999999999", None), ("1e-999999999", None), ("nan", None),
        ("9" * 5000, None),
    ],
)  # fmt: skip
def test_stored_rate(text, rate):
    assert stored_rate({"fps": text}) == rate
    assert stored_rate({}) is None
