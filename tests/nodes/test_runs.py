"""The line and the picture shown while a node runs, and room on GPUs that share its work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.network.tiles import grid
from zerowaste_vae.engine.planning.plan import Plan
from zerowaste_vae.nodes import runs
from zerowaste_vae.nodes.runs import others

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lines(monkeypatch):
    """lines(operation, tile, latents, ticks) -> what is said after each tick."""
    monkeypatch.setattr(runs, "LINE_SECONDS", 0.0)

    def say(operation: str, tile: int, latents: int, ticks: int) -> list[str]:
        stages = runs.Stages(operation, Plan(Steps(2, 0), grid(8, 16, tile, 0, 8), 0), latents)
        lines = [stages(done, ticks) for done in range(1, ticks + 1)]
        assert lines.pop().startswith(f"{operation}: done in ")
        assert all(line.endswith(" s left") for line in lines)
        return [line.partition(", about")[0] for line in lines]

    return say


def test_pieces_of_one_chunk_are_named():
    stages = runs.Stages("decode", Plan(Steps(3, 4, pieces=True), grid(8, 8, 64, 0, 8), 0), 3)
    assert stages.ticks == 3 and stages(2, 3).startswith("decode: chunk 2 of 3, ")


def test_whole_frames(lines):
    assert lines("decode", 128, 5, 3) == ["decode: chunk 1 of 3", "decode: chunk 2 of 3"]


def test_decode_starts_with_whole_frames_and_encode_ends_with_them(lines):
    # Two clips, so that the last part of the first is not the end.
    decode = lines("decode", 64, 2, 6)
    assert decode[:3] == [
        "decode, whole frames: chunk 1 of 1",
        "decode, tile 1 of 2: chunk 1 of 1",
        "decode, tile 2 of 2: chunk 1 of 1",
    ]
    encode = lines("encode", 64, 2, 6)
    assert [line.partition(":")[0] for line in encode[:3]] == [
        "encode, tile 1 of 2",
        "encode, tile 2 of 2",
        "encode, whole frames",
    ]


def test_each_clip_starts_over(lines):
    assert lines("decode", 64, 2, 6)[3:] == lines("decode", 64, 2, 6)[:2]


def test_lines_are_not_sent_more_often_than_the_interval(monkeypatch):
    monkeypatch.setattr(runs, "LINE_SECONDS", 1e9)
    stages = runs.Stages("decode", Plan(Steps(1, 0), grid(8, 8, 64, 0, 8), 0), 4)
    assert [bool(stages(done, 4)) for done in (1, 2, 3, 4)] == [True, False, False, True]


def test_every_part_of_a_line_is_known_in_chinese(monkeypatch):
    """As the frontend takes lines apart, with # for numbers; nothing else is listed there."""
    monkeypatch.setattr(runs, "LINE_SECONDS", 0.0)
    code = "".join((ROOT / "nodes" / f"{name}.py").read_text() for name in ("host", "drafts"))
    said = re.findall(r"say(?:_here)?\(f?\"(?:\{operation\}|decode): ([^\"]+)\"", code)
    assert len(said) == 3
    said = [f"{operation}: {text}" for operation in ("decode", "encode") for text in said]
    for operation in ("decode", "encode"):
        stages = runs.Stages(operation, Plan(Steps(2, 0), grid(8, 16, 64, 0, 8), 0), 2)
        said += [stages(done, 3) for done in (1, 2, 3)]
    parts = {re.sub(r"\d+(\.\d+)?", "#", part) for line in said for part in re.split(r"(: |, )", line)}
    chinese = json.loads((ROOT / "locales" / "zh" / "main.json").read_text())["zerowaste"]["running"]
    assert parts == chinese.keys()
    assert [part for part, text in chinese.items() if part.count("#") != text.count("#")] == []


@pytest.fixture
def shown(monkeypatch):
    """shown(tile, chunk, ticks, on_gpu) -> the frame shown after each tick, None for none; two clips of 9 frames."""
    monkeypatch.setattr(runs, "PREVIEW_SECONDS", 0.0)

    def show(tile: int, chunk: int, ticks: int, on_gpu: bool = False) -> list[int | None]:
        frames = torch.zeros(2, 9, 16, 24, 3)
        for clip in range(2):
            for frame in range(9):
                frames[clip, frame] = (9 * clip + frame) / 255
        look = runs.Preview(frames, Plan(Steps(chunk, 1), grid(2, 3, tile, 0, 8), 0), 3, lambda n: 4 * n - 3, on_gpu)
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
    look = runs.Preview(frames, Plan(Steps(1, 0), grid(137, 250, 2048, 0, 8), 0), 1, lambda n: 4 * n - 3, False)
    picture = look(1, 1)
    assert max(picture.size) < 2 * runs.PREVIEW_SIZE
    assert look(1, 1) is None


class Engine:
    device = torch.device("cpu")
    released = 0

    def release_copies(self):
        self.released += 1


def test_auto_is_the_hosts_own_alone():
    engine = Engine()
    with others(engine, "auto", None, None) as gpus:
        assert gpus == {}
    assert engine.released == 0


def test_room_is_made_on_the_others_and_copies_go(monkeypatch):
    engine, asked = Engine(), []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    plan = SimpleNamespace(peak_bytes=7)
    with pytest.raises(KeyError), others(engine, "cpu,cuda:1", plan, lambda *of: asked.append(of)) as gpus:
        assert gpus == {"devices": "cpu,cuda:1"} and asked == [(7, torch.device("cuda", 1))]
        raise KeyError
    assert engine.released == 1
