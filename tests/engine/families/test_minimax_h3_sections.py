"""Cut clips and frames of a network that tiles itself."""

import itertools

import pytest
from zerowaste_vae.engine.extras.distributed.shares import SectionLeads, split
from zerowaste_vae.engine.families.minimax_h3.program import TiledProgram
from zerowaste_vae.engine.families.minimax_h3.tiles import NativeTiles

OWN = NativeTiles()


@pytest.mark.parametrize("latents, frames", [(1, 1), (2, 5), (3, 9), (6, 18), (7, 22), (12, 39), (13, 43), (27, 90)])
def test_frames_of_latents(latents, frames):
    assert OWN.decoded(latents) == frames
    sections = OWN.sections(latents)
    assert sections[-1].end + sections[-1].kept == frames and [s.ends for s in sections] == [False] * (
        len(sections) - 1
    ) + [True]
    assert all(a.end == b.begin and a.kept == OWN.blended for a, b in itertools.pairwise(sections))


@pytest.mark.parametrize("frames, latents", [(1, 1), (2, 2), (17, 2), (18, 7), (22, 7), (34, 7), (35, 12), (90, 27)])
def test_latents_of_frames(frames, latents):
    assert OWN.encoded(frames) == latents


def test_filled_clips_come_back():
    for frames in range(1, 60):
        filled = OWN.filled(frames)
        assert filled >= frames and OWN.decoded(OWN.encoded(filled)) == filled
        assert filled == 1 or ((filled - 5) % 17 == 0 and filled - frames < 17)


@pytest.mark.parametrize("length", [16, 240, 256, 257, 272, 288, 464, 528, 768, 1344, 2160, 4096])
def test_tiles_cover_an_axis(length):
    spans = OWN.spans(length)
    assert spans[0].start == 0 and spans[-1].end == length
    assert all(s.end - s.start == min(256, length) for s in spans[:-1])
    assert 256 - 16 < spans[-1].end - spans[-1].start <= 256 or len(spans) == 1
    for a, b in itertools.pairwise(spans):
        assert b.shared == a.start + 256 - b.start >= 64 and b.start % 16 == 0
    shared = [s.shared for s in spans[1:]]
    assert shared == sorted(shared, reverse=True) and (not shared or shared[0] - shared[-1] <= 16)


def test_published_frames_are_of_so_many_tiles():
    assert (len(OWN.spans(768)), len(OWN.spans(1344))) == (4, 7)
    assert [s.shared for s in OWN.spans(768)] == [0, 96, 80, 80]


def test_what_a_part_needs():
    assert [s.index for s in OWN.needed(0, 43, 13)] == [0, 1, 2]
    assert [s.index for s in OWN.needed(17, 18, 13)] == [0, 1]
    assert [s.index for s in OWN.needed(22, 34, 13)] == [1]
    assert [s.index for s in OWN.needed(35, 39, 12)] == [1]
    program = TiledProgram("decoder", (), 4)
    assert program.window(22, 34, 13) == (5, 12) and program.window(34, 43, 13) == (5, 13)
    assert TiledProgram("encoder", (), 4).window(6, 7, 12) == (5, 10)


def test_sections_are_shared():
    leads = SectionLeads(TiledProgram("decoder", (), 4), 27)
    assert leads.count == 5 and leads.of(89) == 4 and leads.begins(3) == 51 and leads.begins(5) > 90
    shares = split(leads, leads.count, [1.0, 1.0])
    assert [(s.first, s.end, s.lead) for s in shares] == [(0, 3, 0.0), (3, 5, 1.0)]
    assert SectionLeads(TiledProgram("encoder", (), 4), 27)(3) == 0.0
