"""Policies, what is eligible, and how operands are made of weights and ranges."""

import json

import pytest
import torch
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.kernels.conv3d.types import HALF_DEPTH, quantise_rows
from zerowaste_vae.engine.kernels.targets import FP8
from zerowaste_vae.engine.network.fused import FusedDecoder, FusedEncoder
from zerowaste_vae.engine.precision.forms import EXPONENTS, MARGIN, Operands, balance
from zerowaste_vae.engine.precision.policy import EXACT, Policy, Range, eligible, ranges_from_dict


@pytest.fixture(scope="module")
def model(seed_model):
    model = ARCHITECTURE.build(Config((16, 32, 48, 32), (16, 32, 48, 32), 16, 4)).requires_grad_(False)
    seed_model(model, 5)
    return model


def test_eligible(model):
    """Eligible are wide inner convolutions."""
    keys = eligible(model.decoder)
    assert "decoder.up_blocks.0.upsamplers.0.conv" in keys
    assert "decoder.up_blocks.1.resnets.0.conv1" in keys
    assert "decoder.conv_in" not in keys
    assert not any("conv_out" in k or "shortcut" in k or "upscale_conv" in k for k in keys)
    # 16 channels on either side are too few.
    assert "decoder.up_blocks.3.resnets.0.conv1" not in keys
    assert "decoder.up_blocks.3.resnets.1.conv2" not in keys
    assert "encoder.down_blocks.1.downsamplers.0.conv" in eligible(model.encoder)


def test_policy():
    """A policy has ranges of its own convolutions only, is JSON, and refuses other types."""
    found = {"a": Range((1.0, 2.5), (0.5, 0.25)), "unused": Range((1.0,), (1.0,))}
    policy = Policy({"a": "int8", "b": "fp8"}, found, half_accumulate=True)
    again = json.loads(json.dumps(policy.as_dict()))
    assert ranges_from_dict(again["ranges"]) == policy.ranges and again["kinds"] == policy.kinds
    with pytest.raises(ValueError, match="fp4"):
        Policy({"a": "fp4"})
    with pytest.raises(TypeError):
        policy.kinds["a"] = "fp8"


@pytest.mark.parametrize(("kind", "dtype"), [("fp8", FP8), ("int8", torch.int8)])
def test_packing(model, kind, dtype, convolutions):
    """Only the policy's convolutions are packed in 8 bit."""
    keys = eligible(model.decoder)
    chosen = dict.fromkeys(keys[::2], kind)
    widths = {c.key: c.in_channels for c in model.decoder.modules() if getattr(c, "key", "")}
    ranges = {k: Range((2.0,) * widths[k], (0.5,) * widths[k]) for k in keys}
    decoder = FusedDecoder(model.decoder, torch.float16, operands=Operands(torch.float16, Policy(chosen, ranges)))
    convs = convolutions(decoder)
    assert set(keys) < set(convs)
    assert any("shortcut" in key for key in convs)
    for key, conv in convs.items():
        assert conv.dtype == (dtype if key in chosen else torch.float16), key
        assert (conv.gain is not None) == (key in chosen and kind == "int8")
    assert decoder.nbytes < FusedDecoder(model.decoder, torch.float16).nbytes


def test_int8_without_range(model):
    """int8 without a range is refused."""
    policy = Policy({"encoder.down_blocks.1.resnets.1.conv1": "int8"})
    with pytest.raises(ValueError, match="range"):
        FusedEncoder(model.encoder, torch.float16, operands=Operands(torch.float16, policy))


def test_fp16_sums():
    """Only convolutions after a norm sum in fp16."""
    fast = Operands(torch.float16, Policy(half_accumulate=True))
    assert fast.form("x").half_accumulate
    assert not fast.form("x", normed=False).half_accumulate
    assert not Operands(torch.bfloat16, Policy(half_accumulate=True)).form("x").half_accumulate
    assert not Operands(torch.float16, EXACT).form("x").half_accumulate


def test_fp8_sums():
    """The sums of one fp8 step fit fp16."""
    rows = torch.cat((torch.ones(1, 256), torch.randn(3, 256, generator=torch.Generator().manual_seed(0))))
    data, scale = quantise_rows(rows, FP8, 64)
    sums = data.float().abs().view(4, -1, HALF_DEPTH).sum(2).max() * 448
    assert 30_000 < sums <= torch.finfo(torch.float16).max
    torch.testing.assert_close(data.float() * scale[:, None], rows, rtol=2**-4, atol=2e-3)


def test_balance():
    """Scales by channel beat one scale for all."""
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(24, 9, 32, generator=g)
    x = torch.randn(500, 9, 32, generator=g) * torch.logspace(-1.5, 1, 32)
    largest, rms = x.abs().amax((0, 1)), x.square().mean((0, 1)).sqrt()

    def error(scale):
        step = (rows * scale).abs().amax((1, 2), keepdim=True) / 127
        w = (rows * scale / step).round() * step / scale
        q = (x / scale).round().clamp(-127, 127) * scale
        return (torch.einsum("ptc,ntc->pn", q, w) - torch.einsum("ptc,ntc->pn", x, rows)).square().mean()

    found = balance(rows, largest, rms)
    assert (largest / found).max() == pytest.approx(127 / MARGIN, rel=1e-5)
    assert error(found) < 0.3 * error(torch.full((32,), MARGIN * float(largest.max()) / 127))
    assert (0.0, 0.0) in EXPONENTS
    same = balance(torch.ones(4, 1, 32), torch.ones(32), torch.ones(32))
    torch.testing.assert_close(same, torch.full((32,), MARGIN / 127))
