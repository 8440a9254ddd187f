"""A dry run counts memory besides arena and rings, and takes no longer for a long chunk."""

from __future__ import annotations

import gc

import pytest
import torch
from zerowaste_vae.engine.families import wan
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.kernels.conv3d import sums_bytes
from zerowaste_vae.engine.kernels.conv3d.schedules import ROW_BLOCK, pick
from zerowaste_vae.engine.kernels.conv3d.types import stat_span
from zerowaste_vae.engine.kernels.targets import capabilities
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.fused_walk import TEMPORARY_BYTES, FusedWalk
from zerowaste_vae.engine.runtime.context import ExecutionContext
from zerowaste_vae.engine.runtime.parking import Parking
from zerowaste_vae.engine.runtime.walk import Walk

CONFIG = Config((128, 256, 512, 512), (128, 256, 512, 512))
META = torch.device("meta")


def walk_of(architecture, config, dtype):
    return FusedWalk(architecture, config, dtype, DEFAULTS)


@pytest.fixture(scope="module")
def walk():
    return walk_of(ARCHITECTURE, CONFIG, torch.float16)


@pytest.mark.parametrize("sm", [80, 90, 100, 120])
@pytest.mark.parametrize("phases", [(1, 1), (2, 2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("size", [(90, 160), (720, 1280), (726, 1286), (4320, 7680)], ids=str)
def test_sums_are_stated_for_every_schedule(sm, phases, dtype, size):
    """As the kernel's launch lays them out, which only a GPU runs."""
    h, w = size
    for channels in (32, 128, 256, 512):
        kind = 8 if phases == (2, 2) else 1
        s = pick(capabilities("GPU", sm, (3, 6)), dtype, channels, channels, size, kind, 3, True)
        full, rest = divmod(h, ROW_BLOCK)
        for pitch in (w, w + 2):
            tiles = full * -(-ROW_BLOCK * pitch // s.positions) + -(-rest * pitch // s.positions)
            span = stat_span(channels, 32, min(s.columns // s.slices, s.tail or s.columns))
            taken = 2 * tiles * phases[0] * phases[1] * (channels // span) * 2 * 4
            stated = sums_bytes((2, phases[0] * h, phases[1] * w, channels), 32, phases)
            assert taken <= stated <= 4.5 * taken


def test_life_of_sums():
    """Sums live as long as they are referred to."""
    walk, out = Walk(), torch.empty(2, 64, 128, 128, device=META)
    size = sums_bytes(tuple(out.shape), 32)
    first = walk.sums(out, 32)
    assert walk.peak == 2 * size  # parts of them, while they are joined
    second = walk.sums(out, 32)
    assert walk.peak == 3 * size
    del first, second
    gc.collect()
    walk.sums(out, 32)
    assert walk.peak == 3 * size
    assert walk.sums(out, 0) is None


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_sums_of_large_frames_are_in_the_plan(walk, half):
    """At 7680x4320 those of one norm take 66 MB a frame, and three of them may be there."""
    network = walk.network(half)
    size = (1, 540, 960, 1, torch.float32) if half == "decoder" else (1, 4320, 7680, 1)
    run = network.plan(*size, META)
    one = sums_bytes((1, 4320, 7680, 128), 32)
    assert one > 60e6
    assert 2 * one <= run.walk.peak <= 8 * one
    assert run.nbytes == run.arena.peak + run.walk.peak + sum(r.nbytes for r in run.rings.values())
    assert walk.sizes(half, 1, 1, 540, 960, torch.float32).device > run.nbytes + TEMPORARY_BYTES


def test_trailing_frames(walk):
    """113 MiB at 1287x727."""
    even, odd = (walk.sizes("encoder", 1, 1, 90, 160, torch.float32, rest=rest).device for rest in ((0, 0), (7, 7)))
    real = walk.network("encoder").plan(1, 727, 1287, 1, META).nbytes - walk.network("encoder").plan(1, 720, 1280, 1,
                                                                                               META).nbytes
    assert odd - even >= real > 50 << 20


def test_the_frames_of_a_single_chunk_arrive_once(walk):
    """A picture of 2048x2048 was stated 0.1 GB too high, 4 % of what its encode takes where it is made again."""
    size = 1, 1, 90, 160, torch.float32
    several, alone = (walk.sizes("encoder", *size, alone=alone).device for alone in (False, True))
    assert several - alone == 2 * 4 * 3 * 4 * 720 * 1280
    assert walk.sizes("decoder", *size, alone=True) == walk.sizes("decoder", *size)


@pytest.mark.parametrize("parking", [None, Parking(None, 64 << 20)], ids=["resident", "parked"])
@pytest.mark.parametrize("half", ["decoder", "encoder"])
@pytest.mark.parametrize("family", ["seedvr2", "wan2.1", "wan2.2"])
def test_equal_steps(family, half, parking, monkeypatch):
    """Equal steps are walked once and count as often."""
    if family == "seedvr2":
        walk = walk_of(ARCHITECTURE, Config((32, 64, 64, 64), (32, 64, 64, 64)), torch.float16)
    else:
        widths = (32, 64, 64, 64)
        architecture = wan.WAN21 if family == "wan2.1" else wan.WAN22
        walk = walk_of(architecture, wan.Config(widths, widths, 16 if family == "wan2.1" else 48,
                                                1 if family == "wan2.1" else 2), torch.bfloat16)  # fmt: skip
    calls = []
    inputs = ExecutionContext.inputs

    def counted(self, *args, **options):
        calls.append(1)
        return inputs(self, *args, **options)

    monkeypatch.setattr(ExecutionContext, "inputs", counted)

    def sizes(latents, frames):
        calls.clear()
        found = walk._dry_run(half, latents, frames, 16, 24, torch.float32, None, parking, (0, 0), 0, False)
        return found, len(calls)

    short, few = sizes(4, 1)
    long, still_few = sizes(4096, 1)
    assert still_few == few
    assert long.device > short.device
    # One by one, as a run makes the steps.
    with monkeypatch.context() as each:
        each.setattr(Walk, "spans", lambda self, count, size: (
            (a, min(a + (size or count), count)) for a in range(0, count, size or count)))
        for latents, frames in ((4, 1), (3, 4), (2, 3), (4, 6)):
            want, many = sizes(latents, frames)
            with monkeypatch.context() as once:
                once.setattr(Walk, "spans", _SPANS)
                got, number = sizes(latents, frames)
            assert (got.work, got.host) == (want.work, want.host)
            assert got.device == want.device
            assert number <= many


_SPANS = Walk.spans
