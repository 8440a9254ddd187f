"""Programs of single frames: pictures through the fused walk, whatever shares its chunk, in bands or whole."""

import gc
import os
import weakref

import pytest
import torch
from zerowaste_vae.engine.extras.eight_bit import sampling
from zerowaste_vae.engine.families.kl import FLUX, SD, Config
from zerowaste_vae.engine.kernels.targets import capabilities, triton_version
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.precision.forms import Operands
from zerowaste_vae.engine.precision.policy import Policy, eligible
from zerowaste_vae.engine.runtime.parking import Parking
from zerowaste_vae.engine.runtime.rolling import Window

CPU = torch.device("cpu")
#: Widths where a level's first block narrows to less than a tile, and 1x1 convolutions at the latent.
CONFIG = Config((16, 32, 32), (16, 32, 48), 4, 8, quantised=True, resnets=(1, 2), norm_groups=8)
WAYS = [None, Parking(None, 0), Parking(None, 1 << 20), Parking(None, 0, rows=128), Parking(None, 0, streams=0)]


@pytest.fixture(scope="module")
def model(seed_model):
    model = SD.build(CONFIG).requires_grad_(False)
    seed_model(model, 3)
    return model


def decode(network, z, parking=None, chunk=0):
    """[C, N, h, w] -> [N, H, W, 3]"""
    n, out = chunk or z.shape[1], []
    run = network.plan(n, *z.shape[2:], 0, torch.float32, CPU, parking)
    planned = run.nbytes
    run.allocate()
    for part in z.permute(1, 2, 3, 0).split(n):
        network.chunk(run, part, 0, torch.float32, lambda pixels: out.append(pixels.clone()))
    assert run.nbytes == planned
    assert not run.rings and not run.host_bytes
    run.free()
    return torch.cat(out)


def encode(network, x, parking=None):
    """[N, H, W, 3] -> [N, h, w, 2C]"""
    run = network.plan(*x.shape[:3], 0, CPU, parking)
    run.allocate()
    return network.chunk(run, x, 0).clone()


@torch.no_grad()
def test_pictures_are_decoded_fused_as_plainly(model, noise, atol):
    z = noise(4, 3, 34, 3)  # 136 rows: two bands of 64 and a rest
    expected = model.decoder(z[None])[0].clamp(-1, 1).mul(0.5).add(0.5).permute(1, 2, 3, 0)
    for options in (DEFAULTS, DEFAULTS.switched(off=["composed_upsample"])):
        network = fuse(model.decoder, torch.float32, options)
        whole = decode(network, z)
        torch.testing.assert_close(whole, expected, rtol=0, atol=atol)
        for parking in WAYS:
            torch.testing.assert_close(decode(network, z, parking, chunk=2), whole, rtol=0, atol=atol)


@torch.no_grad()
def test_pictures_are_encoded_fused_as_plainly(model, noise, atol):
    x = noise(2, 139, 21, 3)
    expected = model.encoder(x.permute(3, 0, 1, 2)[None])[0].permute(1, 2, 3, 0)
    network = fuse(model.encoder, torch.float32)
    whole = encode(network, x)
    torch.testing.assert_close(whole, expected, rtol=0, atol=atol)
    for parking in WAYS:
        torch.testing.assert_close(encode(network, x, parking), whole, rtol=0, atol=atol)
    alone = torch.cat([encode(network, part) for part in x.split(1)])
    torch.testing.assert_close(alone, whole, rtol=0, atol=atol)


@torch.no_grad()
def test_no_garbage(model, noise, monkeypatch):
    """On a GPU the next call would find the frame's memory still in use."""
    network, alive, make = fuse(model.decoder, torch.float32), weakref.WeakSet(), Window.__init__
    made = []

    def noted(self, *args):
        make(self, *args)
        alive.add(self)
        made.append(None)

    monkeypatch.setattr(Window, "__init__", noted)
    gc.disable()
    try:
        decode(network, noise(4, 1, 34, 3), Parking(None, 0, streams=0))
        assert made and not alive
    finally:
        gc.enable()


