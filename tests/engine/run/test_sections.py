"""Sections of a clip: bit by bit what the whole clip gives, from as few latents before them as the Program says."""

import itertools

import pytest
import torch
from zerowaste_vae.engine.archs import seedvr2, wan
from zerowaste_vae.engine.halves import FusedHalves, PlainHalves
from zerowaste_vae.engine.network.program import Program
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.fused_walk import FusedWalk
from zerowaste_vae.engine.run import clip
from zerowaste_vae.engine.run.guard import Guard
from zerowaste_vae.engine.run.parking import Parking
from zerowaste_vae.engine.run.pixels import PixelSink
from zerowaste_vae.engine.run.plan import Plan, Steps
from zerowaste_vae.engine.run.progress import Ticker
from zerowaste_vae.engine.run.sections import Section, chunks, frames_of
from zerowaste_vae.engine.run.tiles import grid

CPU = torch.device("cpu")
WIDTHS = (16, 16, 16, 16)
FAMILIES = {
    "seedvr2": (seedvr2.ARCHITECTURE, seedvr2.Config(WIDTHS, WIDTHS, 16, 2)),
    "wan2.1": (wan.WAN21, wan.Config(WIDTHS, WIDTHS)),
    "wan2.2": (wan.WAN22, wan.Config(WIDTHS, WIDTHS, 48, 2)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, seed_model):
    architecture, config = FAMILIES[request.param]
    model = architecture.build(config).requires_grad_(False)
    seed_model(model, 5)
    return architecture, model


def halves(family, fused, name):
    architecture, model = family
    if fused:
        made = FusedHalves(model, FusedWalk(architecture, model.config, torch.float32, DEFAULTS))
    else:
        made = PlainHalves(model, architecture, torch.float32)
    return made.half(name, architecture.scale, CPU)


def plan(latents, frames, fused, rows, parking=None, tile=0):
    tiles = grid(*rows, tile or 1 << 16, 16 if tile else 0, 8)
    return Plan(Steps(latents, frames), tiles, 0, fused, parking)


def guard():
    from collections import Counter

    return Guard(Ticker(None, None), CPU, Counter())


@torch.no_grad()
def decode(half, z, plan, *sections):
    s, t = half.spatial, half.temporal
    sink = PixelSink((1, frames_of(z.shape[2], t), s * z.shape[3], s * z.shape[4], 3), torch.float32)
    sink.out.fill_(-1)
    clip.decode(half, z, plan, sink, guard(), sections)
    return sink.finish()[0]


@torch.no_grad()
def encode(half, x, plan, latents, channels, *sections):
    out = torch.full((1, 2 * channels, latents, *(n // half.spatial for n in x.shape[2:4])), -1.0)
    clip.encode(half, x, plan, out, guard(), sections)
    return out[0].transpose(0, 1)


def same(part, whole, chunk=1):
    """A CPU's convolutions round otherwise in chunks of another size."""
    if chunk == 1:
        assert torch.equal(part, whole)
    else:
        torch.testing.assert_close(part, whole, rtol=0, atol=2e-5 * float(whole.std()))


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_a_section_decodes_to_the_whole_clips_frames(family, fused, noise, monkeypatch):
    """A smaller lead of any step does not."""
    half, program = halves(family, fused, "decoder"), family[1].decoder.program
    z, t = noise(1, program.takes, 44, 2, 3), family[0].temporal
    whole = decode(half, z, plan(1, 0, fused, (2, 3)))
    for first, end, size, frames in ((41, 43, 1, 0), (3, 5, 1, 1), (38, 44, 4, 2)):
        part = decode(half, z, plan(size, frames, fused, (2, 3)), Section(0, first, end))
        a, b = frames_of(first, t), frames_of(end, t)
        same(part[a:b], whole[a:b], size)
        assert bool((part[:a] == -1).all()) and bool((part[b:] == -1).all())
    begins = program.begins(42)
    assert begins[0] > 0
    # What the first frames of the front mean to the last ones is less than fp32 shows: half of its lead.
    for late in ((*begins[:-1], begins[-1] + 1), tuple(max(b, (begins[0] + 42) // 2) for b in begins)):
        monkeypatch.setattr(Program, "begins", lambda self, first, late=late: late)
        part = decode(halves(family, fused, "decoder"), z, plan(1, 0, fused, (2, 3)), Section(0, 42, 43))
        assert not torch.equal(part[frames_of(42, t) : frames_of(43, t)], whole[frames_of(42, t) : frames_of(43, t)])


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_a_section_encodes_to_the_whole_clips_moments(family, fused, noise, monkeypatch):
    half, program = halves(family, fused, "encoder"), family[1].encoder.program
    s, c = family[0].spatial, family[1].config.latent_channels
    video = noise(1, frames_of(34, 4), s, 2 * s, 3).sigmoid()
    whole = encode(half, video, plan(1, 0, fused, (1, 2)), 34, c)
    for first, end, size, frames in ((31, 33, 1, 0), (2, 5, 1, 1), (30, 34, 4, 2)):
        part = encode(half, video, plan(size, frames, fused, (1, 2)), 34, c, Section(0, first, end))
        same(part[first:end], whole[first:end], size)
        assert bool((part[:first] == -1).all()) and bool((part[end:] == -1).all())
    begins = program.begins(33)
    assert begins[0] > 0
    late = tuple(max(b, (begins[0] + 33) // 2) for b in begins)
    monkeypatch.setattr(Program, "begins", lambda self, first: late)
    part = encode(halves(family, fused, "encoder"), video, plan(1, 0, fused, (1, 2)), 34, c, Section(0, 33, 34))
    assert not torch.equal(part[33], whole[33])


@pytest.mark.parametrize("parking", [Parking(None, 0), Parking(None, 0, buffers=3, prefetch=False)])
def test_histories_may_be_parked(family, parking, noise):
    program, t = family[1].decoder.program, family[0].temporal
    half, z = halves(family, True, "decoder"), noise(1, program.takes, 40, 2, 3)
    whole = decode(half, z, plan(1, 0, True, (2, 3)))
    part = decode(half, z, plan(1, 4, True, (2, 3), parking), Section(0, 38, 40))
    assert torch.equal(part[frames_of(38, t) :], whole[frames_of(38, t) :])


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
def test_blended_tiles_of_a_section_are_those_of_the_clip(family, fused, noise):
    program, t, s = family[1].decoder.program, family[0].temporal, family[0].spatial
    tiled = {"tile": 4 * 8}
    half, z = halves(family, fused, "decoder"), noise(1, program.takes, 24, 3, 6)
    whole = decode(half, z, plan(1, 0, fused, (3, 6), **tiled))
    part = decode(half, z, plan(1, 0, fused, (3, 6), **tiled), Section(0, 21, 23))
    a, b = frames_of(21, t), frames_of(23, t)
    assert torch.equal(part[a:b], whole[a:b])
    if fused:
        return
    c, half = family[1].config.latent_channels, halves(family, False, "encoder")
    video = noise(1, frames_of(9, 4), 3 * s, 6 * s, 3).sigmoid()
    whole = encode(half, video, plan(1, 0, False, (3, 6), **tiled), 9, c)
    part = encode(half, video, plan(1, 0, False, (3, 6), **tiled), 9, c, Section(0, 7, 9))
    assert torch.equal(part[7:], whole[7:])


def test_sections_are_reported_as_one_progress(vae, noise):
    seen = []
    z = noise(2, 16, 6, 2, 2)
    half = PlainHalves(vae.model, vae.architecture, torch.float32).half("decoder", 1.0, CPU)
    sink = PixelSink((2, frames_of(6, 4), 16, 16, 3), torch.float32)
    g = guard()
    g.tick = Ticker(lambda done, total: seen.append((done, total)), None)
    with torch.no_grad():
        clip.decode(half, z, plan(1, 0, False, (2, 2)), sink, g, (Section(0, 2, 6), Section(1, 0, 3)))
    assert seen == [(i, 7) for i in range(1, 8)]


@pytest.mark.parametrize("first, end, size, edges", [(0, 7, 3, ()), (2, 9, 4, (0, 3, 5, 9)), (4, 5, 1, (1, 2))])
def test_chunks_follow_each_other_and_cross_no_edge(first, end, size, edges):
    spans = list(chunks(first, end, size, edges))
    assert [i for span in spans for i in range(*span)] == list(range(first, end))
    assert all(b - a <= size for a, b in spans)
    ends = {a for a, _ in spans}
    assert all(e in ends for e in edges if first < e < end)
    assert all(b == a for (_, a), (b, _) in itertools.pairwise(spans))
