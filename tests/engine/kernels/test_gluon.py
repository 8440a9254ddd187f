"""Choose the loop of a convolution: the one in Gluon on cards with mma.sync, Triton's if that cannot run."""

import pytest
import torch
from zerowaste_vae.engine.kernels.cards import FORMS
from zerowaste_vae.engine.kernels.conv3d import Epilogue, Geometry, Weight, dispatch
from zerowaste_vae.engine.kernels.launching import recording
from zerowaste_vae.engine.kernels.prebuilt.keys import aligned, key
from zerowaste_vae.engine.kernels.targets import FP8, capabilities, prebuilt

HALF, INT8 = torch.float16, torch.int8


def call(here, dtype=HALF, channels=128, stride=1, width=33, fast=False):
    """The launch of a 3x3x3 convolution of as many outputs as inputs."""
    meta = {"device": "meta"}
    scale = torch.empty(channels, **meta) if dtype.itemsize == 1 else None
    weight = Weight(torch.empty(channels, 27 * channels, dtype=dtype, **meta), channels, channels, (3, 3, 3), scale)
    x = torch.empty(4, 9 * stride + 2, width * stride + 2, channels, dtype=dtype, **meta)
    out = torch.empty(2, 9, width, channels, dtype=HALF, **meta)
    with recording(here) as calls:
        dispatch.launch(x, weight, out, Geometry((1, stride, stride)), Epilogue(half_accumulate=fast), 0, 2, here)
    return calls[0]


@pytest.mark.parametrize(
    ("here", "dtype", "kernel"),
    [
        *[(capabilities("card", sm, (3, 6)), HALF, "mma_kernel") for sm in (80, 86, 89, 120)],
        *[(capabilities("card", sm, (3, 6)), HALF, "conv_kernel") for sm in (90, 100)],
        *[(prebuilt("card", FORMS[name], name), HALF, "mma_kernel") for name in "ABCD"],
        (prebuilt("card", FORMS["C"], "C"), FP8, "mma_kernel"),
        (prebuilt("card", FORMS["D"], "D"), FP8, "conv_kernel"),  # block-scaled
        (capabilities("card", 89, (3, 7)), INT8, "mma_kernel"),
        (capabilities("card", 89, (3, 5)), HALF, "conv_kernel"),  # another Gluon
        (capabilities("card", 120, (3, 99)), HALF, "conv_kernel"),
    ],
    ids=str,
)
def test_the_loop_of_a_card(here, dtype, kernel):
    assert call(here, dtype).kernel == f"conv3d.{kernel}"


def test_all_consumer_cards_run_the_same_kernels():
    """So that one set's serve the others."""
    made = {sm: call(capabilities("card", sm, (3, 6)), INT8) for sm in (80, 86, 89, 120)}
    keys = {key(one.kernel, one.arguments, one.constants) for one in made.values()}
    assert len(keys) == 1


def test_pair_of_tiles_reads_nothing_ahead():
    """Its sums of them are in fp32, which leaves no registers for the next turn's operands."""
    one, pair = (dispatch.Schedule(128, 64, 64, 4, 2, tail=tail) for tail in (0, 32))
    ahead = [dispatch._loop(s, 54, HALF, sums)["AHEAD"] for s in (one, pair) for sums in ("f16", "f32")]
    assert ahead == [2, 2, 1, 2]


@pytest.mark.parametrize("channels, stages, depth", [(128, 4, 32), (512, 4, 32), (96, 3, 32), (96, 2, 64)])
def test_promotion_of_fp16_sums(channels, stages, depth):
    """fp16 sums are promoted in time, and few steps are left over."""
    schedule = dispatch.Schedule(128, 64, depth, 4, stages)
    steps = 27 * -(-channels // depth)
    turns = dispatch._loop(schedule, steps, HALF, "f16")["TURNS"]
    assert turns >= 1 and turns * stages * depth <= 512
    assert -(-steps // (stages * turns)) * turns <= -(-steps // stages) * 1.05
    # Sums of fp8 do not fit fp16 for longer than a step: the kernel promotes them at each.
    assert all(dispatch._loop(schedule, steps, *other)["TURNS"] == 1 for other in ((FP8, "f16"), (HALF, "f32")))


def test_copies_are_aligned():
    """It copies operands 16 bytes at a time, which the compiler has to know."""
    one = call(capabilities("card", 89, (3, 6)), channels=24 * 16)
    for unit in (1, 16):
        places = aligned(key(one.kernel, one.arguments, {**one.constants, "UNIT": unit}))
        assert {0, 1} <= set(places) and (unit == 16 or set(places) == {0, 1})


def test_rows_are_counted_through_with_stride_1_alone():
    here = capabilities("card", 89, (3, 6))
    assert call(here).constants["LINEAR"] and not call(here, stride=2).constants["LINEAR"]