@torch.no_grad()
def test_memory_of_bands(model):
    """Bands take less memory and two results are the most."""
    network = fuse(model.decoder, torch.float32)
    whole, banded = (network.plan(1, 256, 256, 0, torch.float32, CPU, p).nbytes for p in (None, Parking(None, 0)))
    assert banded < whole
    # The largest two results that follow each other: 48 channels at 512x512, then at 1024x1024 in 32 bit.
    streams = 4 * 512 * 512 * 48 + 4 * 1024 * 1024 * 32
    band = 4 * 66 * 1026 * 48
    assert streams < banded < 1.1 * (streams + 2 * band + 4 * 1024 * 1024 * (3 + 32))


@torch.no_grad()
def test_memory_of_recomputing(model):
    """Recomputing takes the memory of some rows and one result."""
    network = fuse(model.decoder, torch.float32)
    rolled = network.plan(1, 256, 256, 0, torch.float32, CPU, Parking(None, 0, streams=0)).nbytes
    # 16 channels at 1024x1024, in whose memory their input of 32 at 512x512 was, and the pixels with what they take.
    stream, pixels = 4 * 1024 * 1024 * 16, 4 * 1024 * 1024 * (3 + 32)
    assert stream < rolled < 1.1 * (stream + pixels)


@torch.no_grad()
def test_they_run_in_8_bit(seed_model, noise):
    config = Config(None, (32, 32, 64), norm_groups=16, resnets=(1, 1))
    model = FLUX.build(config).requires_grad_(False)
    seed_model(model, 4)
    keys = eligible(model.decoder)
    assert {"decoder.up.1.upsample.conv", "decoder.up.0.block.0.conv1", "decoder.mid.block_1.conv2"} < {*keys}
    z, reader = noise(2, 7, 9, 16), sampling.Reader()
    model = model.to(torch.bfloat16)
    exact = sampling.decode(fuse(model.decoder, torch.bfloat16), z, reader)
    for kind in ("fp8", "int8"):
        policy = Policy(dict.fromkeys(keys, kind), reader.ranges())
        mixed = fuse(model.decoder, torch.bfloat16, operands=Operands(torch.bfloat16, policy))
        assert 25 < sampling.decibel(sampling.mse([sampling.decode(mixed, z)], [exact])) < 60


def test_a_picture_knows_nothing_of_others(model):
    assert model.decoder.program.reach == model.encoder.program.reach == (0, 0)
    assert model.decoder.program.frames(5) == 5
    one, five = (model.decoder.program.work(n, 8, 8).flop for n in (1, 5))
    assert five == 5 * one


@pytest.fixture
def kernels(monkeypatch):
    """Triton's interpreter runs the kernels themselves."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter has to be on from the start")
    here = capabilities("interpreter", 90, triton_version())
    monkeypatch.setattr("zerowaste_vae.engine.kernels.operators.kernels_for", lambda *_: here)


@torch.no_grad()
def test_equal_bits(seed_model, noise, kernels):
    """Kernels give the same bits in bands and in company."""
    config = Config((16, 32), (16, 32), norm_groups=4, resnets=(1, 1), attention=False)
    model = FLUX.build(config).requires_grad_(False)
    seed_model(model, 6)
    z, x = noise(16, 2, 33, 1), noise(2, 67, 3, 3)  # two bands at full size
    tall, taller = noise(16, 1, 101, 1), noise(1, 195, 2, 3)  # two windows, too
    expected = model.decoder(z[None])[0].clamp(-1, 1).mul(0.5).add(0.5).permute(1, 2, 3, 0)
    network = fuse(model.half().decoder, torch.float16)
    whole = decode(network, z)
    assert (whole - expected).abs().max() < 0.02
    assert torch.equal(decode(network, z, Parking(None, 0), chunk=1), whole)
    assert torch.equal(decode(network, tall, Parking(None, 0, streams=0)), decode(network, tall))
    network = fuse(model.encoder, torch.float16)
    whole = encode(network, x)
    assert torch.equal(torch.cat([encode(network, part, Parking(None, 0)) for part in x.split(1)]), whole)
    assert torch.equal(encode(network, taller, Parking(None, 0, streams=0)), encode(network, taller, Parking(None, 0)))
