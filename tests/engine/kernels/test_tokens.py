"""Passes over tokens against their references, and rows that do not depend on each other."""

import sys
from pathlib import Path

import pytest
import torch
from zerowaste_vae.engine.kernels.targets import FP8
from zerowaste_vae.engine.kernels.tokens import (
    LIMITS,
    attended,
    attends,
    gated,
    hadamard,
    multiplied,
    normalised,
    rotated,
    rounded,
    summed,
)
from zerowaste_vae.engine.kernels.tokens import op as tokens
from zerowaste_vae.engine.kernels.tokens.schedules import Schedule, Steps

sys.path.insert(0, str(Path(__file__).parent))
from helpers import CAST_STEP, TOLERANCE, error

pytestmark = pytest.mark.usefixtures("interpreter")
HALF = torch.float16
ROWS, WIDTH = 5, 192


def normal(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def outputs(dtype, rows=ROWS, width=WIDTH):
    """(out, scales)"""
    return torch.empty(rows, width, dtype=dtype), torch.empty(rows) if dtype in LIMITS else None


def values(out, scales):
    return out.float() if scales is None else out.float() * scales[:, None]


def compare(call, dtype, width=WIDTH):
    made = []
    for backend in ("triton", "reference"):
        out, scales = outputs(dtype, width=width)
        call(out, scales, backend)
        made.append(values(out, scales))
    # The interpreter truncates where hardware rounds to fp8.
    assert error(*made) < CAST_STEP.get(dtype, TOLERANCE[dtype])
    return made[0]


@pytest.mark.parametrize("dtype", [torch.float32, HALF, FP8, torch.int8])
@pytest.mark.parametrize("adds", [False, True])
def test_normalised(dtype, adds):
    x, y = normal(ROWS, WIDTH, dtype=HALF), normal(ROWS, WIDTH, dtype=HALF)
    weight, scale = 1 + 0.1 * normal(WIDTH, dtype=HALF), normal(WIDTH, dtype=HALF)
    more = {"y": y, "scale": scale} if adds else {}
    streams = []

    def call(out, scales, backend):
        streams.append(x.clone())
        normalised(streams[-1], weight, 1e-5, out, scales, backend=backend, **more)

    made = compare(call, dtype)
    want = torch.addcmul(x.float(), y.float(), scale.float()).half() if adds else x
    assert torch.equal(streams[0], streams[1])
    assert error(streams[0], want) < 1e-3
    wide = streams[0].float()
    expected = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.float()
    assert error(made, expected) < (0.1 if dtype in LIMITS else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_rotated(dtype):
    heads, head, half, tokens = 3, 16, 6, 4
    qkv = normal(2 * tokens, heads * 3 * head, dtype=dtype)
    angles = normal(tokens, half)
    turns = torch.stack((angles.cos(), angles.sin()), 1)
    made = {}
    for backend in ("triton", "reference"):
        made[backend] = qkv.clone()
        rotated(made[backend], turns, head, 1e-5, backend=backend)
    assert error(made["triton"], made["reference"]) < TOLERANCE[dtype]
    parts = made["reference"].view(2, tokens, heads, 3, head)
    before = qkv.view(2, tokens, heads, 3, head)
    assert torch.equal(parts[:, :, :, 2], before[:, :, :, 2])
    # A rotation keeps lengths: those of heads that are normalised.
    assert torch.allclose(parts[:, :, :, :2].float().square().mean(4), torch.ones(()), atol=5e-3)
    turned = parts[0, 1, 0, 0].float()
    q = before[0, 1, 0, 0].float()
    q = q * (q.square().mean() + 1e-5).rsqrt()
    pairs = torch.complex(q[:half], q[half : 2 * half]) * torch.polar(torch.ones(half), angles[1])
    assert torch.allclose(turned, torch.cat((pairs.real, pairs.imag, q[2 * half :])), atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, HALF, FP8, torch.int8])
def test_gated(dtype):
    x = normal(ROWS, 2 * WIDTH, dtype=HALF)
    made = compare(lambda out, scales, backend: gated(x, out, scales, backend=backend), dtype)
    gate, value = x.float().chunk(2, 1)
    assert error(made, torch.nn.functional.silu(gate) * value) < (0.1 if dtype in LIMITS else 1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, FP8, torch.int8])
