"""8 bit through the VAE object on a CPU: real bits, a floor that holds, second starts that measure nothing."""

import math

import pytest
import torch
from zerowaste_vae.engine import InputError, load
from zerowaste_vae.engine.precision import bench


def db(a, b):
    return 10 * math.log10(1 / (a - b).double().square().mean().item())


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_decode_and_encode_in_8_bit(wide_file, cache, noise, precision, monkeypatch):
    z, video = noise(1, 16, 3, 4, 5), noise(5, 32, 24, 3).clamp(-1, 1) * 0.5 + 0.5
    exact = load(wide_file, device="cpu")
    vae = load(wide_file, precision=precision, device="cpu")
    assert vae.precision == precision
    out, latent = vae.decode(z), vae.encode(video)
    assert 25 < db(out, exact.decode(z)) < 70
    assert not torch.equal(latent, exact.encode(video))
    assert vae.last_report.operands.startswith("12 of 12 convolutions")
    assert vae.last_report.precision == precision
    # What was measured and packed is found again, and gives the same bits.
    monkeypatch.setattr(bench.Bench, "__init__", lambda *_: pytest.fail("measured again"))
    again = load(wide_file, precision=precision, device="cpu")
    path, pack = again.fused(), again.fused()._pack

    def plans_only(half, model):
        assert next(model.parameters()).is_meta, "packed again"
        return pack(half, model)

    path._pack = plans_only
    assert torch.equal(again.decode(z), out)
    assert torch.equal(again.encode(video), latent)
    assert len(list(cache.rglob("*.safetensors"))) == 2


def test_a_floor_leaves_out_what_costs_most(wide_file, noise):
    z = noise(1, 16, 2, 4, 4)
    exact = load(wide_file, precision="fp8", device="cpu", min_db=200.0)
    best = exact.decode(z)
    assert exact.last_report.operands.startswith("0 of")
    loose = load(wide_file, precision="fp8", device="cpu", min_db=20.0)
    loose.decode(z)
    everything = loose.last_report.db
    floor = everything + 3
    vae = load(wide_file, precision="fp8", device="cpu", min_db=floor)
    out = vae.decode(z)
    report = vae.last_report
    assert report.db >= floor
    assert 0 < int(report.operands.split()[0]) < int(report.operands.split()[2])
    assert db(out, best) > everything
    assert "dB against the exact path" in report.text()
    assert report.operands in report.text()


def test_what_is_asked_for_and_cannot_be(wide_file, noise):
    with pytest.raises(InputError, match="fp4"):
        load(wide_file, precision="fp4", device="cpu")
    fast = load(wide_file, precision="fp16_fast", device="cpu")
    assert fast.precision == "fp16"
    vae = load(wide_file, precision="int8", device="cpu")
    vae.options = vae.options.switched(off=["triton_fusion"])
    assert vae.precision == "fp16"
    vae.options = vae.options.switched(on=["triton_fusion"])
    assert vae.precision == "int8"
    plan = vae.plan_decode(1, 2, 8, 8)
    assert plan.fused
    fp16 = load(wide_file, precision="fp16", device="cpu")
    assert not fp16.plan_decode(1, 2, 8, 8).fused
    # The toggle is there for speed, which a CPU has none of.
    fp16.options = fp16.options.switched(on=["fp8"])
    assert fp16.precision == "fp16"
