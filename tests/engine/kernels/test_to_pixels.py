import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from zerowaste_vae.engine.kernels.conv3d import pack_weight
from zerowaste_vae.engine.kernels.to_pixels import BYTES, RAW, UNIT, op, to_pixels

sys.path.insert(0, str(Path(__file__).parent))
from helpers import bordered, error


@pytest.mark.parametrize("outputs, c, kt, dtype, stored, pixels", [
    (3, 32, 3, torch.float16, torch.float32, UNIT),
    (3, 96, 3, torch.bfloat16, torch.uint8, BYTES),
    (3, 32, 1, torch.float16, torch.float16, RAW),
    (12, 32, 3, torch.float16, torch.float32, UNIT),
], ids=str)  # fmt: skip
def test_pixels(monkeypatch, backend, outputs, c, kt, dtype, stored, pixels):
    if backend == "triton":
        monkeypatch.setattr(op, "SCRATCH_BYTES", 1)  # bands of the minimum 16 rows
    x = bordered(dtype, 5, 19, 11, c)
    weight, bias = torch.randn(outputs, c, kt, 3, 3) * (27 * c) ** -0.5, torch.randn(outputs) * 0.1
    out = torch.zeros(2, 19, 11, outputs, dtype=stored)
    to_pixels(x, pack_weight(weight, dtype), bias, out, pixels=pixels, start=3, backend=backend)
    frames = torch.cat((x[3:], x[:2]))[: 2 + kt - 1, ..., :c].double().permute(3, 0, 1, 2)[None]
    want = F.conv3d(frames, weight.to(dtype).double(), bias.double())[0].permute(1, 2, 3, 0)
    want = (want * pixels.gain + pixels.offset).clamp(pixels.low, pixels.high)
    assert error(out, want) < (5e-3 if stored == torch.uint8 else 5e-4)
    if stored == torch.uint8:
        assert (out.double() - want).abs().max() <= 0.5 + 1e-3  # rounded, not truncated


def test_frames_do_not_depend_on_the_call(interpreter):
    x, weight, bias = bordered(torch.float16, 5, 7, 9, 32), torch.randn(3, 32, 3, 3, 3) * 0.05, torch.randn(3)
    packed = pack_weight(weight, torch.float16)
    whole = torch.empty(3, 7, 9, 3)
    to_pixels(x, packed, bias, whole, backend="triton")
    for f in range(3):
        one = torch.empty(1, 7, 9, 3)
        to_pixels(x, packed, bias, one, start=f, backend="triton")
        assert torch.equal(one[0], whole[f])


@pytest.mark.parametrize("outputs", [3, 12])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_a_clamp_hides_shows_in_health(backend, outputs, value):
    x, bias, health = bordered(torch.float16, 4, 5, 6, 32), torch.zeros(outputs), torch.zeros(())
    packed = pack_weight(torch.randn(outputs, 32, 3, 3, 3) * 0.05, torch.float16)
    plain, out = (torch.empty(2, 5, 6, outputs, dtype=torch.uint8) for _ in range(2))
    to_pixels(x, packed, bias, plain, pixels=BYTES, backend=backend)
    to_pixels(x, packed, bias, out, pixels=BYTES, backend=backend, health=health)
    assert torch.equal(out, plain) and health == 0
    x[1, 2, 3, 4] = value
    to_pixels(x, packed, bias, out, pixels=BYTES, backend=backend, health=health)
    assert health.isnan()


def test_wrong_arguments_are_named():
    x, weight = bordered(torch.float16, 4, 5, 6, 32), pack_weight(torch.randn(3, 32, 3, 3, 3), torch.float16)
    with pytest.raises(ValueError, match="cannot fill"):
        to_pixels(x, weight, torch.zeros(3), torch.empty(3, 5, 6, 3))
    with pytest.raises(ValueError, match="one 3x3x3"):
        to_pixels(x, weight, torch.zeros(3), torch.empty(2, 5, 6, 4))