def test_rounded(dtype):
    """NaN becomes 0 if that is asked for, a row of zeros stays one."""
    x = normal(ROWS, WIDTH)
    x[1, 3], x[2] = torch.nan, 0.0
    made = compare(lambda out, scales, backend: rounded(x, out, scales, zeroed=True, backend=backend), dtype)
    assert made[1, 3] == 0
    assert not made[2].any()
    assert error(made, x.nan_to_num(0.0)) < (0.1 if dtype in LIMITS else 1e-6)


def paired(wide):
    """Gates in even columns, their values in odd ones."""
    return torch.nn.functional.silu(wide[:, ::2]) * wide[:, 1::2]


@pytest.mark.parametrize("pairs", [False, True])
def test_summed(monkeypatch, pairs):
    """Over blocks of columns of which the last is not full."""
    monkeypatch.setattr(tokens, "COLUMNS", 128)
    sums = torch.randint(-5000, 5000, (ROWS, WIDTH), dtype=torch.int32)
    rows, columns, bias = normal(ROWS), normal(WIDTH) / 1000, normal(WIDTH, dtype=HALF)
    made = compare(
        lambda out, _, backend: summed(sums, rows, columns, bias, out, pairs=pairs, backend=backend), HALF,
        WIDTH // 2 if pairs else WIDTH,
    )  # fmt: skip
    wide = sums.double() * rows[:, None] * columns + bias
    assert error(made, paired(wide) if pairs else wide) < 1e-3


