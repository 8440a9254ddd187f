"""LTX-Video's VAEs against recorded outputs of the originals, in chunks, and on the fused operators."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from zerowaste_vae import Cancelled, InputError, VideoVAE, load
from zerowaste_vae.engine.families import by_file
from zerowaste_vae.engine.families.ltx import ARCHITECTURE, STRIDES, Block, Config, decoder
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.network.stream import decode_features, decode_frames
from zerowaste_vae.engine.runtime.handover import hand_over, take_over
from zerowaste_vae.engine.runtime.parking import Parking

from .originals import close

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["ltx_v2", "ltx2_0"])
def golden(request, shared):
    """(VAE of the recorded weights, recorded tensors)"""
    folder = shared / "golden" / "other"
    vae = load(folder / f"{request.param}.weights.safetensors", device="cpu")
    return vae, load_file(folder / f"{request.param}.io.safetensors")


def test_decodes_are_the_originals(golden):
    vae, tensors = golden
    lengths = [name.partition(".")[0] for name in tensors if name.endswith(".decode")]
    assert len(lengths) >= 2
    for name in lengths:
        decoded = vae.decode_raw(tensors[f"{name}.latent"], chunk=1, frames=3)
        close(decoded, tensors[f"{name}.decode"])


def test_a_pruned_decoder_is_the_originals(shared):
    """PrunaVAED: fewer channels, by blocks of their own, in plain torch. A norm over three channels is sharp, hence the
    bound."""
    folder, bound = shared / "golden" / "ltx_pruned", 2e-4
    vae = load(folder / "ltx_pruned.weights.safetensors", device="cpu")
    assert vae.arch == "ltx" and not vae.can_encode and vae.model.config.decoder_widths[-1] == 3
    assert "shortcuts have norms of their own" in decoder(vae.model.config).why_not_fused()
    tensors = load_file(folder / "ltx_pruned.io.safetensors")
    for name in ("T1", "T2", "T4"):
        z, expected = tensors[f"{name}.latent"], tensors[f"{name}.decode"]
        whole = vae.decode_raw(z)
        close(whole, expected, bound)
        for chunk, frames in ((1, 0), (1, 1), (2, 3), (3, 1)):
            assert torch.equal(vae.decode_raw(z, chunk=chunk, frames=frames), whole)
    assert by_file("pruna_ltx2.3_vae_comfy_bf16.safetensors") is ARCHITECTURE


def test_what_a_file_says_is_read(golden, shared):
    vae, _ = golden
    config = vae.model.config
    timed = config.timestep is not None
    assert (config.timestep, config.noise) == ((0.05, 0.025) if timed else (None, 0.0))
    assert config.decoder_border == ("reflect" if timed else "zero")
    assert [b.shortcut for b in config.decoder_blocks if b.stride] == [True] * 3
    assert config.decoder_widths == (32, 16, 8, 4)


def blocks(width, kinds="all time space", shortcut=True, **given):
    """A residual block of each width, half of it behind each kind of resampling."""
    out = [Block(width, 1, **given)]
    for kind in kinds.split():
        width //= 2
        out += [Block(width, stride=STRIDES[kind], shortcut=shortcut and kind == "all"), Block(width, 1, **given)]
    return tuple(out)


def tiny(border="zero", timestep=None, latent=16, width=64, **given):
    half = blocks(width, **given)
    return Config(None, half, 0, width, latent, encoder_border=border, decoder_border=border, timestep=timestep)


@pytest.fixture(scope="module")
def build(seed_model):
    def make(config, seed=5):
        model = ARCHITECTURE.build(config).requires_grad_(False)
        seed_model(model, seed)
        return model

    return make


def test_parameters_are_where_their_names_say(build):
    """ComfyUI walks down the parts of a name."""
    model = build(tiny(timestep=0.05))
    for name, parameter in model.named_parameters():
        at = model
        for part in name.split("."):
            at = getattr(at, part)
        assert at is parameter


@torch.no_grad()
def test_every_chunking_is_the_whole_clip(build, noise):
    """Bit by bit: every step takes a frame at a time."""
    decoder = build(tiny("reflect", 0.05, width=16)).decoder
    z = noise(1, 16, 9, 2, 3)
    whole = decoder(z)
    assert whole.shape == (1, 3, 33, 32, 48)
    for chunk, frames in ((1, 0), (2, 3), (4, 1)):
        features = decode_features(decoder, z.split(chunk, 2), lambda: None)
        parts = decode_frames(decoder, features, Steps(chunk, frames), lambda: None)
        assert torch.equal(torch.cat([y for part in parts for y in part], 2), whole)


def fused(network, z, chunk, frames, parking=None):
    """[C, T, h, w] -> frames, as a plan says."""
    run, out = network.plan(chunk, *z.shape[2:], frames, torch.float32, CPU, parking), []
    planned = run.nbytes
    run.allocate()
    parts = z.permute(1, 2, 3, 0).split(chunk)
    for i, part in enumerate(parts, 1):
        ends = i == len(parts)
        run.scout(lambda part=part, ends=ends: network.chunk(run, part, frames, torch.float32, out.append, ends))
        network.chunk(run, part, frames, torch.float32, lambda pixels: out.append(pixels.clone()), ends)
    assert run.nbytes == planned
    run.free()
    return torch.cat(out)


@pytest.mark.parametrize(
    "config",
    [
        tiny(), tiny("reflect", 0.05), tiny("replicate", shortcut=False), tiny(kinds="space all time all"),
        replace(tiny(), causal=True),
    ],
    ids=["2.3", "timed", "no shortcut", "four levels", "causal"],
)
@torch.no_grad()
def test_the_fused_walk_looks_ahead(build, noise, exact_sums, config, atol):
    decoder = build(config).decoder
    assert decoder.program.why_not_fused() is None
    network = fuse(decoder, torch.float32)
    for count in (1, 2, 5):
        z = noise(16, count, 3, 4, seed=count)
        expected = decoder(z[None])[0].clamp(-1, 1).mul(0.5).add(0.5).permute(1, 2, 3, 0)
        whole = fused(network, z, count, 0)
        torch.testing.assert_close(whole, expected, rtol=0, atol=atol)
        parked, slowly = Parking(None, 0), Parking(None, 0, buffers=3, prefetch=False)
        for chunk, frames, parking in ((1, 1, None), (1, 1, parked), (1, 2, slowly), (2, 3, None), (3, 4, parked)):
            if chunk <= count:
                assert torch.equal(fused(network, z, chunk, frames, parking), whole)


@torch.no_grad()
def test_a_clip_goes_on_in_other_memory(build, noise, exact_sums):
    """Streams that wait are handed over with the histories, whatever follows."""
    decoder = build(tiny()).decoder
    network, z = fuse(decoder, torch.float32), noise(16, 5, 3, 4)
    whole = fused(network, z, 5, 0)
    latents = z.permute(1, 2, 3, 0)
    for first, then, parking in ((2, 3, Parking(None, 0)), (3, 1, None)):
        out = []
        run, other = (network.plan(n, 3, 4, 0, torch.float32, CPU, p) for n, p in ((first, None), (then, parking)))
        run.allocate()
        with run.chunk():
            network.chunk(run, latents[:first], 0, torch.float32, lambda pixels, out=out: out.append(pixels.clone()))
        left = hand_over(run)
        assert any(name.endswith("residual") for name in left.histories)
        other.allocate()
        take_over(other, left)
        for at in range(first, 5, then):
            part, ends = latents[at : at + then], at + then >= 5
            network.chunk(other, part, 0, torch.float32, lambda pixels, out=out: out.append(pixels.clone()), ends)
        assert torch.equal(torch.cat(out), whole)


def test_what_the_fused_walk_refuses(build):
    level, time = Block(16, 1), Block(16, stride=STRIDES["time"])
    for blocks_, says in (
        ((level, time, level), "frames double"),
        ((level, Block(8), Block(8, stride=STRIDES["all"])), "shortcuts"),
        (blocks(16, "all", noisy=True), "noise"),
    ):
        program = ARCHITECTURE.decoder(Config(None, blocks_, 0, 16, 16, timestep=None))
        assert says in program.why_not_fused()


@torch.no_grad()
def test_memory_at_the_end(build, noise, atol):
    """Many convolutions behind each other, which all get one frame more at the end."""
    all_, space = (Block(width, stride=STRIDES[kind]) for width, kind in ((16, "all"), (8, "space")))
    decoder = build(Config(None, (Block(16, 1), all_, Block(16, 5), space, Block(8, 7)), 0, 16, 16)).decoder
    network = fuse(decoder, torch.float32)
    z = noise(16, 6, 2, 3)
    expected = decoder(z[None])[0].clamp(-1, 1).mul(0.5).add(0.5).permute(1, 2, 3, 0)
    for chunk, frames in ((6, 0), (3, 0), (4, 2), (1, 1)):
        torch.testing.assert_close(fused(network, z, chunk, frames), expected, rtol=0, atol=atol)


@pytest.fixture
def fused_file(build, tmp_path, monkeypatch):
    """fused_file(config) -> (VAE on the fused operators' references, plain VAE)"""

    def make(config):
        path = tmp_path / "w.safetensors"
        description = {"decode_timestep": config.timestep, "decode_noise_scale": config.noise}
        mode = {"zero": "zeros"}.get(config.decoder_border, config.decoder_border)
        description = {k: v for k, v in description.items() if v is not None} | {"spatial_padding_mode": mode}
        save_file(build(config).state_dict(), path, {"config": json.dumps({"vae": description})})
        plain = load(path, device="cpu")
        plain.triton_fusion = False
        monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
        return load(path, device="cpu"), plain

    return make


def test_a_clip_is_decoded_by_plans(fused_file, noise, atol):
    config = tiny("reflect", kinds="all all all")
    quick, plain = fused_file(config)
    assert quick.model.config == plain.model.config == config
    z = noise(2, 16, 3, 2, 3)
    plan = quick.plan_decode(3, 2, 3, chunk=2)
    assert plan.fused and not plain.plan_decode(3, 2, 3).fused
    whole = quick.decode(z)
    torch.testing.assert_close(whole, plain.decode(z), rtol=0, atol=atol)
    for chunk in (1, 2):  # references of the operators: their convolutions are torch's, whose bits are not for ever
        torch.testing.assert_close(quick.decode(z, chunk=chunk), whole, rtol=0, atol=atol)
    lean = quick.plan_decode(3, 2, 3, vram_gb=(plan.peak_bytes - 1) / 2**30)
    assert lean.peak_bytes < plan.peak_bytes
    few = quick.decode(z, vram_gb=lean.peak_bytes / 2**30)
    torch.testing.assert_close(few, whole, rtol=0, atol=atol)
    tiles = {"tiling": "blended", "tile": 64, "overlap": 32}
    assert not quick.plan_decode(3, 4, 4, **tiles).fused
    assert quick.decode(noise(1, 16, 2, 4, 4), **tiles).shape == (1, 9, 128, 128, 3)


def test_a_part_of_a_clip_is_the_clips(fused_file, noise, atol):
    """Frames that wait for those ahead, with a clip that ends there or goes on."""
    config = Config(None, (Block(64, 1), *(Block(w, stride=STRIDES["all"]) for w in (32, 16, 8))), 0, 64, 16)
    quick, plain = fused_file(config)
    z = noise(1, 16, 8, 2, 3)
    whole = plain.decode(z)
    for start, count in ((0, 57), (9, 8), (30, 1), (50, 7)):
        expected = whole[:, start : start + count]
        assert torch.equal(plain.decode(z, start=start, frames=count, chunk=2), expected)
        for chunk in (1, 3):
            part = quick.decode(z, start=start, frames=count, chunk=chunk)
            torch.testing.assert_close(part, expected, rtol=0, atol=atol)


def test_noise_and_timesteps(fused_file, noise):
    """Noise is of the seed and timesteps are asked for."""
    quick, plain = fused_file(Config(None, blocks(64, "all all all"), 0, 64, 16, timestep=0.05, noise=0.025))
    z = noise(1, 16, 4, 2, 3)
    first = plain.decode(z)
    assert torch.equal(first, plain.decode(z, seed=0, noise=0.025, timestep=0.05, chunk=1))
    assert (first - plain.decode(z, seed=1)).abs().max() > 1e-3
    assert (first - quick.decode(z)).abs().max() < 1e-4
    still = plain.decode(z, noise=0.0)
    raw = plain.decode_raw(z).clamp(-1, 1).mul(0.5).add(0.5).permute(0, 2, 3, 4, 1)
    assert torch.equal(still, raw)
    other = quick.decode(z, noise=0.0, timestep=0.5)
    assert (other - still).abs().max() > 1e-3
    assert (quick.decode(z, noise=0.0) - still).abs().max() < 1e-4
    with pytest.raises(InputError, match="not a share"):
        quick.decode(z, noise=2.0)
    for timestep in (1.5, float("nan")):
        with pytest.raises(InputError, match="give 0 to 1"):
            quick.decode(z, timestep=timestep)
    quick.decode(z, timestep=0.5)
    timed = quick.at(0.5)
    assert timed.packed_bytes
    quick.release()  # that of the other timestep, too, which would else stay where this VAE was
    assert not timed.packed_bytes and quick.at(0.5) is not timed
    assert quick.last_report.complete
    with pytest.raises(Cancelled):
        quick.decode(z, timestep=0.5, cancel=lambda: True)
    assert not quick.last_report.complete
    with pytest.MonkeyPatch.context() as patch:  # another thread asks for another one meanwhile
        seen = iter([None])
        patch.setattr(VideoVAE, "_timed", property(lambda _: next(seen, (0.9, timed)), lambda *_: None), raising=False)
        own = quick.at(0.3)
        assert {m.timestep for m in own.model.modules() if getattr(m, "timestep", None) is not None} == {0.3}
    rounded = z.half()  # as floats have it: a file's latents are read as floats
    assert torch.equal(plain.decode(rounded), plain.decode(rounded.float()))


def test_a_reflected_border_needs_what_it_shows(fused_file, noise):
    quick, plain = fused_file(tiny("reflect", kinds="all all all"))
    for z in (noise(1, 16, 2, 1, 4), noise(1, 16, 2, 4, 1)):
        for call in (quick.decode, plain.decode, plain.decode_raw, lambda z: list(quick.stream(z))):
            with pytest.raises(InputError, match="at least 2x2 latent pixels"):
                call(z)
    with pytest.raises(InputError, match="16 channels, not 3"):
        plain.stream(SimpleNamespace(shape=(1, 3, 2, 4, 4)))  # as latents of a file are


def test_noise_in_chunks(fused_file, noise):
    """Noise between convolutions is the same in all chunks."""
    _, plain = fused_file(Config(None, blocks(64, "all all all", noisy=True), 0, 64, 16, timestep=0.05, noise=0.025))
    assert plain.model.config.decoder_blocks[0].noisy
    z = noise(1, 16, 4, 2, 3)
    whole = plain.decode(z, seed=3)
    assert torch.equal(whole, plain.decode(z, seed=3, chunk=1))
    assert not torch.equal(whole, plain.decode(z, seed=4))


def test_others_take_no_noise(vae, noise):
    for given in ({"seed": 1}, {"noise": 0.1}, {"timestep": 0.1}):
        with pytest.raises(InputError, match="leave"):
            vae.decode(noise(1, 16, 1, 4, 4), **given)


