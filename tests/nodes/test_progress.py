"""The line shown while a node runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from zerowaste_vae.engine.run.plan import Plan, Steps
from zerowaste_vae.engine.run.tiles import grid
from zerowaste_vae.nodes import progress

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def lines(monkeypatch):
    """lines(operation, tile, latents, ticks) -> what is said after each tick."""
    monkeypatch.setattr(progress, "INTERVAL", 0.0)

    def say(operation: str, tile: int, latents: int, ticks: int) -> list[str]:
        stages = progress.Stages(operation, Plan(Steps(2, 0), grid(8, 16, tile, 0, 8), 0), latents)
        lines = [stages(done, ticks) for done in range(1, ticks + 1)]
        assert lines.pop().startswith(f"{operation}: done in ")
        assert all(line.endswith(" s left") for line in lines)
        return [line.partition(", about")[0] for line in lines]

    return say


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
    monkeypatch.setattr(progress, "INTERVAL", 1e9)
    stages = progress.Stages("decode", Plan(Steps(1, 0), grid(8, 8, 64, 0, 8), 0), 4)
    assert [bool(stages(done, 4)) for done in (1, 2, 3, 4)] == [True, False, False, True]


def test_every_part_of_a_line_is_known_in_chinese(monkeypatch):
    """As the frontend takes lines apart, with # for numbers; nothing else is listed there."""
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    host = (ROOT / "nodes" / "host.py").read_text()
    said = re.findall(r"say_here\(f\"\{operation\}: (.+)\"\)", host)
    assert len(said) == 2
    said = [f"{operation}: {text}" for operation in ("decode", "encode") for text in said]
    for operation in ("decode", "encode"):
        stages = progress.Stages(operation, Plan(Steps(2, 0), grid(8, 16, 64, 0, 8), 0), 2)
        said += [stages(done, 3) for done in (1, 2, 3)]
    parts = {re.sub(r"\d+(\.\d+)?", "#", part) for line in said for part in re.split(r"(: |, )", line)}
    chinese = json.loads((ROOT / "locales" / "zh" / "main.json").read_text())["zerowaste"]["running"]
    assert parts == chinese.keys()
    assert [part for part, text in chinese.items() if part.count("#") != text.count("#")] == []