@pytest.mark.parametrize("group, width", [(4, WIDTH), (16, WIDTH), (64, WIDTH), (256, 768), (256, 256), (1024, 1024)])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_columns_rotated_before_they_are_rounded(backend, group, width):
    """In all passes, as a product with the matrix does it; rows of 192 and 768 columns have a part of a block behind
    them."""
    x, y = normal(ROWS, 2 * width), normal(ROWS, width)
    turn = torch.block_diag(*[hadamard(group)] * (width // group))
    ones, gate = torch.ones(width), torch.nn.functional.silu(x[:, :width]) * x[:, width:]
    calls = {
        "normalised": (lambda *out, **how: normalised(y, ones, 1e-5, *out, **how),
                       y * (y.square().mean(1, keepdim=True) + 1e-5).rsqrt()),
        "gated": (lambda *out, **how: gated(x, *out, **how), gate),
        "rounded": (lambda *out, **how: rounded(y, *out, **how), y),
    }  # fmt: skip
    for name, (call, plain) in calls.items():
        out, scales = outputs(torch.int8, width=width)
        call(out, scales, turn=group, backend=backend)
        want = plain @ turn
        torch.testing.assert_close(scales, want.abs().amax(1) / 127, rtol=1e-5, atol=0)
        assert (values(out, scales) - want).abs().amax() <= 0.51 * scales.max(), name


@pytest.mark.parametrize("dtype, turn", [(FP8, 0), (torch.int8, 0), (torch.int8, 256)])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_rows_that_are_not_finite_have_no_scale(backend, dtype, turn):
    """Wherever such a value stands among others, and no other row loses its own."""
    x = normal(5, 256)
    x[0, 255], x[2, 70], x[4, 0] = torch.inf, torch.nan, -torch.inf
    out, scales = outputs(dtype, width=256)
    rounded(x, out, scales, turn=turn, backend=backend)
    assert scales.isnan().tolist() == [True, False, True, False, True]
    assert values(out, scales)[[1, 3]].isfinite().all()


def test_only_8_bit_is_rotated():
    with pytest.raises(ValueError, match="not rotated in groups of 16"):
        rounded(normal(ROWS, WIDTH), torch.empty(ROWS, WIDTH), turn=16)
    for group in (8, 1024):
        with pytest.raises(ValueError, match=f"rows of 192 are not rotated in groups of {group}"):
            rounded(normal(ROWS, WIDTH), *outputs(torch.int8), turn=group)


def turned(tiles, tokens, heads, head, dtype=HALF):
    """Queries, keys and values as `rotated` leaves them."""
    qkv = normal(tiles * tokens, heads * 3 * head, dtype=dtype)
    rotated(qkv, torch.tensor([0.6, 0.8]).view(1, 2, 1).expand(tokens, 2, 6), head, 1e-5, backend="reference")
    return qkv


@pytest.mark.parametrize("tokens_, heads, head", [(21, 3, 16), (16, 2, 32), (5, 1, 64), (49, 2, 16)])
def test_attended(monkeypatch, tokens_, heads, head):
    """Among the tokens of a tile alone, whose last step and last block are not full, with the bits of a tile alone."""
    monkeypatch.setitem(tokens.ATTENTION, 90, Steps(32, 16, 4, 2))
    tiles = 3
    qkv = turned(tiles, tokens_, heads, head)
    qkv[tokens_ + 1] = torch.nan  # reaches all of its tile, and no other
    out, want, alone = (torch.full((tiles * tokens_, heads * head), 7.0, dtype=HALF) for _ in range(3))
    assert attends(qkv, head, "triton")
    attended(qkv, tokens_, head, out, backend="triton")
    attended(qkv, tokens_, head, want, backend="reference")
    assert error(out, want) < TOLERANCE[HALF] and out[-1].any()
    assert not out[tokens_ : 2 * tokens_].any()
    for first in range(0, len(qkv), tokens_):
        attended(qkv[first : first + tokens_], tokens_, head, alone[first : first + tokens_], backend="triton")
    assert torch.equal(out, alone)
    q, k, v = qkv[:tokens_].float().view(tokens_, heads, 3, head).permute(2, 1, 0, 3)
    found = (q @ k.mT / head**0.5).softmax(2) @ v
    assert error(want[:tokens_].view(tokens_, heads, head).transpose(0, 1), found) < 1e-3


def test_attention_to_the_longest_keys(monkeypatch):
    """Weights without a peak taken off them: neither e^8 nor e^-8 is lost in 16 bit."""
    monkeypatch.setitem(tokens.ATTENTION, 90, Steps(32, 16, 4, 2))
    qkv, out = torch.zeros(48, 192, dtype=HALF), torch.empty(48, 64, dtype=HALF)
    qkv[:, :128], qkv[1:, 64:128], qkv[:, 128:] = 1.0, -1.0, normal(48, 64)
    attended(qkv[:1].repeat(48, 1), 48, 64, out, backend="triton")
    assert torch.allclose(out.float(), qkv[0, 128:].float().expand(48, 64), rtol=1e-3)
    weights = torch.tensor([8.0, *[-8.0] * 47]).softmax(0)
    attended(qkv, 48, 64, out, backend="triton")
    assert error(out, (weights @ qkv[:, 128:].float()).expand(48, 64)) < 1e-3


def test_heads_that_attention_has_no_kernel_for():
    """Weights of larger ones could overflow; fp32 is the library's."""
    assert not attends(torch.zeros(4, 384, dtype=HALF), 128, "triton")
    assert not attends(torch.zeros(4, 192), 64, "triton")
    assert not attends(torch.zeros(4, 192, dtype=HALF), 64, "reference")


@pytest.mark.parametrize("kernel", [True, False])
def test_int8_products_added_to_tokens(monkeypatch, kernel):
    """Of which there are fewer than rows: those that fill up a product are not added."""
    rows, real, n, k = 96, 90, 64, 96
    monkeypatch.setattr(tokens, "SUM_ROWS", 48)
    monkeypatch.setattr(tokens, "pick", lambda *_: Schedule(32, 32, 32, 4, 2) if kernel else None)
    x, weight = (torch.randint(-127, 128, (count, k), dtype=torch.int8) for count in (rows, n))
    scales, columns, bias, scale = normal(rows), normal(n) / 10000, normal(n, dtype=HALF), normal(n, dtype=HALF)
    memory = normal(rows, n, dtype=HALF)
    before, stream = memory.clone(), memory[:real]
    sums = torch.empty(tokens.sum_rows(rows) * n, dtype=torch.int32)
    multiplied(x, weight, scales, columns, bias, stream, sums, scale=scale, backend="triton")
    made = (x.double() @ weight.double().t()) * scales[:, None] * columns + bias
    assert error(stream, (before + made * scale)[:real]) < 1e-3
    assert torch.equal(memory[real:], before[real:])


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("kernel", [True, False])
def test_int8_products(monkeypatch, kernel, pairs):
    """By the kernel and by the library's product with a pass over its sums: the same numbers, for any rows."""
    rows, n, k, found = 90, 64, 96, []
    monkeypatch.setattr(tokens, "SUM_ROWS", 48)  # two parts
    x, weight = (torch.randint(-127, 128, (count, k), dtype=torch.int8) for count in (rows, n))
    scales, columns, bias = normal(rows), normal(n) / 10000, normal(n, dtype=HALF)
    schedule = Schedule(32, 32, 32, 4, 2) if kernel else None
    monkeypatch.setattr(tokens, "pick", lambda here, *sizes: found.append((here.sm, *sizes)) or schedule)
    out = torch.empty(rows, n // 2 if pairs else n, dtype=HALF)
    sums = torch.full((tokens.sum_rows(rows) * n,), -1, dtype=torch.int32)
    multiplied(x, weight, scales, columns, bias, out, sums, pairs=pairs, backend="triton")
    wide = (x.double() @ weight.double().t()) * scales[:, None] * columns + bias
    assert error(out, paired(wide) if pairs else wide) < 1e-3
    assert found == [(90, n, k)] and kernel == bool((sums == -1).all())


@pytest.mark.parametrize("kernel", [True, False])
def test_gates_of_products_that_are_not_finite(monkeypatch, kernel):
    """A row whose scale is NaN stays NaN, a gate of -inf is closed, and 0 times infinity is NaN."""
    monkeypatch.setattr(tokens, "pick", lambda *_: Schedule(32, 32, 32, 4, 2) if kernel else None)
    x, weight = torch.ones(40, 32, dtype=torch.int8), torch.ones(32, 32, dtype=torch.int8)
    scales, bias = torch.ones(40), torch.zeros(32)
    scales[3], bias[4], bias[6], bias[7] = torch.nan, -torch.inf, -torch.inf, torch.inf
    out, sums = torch.empty(40, 16), torch.empty(tokens.sum_rows(40) * 32, dtype=torch.int32)
    multiplied(x, weight, scales, torch.ones(32), bias, out, sums, pairs=True, backend="triton")
    assert out[3].isnan().all() and out[:3, 3].isnan().all() and not out[:3, 2].any()
    assert torch.equal(out[0, [0, 1]], torch.full((2,), 1024.0)) and out[:3, [0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("dtype", [HALF, FP8])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_rows_know_nothing_of_each_other(dtype, backend):
    x = normal(ROWS, 2 * WIDTH, dtype=HALF)
    whole, one = outputs(dtype), outputs(dtype, rows=1)
    gated(x, *whole, backend=backend)
    gated(x[3:4], *one, backend=backend)
    assert torch.equal(values(*whole)[3:4], values(*one))


def test_scales_belong_to_8_bit():
    x = torch.zeros(2, WIDTH)
    with pytest.raises(ValueError, match="rows need scales"):
        rounded(x, torch.empty(2, WIDTH, dtype=FP8))
    with pytest.raises(ValueError, match="rows have no scales"):
        rounded(x, torch.empty(2, WIDTH), torch.empty(2))
