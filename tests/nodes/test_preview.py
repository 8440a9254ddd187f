"""Which frame is shown while a decode goes on."""

from __future__ import annotations

import pytest
import torch
from zerowaste_vae.engine.run.plan import Plan, Steps
from zerowaste_vae.engine.run.tiles import grid
from zerowaste_vae.nodes import preview


@pytest.fixture
def shown(monkeypatch):
    """shown(tile, chunk, ticks, on_gpu) -> the frame shown after each tick, None for none; two clips of 9 frames."""
    monkeypatch.setattr(preview, "INTERVAL", 0.0)

    def show(tile: int, chunk: int, ticks: int, on_gpu: bool = False) -> list[int | None]:
        frames = torch.zeros(2, 9, 16, 24, 3)
        for clip in range(2):
            for frame in range(9):
                frames[clip, frame] = (9 * clip + frame) / 255
        look = preview.Preview(frames, Plan(Steps(chunk, 1), grid(2, 3, tile, 0, 8), 0), 3, lambda n: 4 * n - 3, on_gpu)
        pictures = [look(done, ticks) for done in range(1, ticks + 1)]
        return [p and p.getpixel((0, 0))[0] for p in pictures]

    return show


def test_the_last_frame_of_each_chunk(shown):
    assert shown(64, 1, 3) == [0, 4, 8]
    assert shown(64, 2, 2) == [4, 8]


def test_a_second_clip_follows(shown):
    assert shown(64, 1, 6) == [0, 4, 8, 9, 13, 17]


def test_tiles_after_the_pass_over_whole_frames(shown):
    assert shown(16, 2, 6) == [None, None, 4, 8, 4, 8]


def test_copies_out_of_a_gpu_may_be_behind(shown):
    assert shown(64, 1, 3, on_gpu=True) == [None, 2, 6]


def test_large_frames_are_thinned_out():
    frames = torch.rand(1, 1, 1100, 2000, 3)
    look = preview.Preview(frames, Plan(Steps(1, 0), grid(137, 250, 2048, 0, 8), 0), 1, lambda n: 4 * n - 3, False)
    picture = look(1, 1)
    assert max(picture.size) < 2 * preview.SIZE
    assert look(1, 1) is None
