"""A call that comes again is not planned anew, and what the last one left changes no bit."""

import pytest
import torch
from zerowaste_vae import Cancelled
from zerowaste_vae.engine.execution.reuse import chunks_left
from zerowaste_vae.engine.network.fused import FusedDecoder, FusedEncoder
from zerowaste_vae.engine.system import devices


@pytest.fixture
def dry(monkeypatch):
    """The halves of dry walks that calls make for their memory."""
    made = []
    for kind in (FusedDecoder, FusedEncoder):
        plain = kind.plan

        def plan(network, *args, plain=plain):
            made.append(type(network).__name__)
            return plain(network, *args)

        monkeypatch.setattr(kind, "plan", plan)
    return made


def test_same_call(make_vae, noise, dry):
    """A call that comes again is not planned anew."""
    vae = make_vae()
    vae.release()
    z, video = noise(2, 16, 3, 2, 3), noise(5, 16, 24, 3).sigmoid()
    frames = vae.decode(z, chunk=2)
    latent = vae.encode(video)
    vae.decode(z, chunk=1)  # the planner walks too, once
    vae.release()
    del dry[:]
    for _ in range(2):
        assert torch.equal(vae.decode(z, chunk=2), frames)
    assert dry == ["FusedDecoder"]
    assert torch.equal(vae.decode(z, chunk=2, frames=4), frames[:, :4])
    assert torch.equal(vae.encode(video), latent) and torch.equal(vae.encode(video), latent)
    assert dry == ["FusedDecoder", "FusedEncoder"]
    vae.decode(z, chunk=1)
    assert torch.equal(vae.decode(z, chunk=2), frames)
    assert len(dry) == 4
    vae.release()
    assert torch.equal(vae.decode(z, chunk=2), frames) and len(dry) == 5


def test_broken_off_call(make_vae, noise, dry):
    """A call that was broken off leaves nothing."""
    vae = make_vae()
    z, told = noise(1, 16, 4, 2, 3), []
    frames = vae.decode(z, chunk=1)
    del dry[:]
    with pytest.raises(Cancelled):
        vae.decode(z, chunk=1, progress=lambda *at: told.append(at), cancel=lambda: len(told) > 1)
    stream = vae.stream(z, chunk=1)
    next(stream)
    stream.close()
    assert torch.equal(vae.decode(z, chunk=1), frames) and len(dry) == 2


@pytest.mark.parametrize("fused", [True, False])
def test_cached_blocks(make_vae, noise, monkeypatch, fused):
    """Blocks fit who cut them: without this, two VAEs in turns reserve twice what each of them states."""
    emptied = []
    monkeypatch.setattr(devices, "keeps_blocks", lambda device: True)
    monkeypatch.setattr(devices, "empty_device_cache", lambda: emptied.append(1))
    monkeypatch.setattr(devices, "_owners", {})
    vae = make_vae(fused=fused)
    vaes = [vae, vae.with_options(vae.options) if fused else make_vae("fp16", False)]
    z, video = noise(1, 16, 2, 2, 3), noise(5, 16, 24, 3).sigmoid()
    for vae, work, source, times in (
        (vaes[0], "decode", z, 1), (vaes[0], "decode", z, 0), (vaes[1], "decode", z, 1), (vaes[1], "decode", z, 0),
        (vaes[1], "encode", video, 1), (vaes[1], "encode", video, 0), (vaes[0], "decode", z, 1),
    ):  # fmt: skip
        del emptied[:]
        getattr(vae, work)(source)
        assert vae.last_report.mode.startswith("reference" if fused else "plain")
        assert len(emptied) == times, (work, times)


@pytest.mark.parametrize(("clips", "latents", "done", "chunk", "left"), [
    (0, 16, 0, 4, 1),  # a clip's start comes once
    (2, 16, 0, 4, 3),
    (0, 16, 4, 4, 3),
    (1, 16, 4, 4, 6),
    (0, 61, 60, 1, 1),
    (0, 9, 1, 1, 1),  # neither start nor settled
    (0, 9, 2, 1, 7),
])  # fmt: skip
def test_chunks_left(clips, latents, done, chunk, left):
    assert chunks_left(clips, latents, done, chunk) == left
