"""Networks whose middle sees whole clips, and norms over chunks: parked, handed over, chunk by chunk."""

import functools

import pytest
import torch
from zerowaste_vae.engine.families import hunyuan, hunyuan15
from zerowaste_vae.engine.network.fused import fuse
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.runtime.handover import hand_over, take_over
from zerowaste_vae.engine.runtime.parking import Parking

CPU = torch.device("cpu")
#: (architecture, its configuration, latents' size).
MODELS = {
    "chunks": (hunyuan.ARCHITECTURE, hunyuan.Config((8, 16, 16, 24), (8, 16, 16, 24), 4, norm_groups=4), (5, 5, 3)),
    "any": (hunyuan15.ARCHITECTURE, hunyuan15.Config((8, 8, 16, 32, 32), (8, 8, 16, 32, 32), 16), (5, 3, 2)),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, seed_model):
    architecture, config, size = MODELS[request.param]
    network = architecture.build(config).requires_grad_(False)
    seed_model(network, 3)
    return architecture, network, (config.latent_channels, *size)


def spans(network, latents, chunk):
    lead, size = network.chunks or (0, chunk)
    return Steps(size, lead=lead).spans(latents)


def decode(network, z, chunk, parking, relay=()):
    """[C, T, h, w] -> [F, H, W, 3]. relay: chunks after which another ExecutionContext goes on."""
    z = z.permute(1, 2, 3, 0)
    size = chunk, *z.shape[1:3], 0, torch.float32, CPU
    out, run = [], network.plan(*size, parking, z.shape[0])
    stated = run.nbytes
    run.allocate()
    network.gather(run, z)
    for i, (first, end) in enumerate(spans(network, z.shape[0], chunk)):
        features, last = run.gathered[first:end].clone(), end == z.shape[0]
        step = functools.partial(network.chunk, run, features, 0, torch.float32)
        run.scout(lambda step=step, last=last: step(out.append, last))
        with run.chunk():
            step(lambda pixels: out.append(pixels.clone()), last)
        if i in relay:
            left = hand_over(run)
            run.free()
            run = network.plan(*size, None if parking else Parking(None, 0), z.shape[0])
            run.allocate()
            take_over(run, left)
    assert run.nbytes == stated or relay
    run.free()
    return torch.cat(out)


@pytest.mark.parametrize(("parking", "relay"), [(None, ()), (Parking(None, 0), ()), (None, (0,)), (None, (0, 1))])
@torch.no_grad()
def test_decoder(model, noise, parking, relay, atol):
    _, network, (c, t, h, w) = model
    z, fused = noise(c, t, h, w), fuse(network.decoder, torch.float32)
    expected = network.decoder(z[None])[0].clamp(-1, 1).mul(0.5).add(0.5).permute(1, 2, 3, 0)
    for chunk in (2,) if fused.chunks else (1, 2, 5):
        torch.testing.assert_close(decode(fused, z, chunk, parking, relay), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("parking", [None, Parking(None, 0)])
@torch.no_grad()
def test_encoder(model, noise, parking, atol):
    architecture, network, (_, t, h, w) = model
    s = architecture.spatial
    video, fused = noise(4 * t - 3, s * h, s * w, 3), fuse(network.encoder, torch.float32)
    expected = network.encoder(video.permute(3, 0, 1, 2)[None])[0].permute(1, 2, 3, 0)
    for chunk, frames in ((2, 0),) if fused.chunks else ((1, 1), (2, 3), (5, 0)):
        run, out = fused.plan(chunk, s * h, s * w, frames, CPU, parking, t), []
        run.allocate()
        for first, end in spans(fused, t, chunk):
            part = video[max(0, 4 * first - 3) : 4 * end - 3]
            run.scout(functools.partial(fused.chunk, run, part, frames))
            run.gathered[first:end].copy_(fused.chunk(run, part, frames))
        fused.gather(run, lambda moments, out=out: out.append(moments.clone()))
        torch.testing.assert_close(out[0], expected, rtol=0, atol=atol * float(expected.std()))
        run.free()


@torch.no_grad()
def test_the_middle_sees_the_whole_clip(model, noise):
    """Its last latent changes the first frame."""
    _, network, (c, t, h, w) = model
    z = noise(1, c, t, h, w)
    changed = z.clone()
    changed[:, :, -1] += 1
    assert (network.decoder(z) - network.decoder(changed))[:, :, 0].abs().max() > 1e-3


def test_what_sees_the_clip_has_room_in_the_arena(model):
    _, network, (_, _, h, w) = model
    fused = fuse(network.decoder, torch.float32)
    for clip in (2, 40):
        run = fused.plan(2, h, w, 0, torch.float32, CPU, None, clip)
        assert run.arena.peak >= fused.plan_front(clip, h, w, CPU).inner_bytes
        assert run.gathered_bytes == 4 * clip * h * w * fused.features
