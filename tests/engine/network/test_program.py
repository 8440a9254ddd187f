"""Proof by use: architectures that are one Program each get every kind of execution; what a Program says of itself."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from zerowaste_vae import load
from zerowaste_vae.engine.extras.eight_bit import sampling
from zerowaste_vae.engine.families import registry
from zerowaste_vae.engine.network.architecture import Architecture, KeySet
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.network.ops.conv import Conv
from zerowaste_vae.engine.network.ops.down import StridedDown
from zerowaste_vae.engine.network.ops.ends import Moments, Pixels
from zerowaste_vae.engine.network.ops.norm import Group, Length
from zerowaste_vae.engine.network.ops.resnet import Res
from zerowaste_vae.engine.network.ops.up import ShuffleUp
from zerowaste_vae.engine.network.plain import Network
from zerowaste_vae.engine.network.program import STEP, TILES, Program
from zerowaste_vae.engine.network.state import State
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.network.stream import decode_features, decode_frames
from zerowaste_vae.engine.planning.fusable import why_off
from zerowaste_vae.engine.precision.forms import Operands
from zerowaste_vae.engine.precision.policy import Policy, eligible
from zerowaste_vae.engine.runtime.parking import Parking

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Config:
    decoder_widths: tuple[int, int] = (32, 48)
    encoder_widths: tuple[int, int] | None = None
    latent_channels: int = 16
    norm_groups: None = None


def decoder(config):
    """Two levels, RMS norms, one upsampler: 2x in space, and in time."""
    high, low = config.decoder_widths
    norm = Length()
    return Program.of(
        "decoder", config.latent_channels,
        Conv("enter", config.latent_channels, low), Res("deep.0", low, low, norm), TILES,
        ShuffleUp("grow", low, temporal=True), STEP,
        Res("wide.0", low, high, norm), Res("wide.1", high, high, norm), Pixels("leave.norm", "leave.conv", high, norm),
    )  # fmt: skip


TOY = Architecture(
    KeySet("toy", (("decoder.grow.upscale_conv.weight",),)), 2, 2, 1.0, lambda shapes, groups: Config(),
    lambda config: None, decoder,
)  # fmt: skip


@pytest.fixture(scope="module")
def toy(seed_model):
    model = TOY.build(Config()).requires_grad_(False)
    seed_model(model, 7)
    return model


@pytest.fixture
def latent(noise):
    return noise(16, 5, 9, 6)


def pictures(model, z):
    return model.decoder(z[None])[0].clamp(-1, 1).mul(0.5).add(0.5).permute(1, 2, 3, 0)


def decode(network, z, chunk, frames, parking=None):
    run = network.plan(chunk, *z.shape[2:], frames, torch.float32, CPU, parking)
    planned, out = run.nbytes, []
    run.allocate()
    for part in z.permute(1, 2, 3, 0).split(chunk):
        run.scout(lambda part=part: network.chunk(run, part, frames, torch.float32, out.append))
        network.chunk(run, part, frames, torch.float32, lambda pixels: out.append(pixels.clone()))
    assert run.nbytes == planned
    run.free()
    return torch.cat(out)


@pytest.mark.parametrize("parking", [None, Parking(None, 0), Parking(None, 0, buffers=3, prefetch=False)])
@torch.no_grad()
def test_fused_and_parked(toy, latent, parking, atol):
    """One program is run fused planned and parked."""
    network, expected = fuse(toy.decoder, torch.float32), pictures(toy, latent)
    for chunk, frames in ((5, 0), (1, 1), (2, 3), (3, 2)):
        torch.testing.assert_close(decode(network, latent, chunk, frames, parking), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("parking", [None, Parking(None, 0)])
@pytest.mark.parametrize("border", ["replicate", "reflect"])
@torch.no_grad()
def test_borders_are_the_plain_walks(seed_model, noise, border, parking, atol):
    """At odd sizes, and in bands whose last one is a single row: it reflects the band's before it."""
    program = Program.of("decoder", 16, *decoder(Config()).items, border=border)
    model = Network(Config(), None, program).requires_grad_(False)
    seed_model(model, 3)
    for z, chunk, frames in ((noise(16, 3, 5, 3), 2, 1), (noise(16, 2, 65, 2), 1, 2)):
        found = decode(fuse(model.decoder, torch.float32), z, chunk, frames, parking)
        torch.testing.assert_close(found, pictures(model, z), rtol=0, atol=atol)


