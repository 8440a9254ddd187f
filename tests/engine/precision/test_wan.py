"""Wan in 8 bit through the reference operators: which convolutions, how good, the same bits in every chunking, and the
VAE object around it."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from zerowaste_vae.engine import load
from zerowaste_vae.engine.cli import main
from zerowaste_vae.engine.fused import run as fused_run
from zerowaste_vae.engine.fused import wan_decoder
from zerowaste_vae.engine.fused.networks import fuse
from zerowaste_vae.engine.fused.parking import Parking
from zerowaste_vae.engine.kernels.conv3d import reference
from zerowaste_vae.engine.models import wan
from zerowaste_vae.engine.optimize import Options
from zerowaste_vae.engine.precision import bench, measure
from zerowaste_vae.engine.precision.calibrate import calibrate
from zerowaste_vae.engine.precision.operands import Operands
from zerowaste_vae.engine.precision.policy import Policy, eligible
from zerowaste_vae.engine.report import Report

CPU = torch.device("cpu")
BF16 = torch.bfloat16
CONFIGS = {
    "2.1": wan.Config((32, 32, 48, 48), (32, 64, 64, 64)),
    "2.2": wan.Config((32, 32, 64, 64), (32, 32, 64, 64), 48, 2),
}
SIZES = {"2.1": (16, 3, 4), "2.2": (48, 2, 3)}
#: Resnet convolutions and upsamplers of the decoder; resnet convolutions of the encoder.
COUNTS = {"2.1": (31, 20), "2.2": (31, 20)}


@pytest.fixture(scope="module", params=["2.1", "2.2"])
def network(request, seed_model):
    model = wan.Wan(CONFIGS[request.param]).requires_grad_(False)
    seed_model(model, 3)
    return request.param, model.to(BF16)


@pytest.fixture(scope="module")
def samples(network):
    version, model = network
    c, h, w = SIZES[version]
    g = torch.Generator().manual_seed(2)
    side = 16 * model.encoder.patch
    return torch.randn(2, h, w, c, generator=g), torch.rand(5, side, 2 * side, 3, generator=g) * 2 - 1


@pytest.fixture(scope="module")
def ranges(network, samples):
    model, reader = network[1], measure.Reader()
    measure.decode(fuse(model.decoder, BF16), samples[0], reader)
    measure.encode(fuse(model.encoder, BF16), samples[1], reader)
    return reader.ranges()


def mixed(model, half, kind, ranges):
    module = getattr(model, half)
    return fuse(module, BF16, operands=Operands(BF16, Policy(dict.fromkeys(eligible(module), kind), ranges)))


def test_eligible_are_resnets_and_upsamplers(network):
    version, model = network
    decoder, encoder = eligible(model.decoder), eligible(model.encoder)
    assert (len(decoder), len(encoder)) == COUNTS[version]
    ups = [k for k in decoder if "resample" in k]
    assert len(ups) == 3
    keys = (*decoder, *encoder)
    assert not any(word in k for k in keys for word in ("time_conv", "shortcut", "head", "decoder.conv1", "encoder.conv1"))
    assert not any("resample" in k for k in encoder)
    assert all("residual" in k or k in ups for k in keys)


def test_work_is_counted_and_what_stays_in_16_bit_is_little(network, samples):
    model, reader = network[1], measure.Reader()
    measure.decode(fuse(model.decoder, BF16), samples[0], reader)
    plain = measure.Reader()
    measure.decode(fuse(model.decoder, BF16, Options(composed_upsample=False)), samples[0], plain)
    composed = [c.key for c in model.decoder.modules() if getattr(c, "key", "").endswith("resample.1")]
    for key in composed:  # 4 taps instead of 9 per output
        assert reader.flops[key] * 9 == plain.flops[key] * 4
    normed = set(eligible(model.decoder)) - set(composed)
    assert all(reader.flops[k] == plain.flops[k] for k in normed)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_8_bit_changes_the_bits_by_as_much_as_8_bits_do(network, ranges, samples, kind):
    model, (z, video) = network[1], samples
    saturation = measure.Saturation()
    pixels = [measure.decode(n, z, saturation) for n in (fuse(model.decoder, BF16), mixed(model, "decoder", kind, ranges))]
    assert 20 < measure.decibel(measure.mse(pixels[:1], pixels[1:])) < 60
    assert saturation.total > 0
    assert saturation.share < 1e-3
    latents = [measure.encode(n, video) for n in (fuse(model.encoder, BF16), mixed(model, "encoder", kind, ranges))]
    noise = (latents[1] - latents[0]).square().mean() / latents[0].square().mean()
    assert 1e-6 < noise < 3e-2
