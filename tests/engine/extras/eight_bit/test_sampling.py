"""Quantised networks through the reference operators: the bits change, the error is that of 8 bits, chunks agree."""

from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine.extras.eight_bit import sampling
from zerowaste_vae.engine.extras.eight_bit.sampling import Trials
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.kernels.targets import FP8
from zerowaste_vae.engine.network.fused import FusedDecoder, FusedEncoder
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.precision.forms import Operands
from zerowaste_vae.engine.precision.policy import Policy, eligible
from zerowaste_vae.engine.runtime import context as fused_run
from zerowaste_vae.engine.runtime.parking import Parking

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(seed_model):
    model = ARCHITECTURE.build(Config((32, 32, 48, 32), (32, 32, 48, 32), 16, 4)).requires_grad_(False)
    seed_model(model, 5)
    return model.half()


@pytest.fixture(scope="module")
def ranges(model, noise_samples):
    reader = sampling.Reader()
    sampling.decode(FusedDecoder(model.decoder, torch.float16), noise_samples[0], reader)
    sampling.encode(FusedEncoder(model.encoder, torch.float16), noise_samples[1], reader)
    return reader.ranges()


@pytest.fixture(scope="module")
def noise_samples():
    g = torch.Generator().manual_seed(2)
    return torch.randn(2, 5, 6, 16, generator=g), torch.rand(5, 40, 48, 3, generator=g) * 2 - 1


def networks(model, kind, ranges):
    dtype = torch.float16
    keys = (*eligible(model.decoder), *eligible(model.encoder))
    operands = Operands(dtype, Policy(dict.fromkeys(keys, kind) if kind else {}, ranges))
    return (
        FusedDecoder(model.decoder, dtype, operands=operands),
        FusedEncoder(model.encoder, dtype, operands=operands),
    )


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_loss(model, ranges, noise_samples, kind):
    """8 bit changes results by as much as expected."""
    z, video = noise_samples
    exact, mixed = networks(model, None, ranges), networks(model, kind, ranges)
    saturation = sampling.Saturation()
    pixels = sampling.decode(exact[0], z), sampling.decode(mixed[0], z, saturation)
    assert 20 < sampling.decibel(sampling.mse([pixels[0]], [pixels[1]])) < 60
    assert saturation.total > 0
    assert saturation.count < 1e-3 * saturation.total
    latents = sampling.encode(exact[1], video), sampling.encode(mixed[1], video)
    noise = (latents[1] - latents[0]).square().mean() / latents[0].square().mean()
    assert 1e-6 < noise < 3e-2


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_buffers(model, ranges, noise_samples, kind, monkeypatch):
    """Residency: what norm_act stores is the operand; only attention and the ends have 16-bit buffers."""
    written, read, inputs = [], [], {}
    store, convolve, place = fused_run.norm_act, fused_run.conv3d, fused_run.ExecutionContext.inputs

    def storing(x, norm, buffer, **options):
        written.append((buffer, options["store"].silu))
        store(x, norm, buffer, **options)

    def convolving(x, weight, out, **options):
        read.append((x, weight))
        return convolve(x, weight, out, **options)

    def placing(run, conv, *rest):
        for i in place(run, conv, *rest):
            inputs[conv.key] = i.data
            yield i

    monkeypatch.setattr(fused_run, "norm_act", storing)
    monkeypatch.setattr(fused_run, "conv3d", convolving)
    monkeypatch.setattr(fused_run.ExecutionContext, "inputs", placing)
    decoder, encoder = networks(model, kind, ranges)
    sampling.decode(decoder, noise_samples[0])
    sampling.encode(encoder, noise_samples[1])
    assert {key for key, data in inputs.items() if data.dtype.itemsize == 1} == {
        *eligible(model.decoder), *eligible(model.encoder)
    }  # fmt: skip
    ends = {key for key, data in inputs.items() if data.dtype.itemsize == 2}
    assert ends == {f"{half}.conv_{end}" for half in ("decoder", "encoder") for end in ("in", "out")}
    last = {inputs[key].data_ptr() for key in ends if key.endswith("out")}
    wide = [buffer for buffer, silu in written if silu and buffer.dtype.itemsize == 2]
    assert wide
    assert all(buffer.data_ptr() in last for buffer in wide)
    for x, weight in read:
        assert x.dtype == weight.data.dtype
        if weight.kernel[1] > 1 and weight.data.dtype.itemsize == 2:
            assert weight.channels in (16, 32)  # an end: latents, pixels (padded), or the last convolution