@torch.no_grad()
def test_it_is_run_in_8_bit(toy, latent):
    keys = eligible(toy.decoder)
    names = ("deep.0.conv1 deep.0.conv2 grow.conv", "wide.0.conv1 wide.0.conv2 wide.1.conv1 wide.1.conv2")
    assert keys == [f"decoder.{name}" for line in names for name in line.split()]
    model, reader, z = TOY.build(Config()).to(torch.bfloat16), sampling.Reader(), latent.permute(1, 2, 3, 0)[:2]
    model.load_state_dict(toy.state_dict())
    exact = sampling.decode(fuse(model.decoder, torch.bfloat16), z, reader)
    assert {*keys, "decoder.enter", "decoder.wide.0.conv_shortcut"} <= set(reader.ranges())
    for kind in ("fp8", "int8"):
        policy = Policy(dict.fromkeys(keys, kind), reader.ranges())
        mixed = fuse(model.decoder, torch.bfloat16, operands=Operands(torch.bfloat16, policy))
        assert 25 < sampling.decibel(sampling.mse([sampling.decode(mixed, z)], [exact])) < 60


def test_file(toy, latent, tmp_path, monkeypatch, atol):
    """A file of it is loaded planned tiled and streamed."""
    save_file(toy.state_dict(), tmp_path / "toy.safetensors")
    monkeypatch.setattr(registry, "ARCHITECTURES", (*registry.ARCHITECTURES, TOY))
    monkeypatch.setattr(registry, "KEY_SETS", (*registry.KEY_SETS, TOY.keys))
    plain = load(tmp_path / "toy.safetensors", device="cpu")
    assert plain.arch == "toy"
    assert not plain.plan_decode(5, 9, 6).fused
    assert why_off("toy", Config(), torch.bfloat16, CPU, emulate=True) is None
    assert "widths [24]" in why_off("toy", Config((24, 48)), torch.bfloat16, CPU, emulate=True)
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    fused, z = load(tmp_path / "toy.safetensors", device="cpu"), latent[None]
    assert fused.plan_decode(5, 9, 6).fused
    torch.testing.assert_close(fused.decode(z), pictures(toy, latent)[None], rtol=0, atol=atol)
    tiles = {"tiling": "blended", "tile": 8, "overlap": 4, "chunk": 2}
    torch.testing.assert_close(fused.decode(z, **tiles), plain.decode(z, **tiles), rtol=0, atol=atol)
    torch.testing.assert_close(plain.decode_raw(z, chunk=1), toy.decoder(z), rtol=0, atol=atol)


def test_facts(toy):
    """A program knows its frames reach and work."""
    program = toy.decoder.program
    assert program.frames(5) == 9
    # Three convolutions of the latents see two before each, the upsampler one, five at the doubled rate two halves.
    assert program.reach == (3 * 2 + 1 + 5 * 2 / 2, 0)
    assert program.widths() == {32, 48}
    flops = program.work(1, 4, 4).flop
    deep, wide = 2 * 16 * 27 * (16 * 48 + 2 * 48 * 48), 2 * 64 * 27 * (48 * 32 + 3 * 32 * 32 + 32 * 3)
    assert flops == deep + wide + 2 * 16 * 48 * 8 * 48 + 2 * 64 * 27 * 48 * 48 + 2 * 64 * 48 * 32


