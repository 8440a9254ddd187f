"""Wan's fused halves against the plain modules, through the reference operators, in every chunking and placement."""

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae import load
from zerowaste_vae.engine.families import wan
from zerowaste_vae.engine.kernels.targets import capabilities
from zerowaste_vae.engine.network.fused import FusedDecoder, FusedEncoder
from zerowaste_vae.engine.network.ops.resnet import Res
from zerowaste_vae.engine.network.stream import frame_spans
from zerowaste_vae.engine.options import Options
from zerowaste_vae.engine.planning.fusable import why_off
from zerowaste_vae.engine.runtime.parking import Parking

CPU = torch.device("cpu")
# 2.1: the latent's own ring coincides with the lowest stage's. 2.2: its shortcuts need widths that divide each other.
CONFIGS = {
    "2.1": wan.Config((8, 8, 16, 16), (8, 16, 16, 16)),
    "2.2": wan.Config((8, 16, 32, 32), (8, 16, 32, 32), 48, 2),
}
SIZES = {"2.1": (16, 4, 5), "2.2": (48, 3, 4)}


@pytest.fixture(scope="module", params=["2.1", "2.2"])
def network(request, seed_model):
    model = wan.WAN21.build(CONFIGS[request.param]).requires_grad_(False)
    seed_model(model, 3)
    return request.param, model


@pytest.fixture(scope="module")
def decoders(network):
    version, model = network
    return version, model.decoder, FusedDecoder(model.decoder, torch.float32)


def decode(fused, z, chunk, frames, output=torch.float32, parking=None):
    """[C, T, h, w] -> [F, H, W, 3]"""
    run = fused.plan(min(chunk, z.shape[1]), *z.shape[2:], frames, output, CPU, parking)
    stated = run.nbytes
    run.allocate()
    out = []
    for part in z.permute(1, 2, 3, 0).split(chunk):
        run.scout(lambda part=part: fused.chunk(run, part, frames, output, out.append))
        fused.chunk(run, part, frames, output, lambda pixels: out.append(pixels.clone()))
    assert run.nbytes == stated
    assert not run.parked.coming
    run.free()
    return torch.cat(out)


def pictures(plain, z):
    return plain(z[None])[0].clamp(-1, 1).mul(0.5).add(0.5).permute(1, 2, 3, 0)


@pytest.mark.parametrize(("chunk", "frames"), [(5, 0), (1, 0), (2, 0), (3, 2), (1, 1), (2, 3), (4, 5)])
@torch.no_grad()
def test_decoder_equals_plain_in_every_chunking(decoders, noise, chunk, frames, atol):
    version, plain, fused = decoders
    c, h, w = SIZES[version]
    z = noise(c, 5, h, w)
    torch.testing.assert_close(decode(fused, z, chunk, frames), pictures(plain, z), rtol=0, atol=atol)


@torch.no_grad()
def test_bytes_and_one_frame(decoders, noise):
    version, plain, fused = decoders
    z = noise(SIZES[version][0], 1, 3, 4, seed=1)
    out = decode(fused, z, 1, 0, torch.uint8)
    assert out.dtype == torch.uint8
    assert (out.float() - pictures(plain, z) * 255).abs().max() <= 0.51


@torch.no_grad()
def test_without_composed_upsampling(network, noise, atol):
    version, model = network
    fused = FusedDecoder(model.decoder, torch.float32, Options(composed_upsample=False, flash_attention=False))
    c, h, w = SIZES[version]
    z = noise(c, 3, h, w)
    for chunk in (1, 3):
        torch.testing.assert_close(decode(fused, z, chunk, 0), pictures(model.decoder, z), rtol=0, atol=atol)


@torch.no_grad()
def test_parked_histories(decoders, noise, atol):
    version, plain, fused = decoders
    z = noise(SIZES[version][0], 3, 17 if version == "2.1" else 9, 2)  # more than one band at full size
    expected = pictures(plain, z)
    for parking, chunk, frames in ((Parking(None, 0), 1, 1), (Parking(None, 0, buffers=3, prefetch=False), 2, 3)):
        out = decode(fused, z, chunk, frames, parking=parking)
        torch.testing.assert_close(out, expected, rtol=0, atol=atol)


@torch.no_grad()
def test_next_clip_starts_afresh(decoders, noise):
    version, _, fused = decoders
    c, h, w = SIZES[version]
    run = fused.plan(2, h, w, 0, torch.float32, CPU)
    run.allocate()

    def clip(z):
        run.restart()
        out = []
        for part in z.permute(1, 2, 3, 0).split(2):
            fused.chunk(run, part, 0, torch.float32, lambda pixels: out.append(pixels.clone()))
        return torch.cat(out)

    a, b = noise(c, 4, h, w), noise(c, 3, h, w, seed=1)
    first = clip(a)
    clip(b)
    assert torch.equal(clip(a), first)