@pytest.mark.parametrize(("kind", "half"), [("fp8", False), (None, True), (None, False)])
def test_fp16_sums(model, ranges, noise_samples, monkeypatch, kind, half):
    """GeForce GPUs are twice as fast with it. fp8 always has it, fp16 only behind a norm and where it is asked for."""
    convolve, allowed = fused_run.conv3d, {}

    def convolving(x, weight, out, **options):
        what = "up" if weight.shifted else (weight.data.dtype, weight.kernel)
        allowed.setdefault(what, set()).add(options["epilogue"].half_accumulate)
        return convolve(x, weight, out, **options)

    monkeypatch.setattr(fused_run, "conv3d", convolving)
    policy = Policy(dict.fromkeys(eligible(model.decoder), kind) if kind else {}, ranges, half)
    decoder = FusedDecoder(model.decoder, torch.float16, operands=Operands(torch.float16, policy))
    sampling.decode(decoder, noise_samples[0])
    assert allowed["up"] == {kind == "fp8"}
    assert allowed[torch.float16, (1, 1, 1)] == {False}
    # The weights that 3x3x3 convolutions keep for a clip's second frame.
    assert (True in allowed[FP8 if kind else torch.float16, (2, 3, 3)]) == (half or kind == "fp8")


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@torch.no_grad()
def test_equal_bits(model, ranges, kind, convolutions):
    """Every chunking and parking gives the same frames."""
    decoder = networks(model, kind, ranges)[0]
    z = torch.randn(4, 9, 3, 16, generator=torch.Generator().manual_seed(3))

    def decode(chunk, frames, parking=None):
        run = decoder.plan(chunk, 9, 3, frames, torch.float32, CPU, parking)
        run.allocate()
        out = []
        for part in z.split(chunk):
            run.scout(lambda part=part: decoder.chunk(run, part, frames, torch.float32, out.append))
            decoder.chunk(run, part, frames, torch.float32, lambda x: out.append(x.clone()))
        run.free()
        return torch.cat(out), run

    expected, whole = decode(4, 0)
    # Sums are taken in another order on a CPU (its convolutions split the work by size): rounding, then 8-bit steps.
    for options in ((1, 1), (2, 3), (1, 2, Parking(None, 0))):
        out = decode(*options)[0]
        assert sampling.decibel(sampling.mse([2 * out], [2 * expected])) > 45, options
    types = {dtype for (*_, dtype) in whole.rings}
    assert types == {torch.float16, convolutions(decoder)["decoder.up_blocks.0.upsamplers.0.conv"].dtype}


def test_samples():
    """Samples cover a clip and stay small."""
    z = torch.zeros(1, 16, 9, 100, 30)
    parts = sampling.latent_samples(z)
    assert [tuple(p.shape) for p in parts] == [(2, 32, 30, 16)] * 6
    assert [tuple(p.shape) for p in sampling.latent_samples(z[:, :, :1, :4, :4])] == [(1, 4, 4, 16)]
    video = torch.zeros(21, 500, 100, 3)
    assert [tuple(p.shape) for p in sampling.video_samples(video)] == [(5, 256, 100, 3)] * 6
    assert [tuple(p.shape) for p in sampling.video_samples(video[:3, :40])] == [(1, 40, 100, 3)] * 3


def test_encoder_ranges(model):
    """An encoder's ranges cover white noise, whatever the clip."""
    black = torch.full((5, 32, 24, 3), -1.0)
    noise = sampling.white_noise(black)
    assert torch.equal(noise, sampling.white_noise(black))
    assert noise.shape == black.shape
    assert noise.min() < -0.99
    assert 0.99 < noise.max() <= 1
    reader = sampling.Reader()
    sampling.encode(FusedEncoder(model.encoder, torch.float16), noise, reader)
    table = Trials(model, "encoder", torch.float16, DEFAULTS, [black]).table("black")
    for key, found in reader.ranges().items():
        assert all(a >= b for a, b in zip(table.ranges[key].largest, found.largest, strict=True))


def test_decibel_and_back():
    assert sampling.decibel(sampling.from_decibel(47.0)) == pytest.approx(47.0)
    assert sampling.decibel(0.0) == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_watched_values_stay_as_they_are(dtype):
    frames = torch.arange(-8.0, 8.0).view(2, 2, 2, 2).to(dtype)
    before, reader = frames.clone(), sampling.Reader()
    reader(SimpleNamespace(key="conv", stride=(1, 1, 1), weight=SimpleNamespace(flops_per_position=2.0)), frames)
    assert torch.equal(frames, before)
    assert reader.ranges()["conv"].largest == (8.0, 7.0)