def ahead(half="decoder"):
    """Convolutions that look a frame ahead, reflected borders, statistics over chunks of two latents."""
    chunks, finer = Group(4, (2, 2)), Group(4, (3, 4))
    return Program.of(
        half, 8,
        Conv("enter", 8, 16), Res("deep.0", 16, 16, chunks), TILES,
        ShuffleUp("grow", 16, temporal=True), STEP,
        Res("wide.0", 16, 8, finer), Pixels("leave.norm", "leave.conv", 8, finer),
        border="reflect", after=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def looking(seed_model):
    model = Network(Config(latent_channels=8), None, ahead()).requires_grad_(False)
    seed_model(model, 11)
    return model.decoder


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [2, 2, 2, 1], [3, 4], [1, 6], [6, 1], [2, 5]])
@torch.no_grad()
def test_looking_ahead(looking, noise, sizes, exact_sums):
    """A network that looks ahead streams as its whole clip."""
    z, state, parts = noise(1, 8, 7, 5, 6), State(), []
    whole = looking(z)
    assert whole.shape == (1, 3, 13, 10, 12)
    for i, part in enumerate(z.split(sizes, 2)):
        state.ending = i == len(sizes) - 1
        parts.append(looking(part, state))
    assert torch.equal(torch.cat(parts, 2), whole)
    # Through the clip's loop, where the first parts have no frames yet.
    features = decode_features(looking, z.split(sizes, 2), lambda: None)
    looped = [y for part in decode_frames(looking, features, Steps(0, 2), lambda: None) for y in part]
    assert torch.equal(torch.cat(looped, 2), whole)


@torch.no_grad()
def test_frames_around_a_chunk(looking, noise):
    """Not a causal network in disguise: what comes later changes what came before, within its reach."""
    z = noise(1, 8, 9, 5, 6)
    changed = z.clone()
    changed[:, :, 5] += 1
    moved = (looking(z) != looking(changed)).any(-1).any(-1).any(1)[0]
    assert moved.any() and int(moved.nonzero()[0]) < 9  # frames 9 and 10 are of the latent itself
    assert looking.program.reach[1] > 0


def test_the_fused_walk_says_why_not(looking):
    assert "look at later frames" in looking.program.why_not_fused()
    assert Program.of("decoder", 8, *ahead().items).why_not_fused() is None


@torch.no_grad()
def test_chunk_statistics_are_of_the_whole_chunk(noise):
    norm = Group(2, (3, 4)).module(4, act=False)
    x = noise(1, 4, 10, 3, 3)
    expected = [F.group_norm(part, 2, eps=1e-6) for part in x.split([3, 4, 3], 2)]
    torch.testing.assert_close(norm(x), torch.cat(expected, 2))


def test_an_encoder_is_derived_as_well(seed_model, noise, atol):
    norm = Group(4)
    program = Program.of(
        "encoder", 3,
        Conv("enter", 3, 16), StridedDown("half", 16, temporal=False), STEP,
        Res("r", 16, 24, norm), StridedDown("quarter", 24, temporal=True), TILES,
        Res("s", 24, 24, norm), Moments("n", "leave", 24, 32, norm),
    )  # fmt: skip
    model = Network(Config(), program, None).requires_grad_(False)
    seed_model(model, 2)
    video = noise(5, 13, 18, 3)
    network = fuse(model.encoder, torch.float32)
    with torch.no_grad():
        expected = model.encoder(video.permute(3, 0, 1, 2)[None])[0].permute(1, 2, 3, 0)
        for sizes, frames in (([5], 0), ([1, 2, 2], 1), ([3, 2], 2)):
            run = network.plan(3, 13, 18, frames, CPU)
            run.allocate()
            out = torch.cat([network.chunk(run, part, frames).clone() for part in video.split(sizes)])
            torch.testing.assert_close(out, expected, rtol=0, atol=atol)
    assert program.frames(5) == 3
