"""Parts of a clip of LTX-2.5's diffusion decoder, streams of them, and several devices, for which one CPU stands in:
the bits and the noise of the whole clip."""

from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.extras.distributed.shares import duration, leads_of, split
from zerowaste_vae.engine.families.ltx_diffusion import ARCHITECTURE
from zerowaste_vae.engine.families.ltx_diffusion.neighbours import GROUP
from zerowaste_vae.engine.families.ltx_diffusion.running import noise as noises
from zerowaste_vae.engine.network.steps import Steps

from .test_ltx_passes import small

LATENTS, TWO = 24, ["cpu", "cpu"]


@pytest.fixture(scope="module")
def clip():
    """(VAE, latents, the frames of the whole clip)"""
    vae, _ = small(blocks=1)
    z = torch.randn(1, 16, LATENTS, 2, 2, generator=torch.Generator().manual_seed(3))
    return vae, z, vae.decode(z)


@pytest.mark.parametrize("start, frames", [(0, 9), (80, 12), (133, 1), (180, 5)])
def test_parts(clip, start, frames):
    """They begin late, but no frame that they have to do without counts."""
    vae, z, whole = clip
    assert torch.equal(vae.decode(z, start=start, frames=frames), whole[:, start : start + frames])
    program = vae.model.decoder.program
    first, last = program.window(start, start + frames, LATENTS)
    assert first % GROUP == 0 and last - first < LATENTS
    if start < 133:
        return
    plan = replace(vae.plan_decode(last - first, 2, 2), steps=Steps(last - first, 8, pieces=True, passes=2))
    told = []
    made = vae.decode(z, start=start, frames=frames, plan=plan, progress=lambda *at: told.append(at))
    assert torch.equal(made, whole[:, start : start + frames])
    assert told == sorted(set(told)) and len(told) > 1 and told[-1] == (last - first, last - first)


def test_nearer_is_too_near(clip, monkeypatch):
    """A part that begins later than it may has other frames."""
    vae, z, whole = clip
    program = vae.model.decoder.program
    first = program.begins(150)[0]
    monkeypatch.setattr(type(program), "begins", lambda self, at: (first + 12,) * len(self.steps))
    assert not torch.equal(vae.decode(z, start=150, frames=1), whole[:, 150:151])


def test_streams(clip):
    vae, z, whole = clip
    assert torch.equal(torch.cat(list(vae.stream(z)), 1), whole)
    assert torch.equal(torch.cat(list(vae.stream(z, start=120, frames=30)), 1), whole[:, 120:150])


def test_devices(clip, monkeypatch):
    """Each makes a part, with the whole clip's noise, also that of a seed; each clip of a batch is as alone."""
    vae, z, whole = clip
    drawn, draw = [], noises.FrameNoise.__init__

    def noted(self, *of, **more):
        drawn.append(of[1])
        draw(self, *of, **more)

    monkeypatch.setattr(noises.FrameNoise, "__init__", noted)
    assert torch.equal(vae.decode(z, devices=TWO), whole)
    assert len(vae.last_report.parts) == 2
    assert drawn == [8 * LATENTS - 7] * 2
    assert torch.equal(torch.cat(list(vae.stream(z, devices=TWO)), 1), whole)
    seeded = vae.decode(z, devices=TWO, seed=2)
    border = vae.last_report.parts[1][0].start
    assert torch.equal(seeded[:, border - 4 : border + 4], vae.decode(z, seed=2, start=border - 4, frames=8))
    batch = torch.cat((z[:, :, :2], z[:, :, 2:4]))
    alone = torch.cat([vae.decode(one[None]) for one in batch])
    assert torch.equal(vae.decode(batch, devices=TWO), alone)


def test_shares():
    """What a share computes beyond its own frames, before and after, counts: short clips are one device's."""
    leads = leads_of(ARCHITECTURE.program("decoder", ARCHITECTURE.published.config), 22, 40, 16)
    assert leads.tail == 24
    assert len(split(leads, 31, [1.0, 1.0])) == 1
    shares = split(leads, 200, [1.0, 1.0])
    assert len(shares) == 2 and shares[0].lead == leads(0) + leads.tail and shares[1].lead == leads(shares[1].first)
    assert max(s.end - s.first for s in shares) < duration(shares, [1.0, 1.0]) < 0.7 * 200
    assert len(split(leads, 4, [1.0, 1.0], clips=2)) == 2
