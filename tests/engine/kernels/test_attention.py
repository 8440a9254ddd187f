import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine.kernels.attention import attention, op, schedules, scratch_bytes, torch_bytes
from zerowaste_vae.engine.kernels.launching import recording
from zerowaste_vae.engine.kernels.targets import capabilities

sys.path.insert(0, str(Path(__file__).parent))
from helpers import TOLERANCE, error


def exact(q, k, v):
    q, k, v = q.double(), k.double(), v.double()
    return (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1) @ v


@pytest.mark.parametrize("head", [264, 384, 512, 1024])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kernel_and_reference(interpreter, head, dtype):
    q, k, v = (torch.randn(2, 77, head).to(dtype) for _ in range(3))
    q = q * 3  # a peaked softmax: rescaling of the running sums matters
    want = exact(q, k, v)
    assert error(attention(q, k, v, backend="reference"), want) < TOLERANCE[dtype]
    got = attention(q, k, v, backend="triton")
    assert error(got, want) < TOLERANCE[dtype] * 2  # weights are rounded to the operand type as well
    assert torch.equal(attention(q[1:], k[1:], v[1:], backend="triton"), got[1:])


@pytest.mark.parametrize("sm", [90, 120])
@pytest.mark.parametrize("tokens", [583 * 90 * 160, 131 * 270 * 480])
def test_launches_stay_within_a_gpus_limits(monkeypatch, sm, tokens):
    """A clip has more tiles of keys than the second and third axis of a grid take."""
    monkeypatch.setattr(op, "range", lambda *of: range(*of)[:2], raising=False)
    q = torch.empty(1, tokens, 512, dtype=torch.bfloat16, device="meta")
    here = replace(capabilities("gpu", sm, (3, 7)), tma=False)
    with recording() as calls:
        attention.launch(here, q, q, q, out=q, clip=True)
    grids = [call.grid for call in calls]
    assert grids and all(max(grid[1:], default=1) < 1 << 16 and grid[0] < 1 << 31 for grid in grids)


def test_blocks_of_queries_give_the_bits_of_one(interpreter, monkeypatch):
    q, k, v = (torch.randn(1, 300, 264).half() for _ in range(3))
    whole = attention(q, k, v, backend="triton")
    assert schedules.block_rows(300, 1, 128) == 384
    monkeypatch.setattr(schedules, "SCRATCH_BYTES", 1)
    assert schedules.block_rows(300, 1, 128) == 128
    assert torch.equal(attention(q, k, v, backend="triton"), whole)


@pytest.mark.parametrize(("least", "parts"), [(5, 1), (2, 2), (1, 5)])
def test_few_rows_are_summed_in_parts_of_the_keys(interpreter, monkeypatch, least, parts):
    """Rows of a block that is not full, and tiles that the parts do not share evenly, among them."""
    q, k, v = (torch.randn(2, 600, 264).half() for _ in range(3))
    monkeypatch.setattr(schedules, "SCRATCH_BYTES", 500_000)
    monkeypatch.setattr(schedules, "PART_TILES", least)
    monkeypatch.setattr(schedules, "LONG", 2)
    blocks = schedules.Blocks.of(600, 2, schedules.pick(90)[0], 264)
    assert (blocks.rows, blocks.tiles, blocks.parts) == (384, 5, parts)
    got = attention(q, k, v, backend="triton")
    assert error(got, exact(q, k, v)) < TOLERANCE[torch.float16] * 2
    assert torch.equal(attention(q[1:], k[1:], v[1:], backend="triton"), got[1:])


def test_blocks_occupy_a_gpu():
    """Programs of the second product, of 132 processors: large frames had 8 of them at 4096x4096."""
    scores, values = schedules.pick(90)
    for tokens in (14_400, 32_400, 65_536, 129_600, 262_144):
        blocks = schedules.Blocks.of(tokens, 2, scores, 512)
        programs = blocks.parts * blocks.rows * 512 // (values.positions * values.columns)
        assert 100 < programs <= 132, (tokens, blocks)
        assert (blocks.parts - 1) * blocks.each < blocks.tiles <= blocks.parts * blocks.each


@pytest.mark.parametrize("tokens", [130, 300, 650])
@pytest.mark.parametrize("least", [1, 64])
def test_the_scratch_it_states_is_all_it_takes(interpreter, monkeypatch, tokens, least):
    monkeypatch.setattr(schedules, "PART_TILES", least)
    q, k, v = (torch.randn(1, tokens, 264).half() for _ in range(3))
    monkeypatch.setattr(schedules, "SCRATCH_BYTES", 300_000)
    want = attention(q, k, v, backend="triton")
    scratch, out = torch.empty(scratch_bytes(tokens, 2, 264), dtype=torch.uint8), torch.empty_like(q)
    taken = []
    monkeypatch.setattr(op.torch, "empty", lambda *size, **_: taken.append(size))
    got = attention(q, k, v, out=out, scratch=scratch, backend="triton")
    assert not taken
    monkeypatch.undo()
    assert torch.equal(got, want)


def test_heads_that_only_torch_takes():
    """They use none of our scratch, and torch's own memory is stated."""
    assert scratch_bytes(400, 2, 1024) and not torch_bytes(400, 2, 1024)
    assert not scratch_bytes(400, 2, 1032) and torch_bytes(400, 2, 1032) == 400 * 1032 * 6


@pytest.mark.parametrize(("height", "width"), [(720, 1280), (3072, 2048), (4096, 2304), (1088, 1920), (4320, 7680)])
def test_scratch_is_stated_for_every_generation(height, width):
    """At 3072x2048 a call took 124 MiB where 102 were stated."""
    tokens = height * width // 64
    stated = scratch_bytes(tokens, 2, 512)
    for scores, _ in schedules.SCHEDULES.values():
        tiles = -(-tokens // scores.columns)
        rows = schedules.block_rows(tokens, 2 * tiles * scores.columns, scores.positions)
        assert rows * tiles * (2 * scores.columns + 8) <= stated


def test_torch_path_and_blocks_of_queries():
    q, k, v = (torch.randn(1, 700, 24) for _ in range(3))
    want = exact(q, k, v)
    assert error(attention(q, k, v), want) < 1e-5
    assert error(attention(q, k, v, backend="reference"), want) < 1e-5


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="attention needs"):
        attention(torch.randn(1, 4, 8), torch.randn(1, 5, 8), torch.randn(1, 4, 8))


def test_in_place(interpreter, monkeypatch):
    """Block by block: the same bits as within a frame of so many positions."""
    q, k, v = (torch.randn(1, 400, 264).half() for _ in range(3))
    want = attention(q, k, v, backend="triton")
    monkeypatch.setattr(schedules, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(schedules, "CLIP_BYTES", 300_000)
    size = scratch_bytes(400, 2, 264, clip=True)
    assert scratch_bytes(400, 2, 264) < size < 400_000
    scratch = torch.empty(size, dtype=torch.uint8)
    got = attention(q, k, v, out=q, scratch=scratch, clip=True, backend="triton")
    assert got.data_ptr() == q.data_ptr()
    assert torch.equal(got, want)


def test_a_clips_scratch_fills_the_gpu_and_ends(interpreter):
    # 33 frames of 1280x720 in 512 channels, then 129: the limit.
    assert 2**30 - 2**26 < scratch_bytes(9 * 14400, 2, 512, clip=True) <= 1.05 * 2**30
    assert scratch_bytes(33 * 14400, 2, 512, clip=True) <= 1.1 * 2**30
    assert scratch_bytes(9 * 3600, 2, 1024, clip=True) < 2**28