@pytest.mark.parametrize(
    ("count", "height", "width", "chunk", "frames", "parked"),
    [(9, 32, 32, 0, 0, False), (13, 35, 39, 2, 3, False), (9, 37, 33, 1, 1, True), (1, 16, 40, 1, 0, False)],
)
@torch.no_grad()
def test_encoder_equals_plain(network, noise, count, height, width, chunk, frames, parked, atol):
    _, model = network
    fused = FusedEncoder(model.encoder, torch.float32)
    x = noise(1, 3, count, height, width)
    latents = (count - 1) // 4 + 1
    parking = Parking(None, 0) if parked else None
    run = fused.plan(min(chunk or latents, latents), height, width, frames, CPU, parking)
    stated = run.nbytes
    run.allocate()
    assert run.nbytes == stated
    video = x[0].permute(1, 2, 3, 0)
    out = []
    for a, b in frame_spans(count, chunk, 4):
        run.scout(lambda a=a, b=b: fused.chunk(run, video[a:b], frames))
        out.append(fused.chunk(run, video[a:b], frames).clone())
    run.free()
    torch.testing.assert_close(torch.cat(out), model.encoder(x)[0].permute(1, 2, 3, 0), rtol=0, atol=atol)


@pytest.fixture(scope="module")
def vaes(network, tmp_path_factory):
    """The plain VAE and the fused one of the same file."""
    version, model = network
    path = tmp_path_factory.mktemp("wan") / f"{version}.safetensors"
    save_file(model.state_dict(), path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
        yield load(path, device="cpu"), load(path, device="cpu")


def test_the_vae_runs_them(vaes, noise, atol):
    plain, fused = vaes
    plain.triton_fusion = False
    c, h, w = SIZES[plain.arch.removeprefix("wan")]
    z = noise(2, c, 3, h, w)
    assert fused.plan_decode(3, h, w).fused
    assert not plain.plan_decode(3, h, w).fused
    torch.testing.assert_close(fused.decode(z), plain.decode(z), rtol=0, atol=atol)
    video = torch.rand(2, 6, 2 * plain.spatial, 2 * plain.spatial + 7, 3, generator=torch.Generator().manual_seed(1))
    assert fused.plan_encode(2, 2, 2).fused
    torch.testing.assert_close(fused.encode(video), plain.encode(video), rtol=0, atol=atol)
    tiles = {"tiling": "blended", "tile": 4 * plain.spatial, "overlap": 2 * plain.spatial, "chunk": 2}
    z = noise(1, c, 3, 5, 6)
    assert fused.plan_decode(3, 5, 6, **tiles).tiled
    torch.testing.assert_close(fused.decode(z, **tiles), plain.decode(z, **tiles), rtol=0, atol=atol)


def last_blocks(decoder):
    """The residual blocks at full size whose widths agree."""
    steps = [s for s in decoder.program.steps if isinstance(s, Res)]
    return [decoder.part(s.name) for s in steps[-2:]]


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_what_overflows_in_fp16_is_made_again(version, seed_model, noise, monkeypatch, tmp_path):
    """Norms take any length, but the residual stream between them leaves the range."""
    configs = {"2.1": wan.Config(None, (16, 32, 32, 32)), "2.2": wan.Config(None, (16, 32, 32, 32), 48, 2)}
    model = wan.WAN21.build(configs[version]).requires_grad_(False)
    seed_model(model, 3)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    vae = load(tmp_path / "w.safetensors", precision="fp16", device="cpu")
    for block in last_blocks(vae.model.decoder):
        block.conv2.bias.fill_(6e4)
    c, h, w = SIZES[version]
    frames = vae.decode(noise(1, c, 2, h, w))
    assert vae.last_report.events["nan_reruns"] == 1
    assert torch.isfinite(frames).all()


def test_why_off_names_widths_and_needs_no_model(monkeypatch):
    monkeypatch.setattr("zerowaste_vae.engine.planning.fusable.target", lambda *_: capabilities("any", 90, (3, 6)))
    device = torch.device("cuda")
    assert why_off("wan2.1", None, torch.bfloat16, device) is None
    assert why_off("wan2.1", wan.Config(None, (96, 192, 384, 384)), torch.bfloat16, device) is None
    # 16 / 2 channels behind the last upsampler.
    assert "widths [8]" in why_off("wan2.1", wan.Config(None, (16, 16, 32, 32)), torch.bfloat16, device)
    assert "float32" in why_off("wan2.2", None, torch.float32, device)
    assert why_off("movq", None, torch.bfloat16, device) == "no fused network for movq"
