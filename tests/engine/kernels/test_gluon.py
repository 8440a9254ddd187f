"""Choose the loop of a convolution: the one in Gluon on cards with mma.sync, Triton's if that cannot run."""

import pytest
import torch
from zerowaste_vae.engine.kernels.cards import FORMS
from zerowaste_vae.engine.kernels.conv3d import Epilogue, Geometry, Weight, conv3d, op
from zerowaste_vae.engine.kernels.launching import recording
from zerowaste_vae.engine.kernels.prebuilt.keys import aligned, key
from zerowaste_vae.engine.kernels.prebuilt.library import library
from zerowaste_vae.engine.kernels.targets import FP8, capabilities, prebuilt

HALF, BF16, INT8 = torch.float16, torch.bfloat16, torch.int8


def call(here, dtype=HALF, channels=128, stride=1, width=33, outputs=None, held=HALF, taps=3, **epilogue):
    """The launch of a convolution of taps^3. outputs: as many as inputs, if they are not named. held: their type."""
    meta, outputs = {"device": "meta"}, outputs or channels
    scale = torch.empty(outputs, **meta) if dtype.itemsize == 1 else None
    values = torch.empty(outputs, taps**3 * channels, dtype=dtype, **meta)
    weight = Weight(values, channels, outputs, (taps, taps, taps), scale)
    x = torch.empty(4, 9 * stride + 2, width * stride + 2, channels, dtype=dtype, **meta)
    out = torch.empty(2, 9, width, outputs, dtype=held, **meta)
    if epilogue.pop("residual", False):
        epilogue["residual"] = torch.empty_like(out)
    with recording(here) as calls:
        conv3d.launch(here, x, weight, out, geometry=Geometry((1, stride, stride)), epilogue=Epilogue(**epilogue))
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
    one, pair = (op.Schedule(128, 64, 64, 4, 2, tail=tail) for tail in (0, 32))
    ahead = [op._loop(s, 54, HALF, sums)["AHEAD"] for s in (one, pair) for sums in ("f16", "f32")]
    assert ahead == [2, 2, 1, 2]


@pytest.mark.parametrize("channels, stages, depth", [(128, 4, 32), (512, 4, 32), (96, 3, 32), (96, 2, 64)])
def test_promotion_of_fp16_sums(channels, stages, depth):
    """fp16 sums are promoted in time, and few steps are left over."""
    schedule = op.Schedule(128, 64, depth, 4, stages)
    steps = 27 * -(-channels // depth)
    turns = op._loop(schedule, steps, HALF, "f16")["TURNS"]
    assert turns >= 1 and turns * stages * depth <= 512
    assert -(-steps // (stages * turns)) * turns <= -(-steps // stages) * 1.05
    # Sums of fp8 do not fit fp16 for longer than a step: the kernel promotes them at each.
    assert all(op._loop(schedule, steps, *other)["TURNS"] == 1 for other in ((FP8, "f16"), (HALF, "f32")))


def test_copies_are_aligned():
    """It copies operands 16 bytes at a time, which the compiler has to know."""
    one = call(capabilities("card", 89, (3, 6)), channels=24 * 16)
    for unit in (1, 16):
        places = aligned(key(one.kernel, one.arguments, {**one.constants, "UNIT": unit}))
        assert {0, 1} <= set(places) and (unit == 16 or set(places) == {0, 1})


def test_rows_are_counted_through_with_stride_1_alone():
    here = capabilities("card", 89, (3, 6))
    assert call(here).constants["LINEAR"] and not call(here, stride=2).constants["LINEAR"]


CARD = capabilities("card", 86, (3, 6))
WHOLE_PLANE = 1600  # columns; narrower planes of 9 rows are small ones


@pytest.mark.parametrize(
    ("asked", "taps", "depth"),
    [
        (dict(channels=256), 3, 32),
        (dict(channels=128, outputs=512), 3, 32),
        (dict(channels=96), 3, 32),
        (dict(channels=192, dtype=torch.bfloat16), 3, 32),
        (dict(channels=256, dtype=INT8), 3, 64),
        (dict(channels=192, dtype=INT8), 3, 64),
        (dict(channels=256, width=33), 1, 32),  # a small plane
        (dict(channels=256, stride=2), 1, 64),
        (dict(channels=256, half_accumulate=True), 1, 64),
        (dict(channels=16, outputs=128), 1, 16),  # fewer channels than a step
        (dict(channels=160), 1, 32),  # no row for its outputs
        (dict(channels=96, outputs=128, dtype=INT8), 1, 128),  # steps do not divide the channels of a tap
        (dict(channels=256, dtype=FP8), 1, 64),
    ],
    ids=str,
)
def test_taps_of_a_row_share_positions(asked, taps, depth):
    """Where they do, a step is `depth` of each, and there is one tap a row."""
    here = capabilities("card", 89, (3, 6))
    made = call(here, **{"width": WHOLE_PLANE} | asked).constants
    assert (made["SHARE"], made["BK"]) == (taps, depth)
    assert made["KW"] == 3 // taps or made["RUN"] > made["C"]
    other = call(capabilities("card", 90, (3, 6)), **{"width": WHOLE_PLANE} | asked)
    assert "SHARE" not in other.constants


@pytest.mark.parametrize(
    ("asked", "kernel"),
    [
        (dict(channels=256), "taps"),
        (dict(channels=192), "taps"),
        (dict(channels=128, outputs=512), "taps"),
        (dict(channels=256, dtype=HALF), "mma"),
        (dict(channels=256, width=33), "mma"),  # the rest share nothing
        (dict(channels=256, stride=2), "mma"),
        (dict(channels=96), "mma"),
        (dict(channels=256, taps=1), "mma"),
        (dict(channels=256, taps=5), "mma"),
    ],
    ids=str,
)
def test_positions_that_taps_share_stay_in_registers_in_int8(asked, kernel):
    asked = {"width": WHOLE_PLANE, "dtype": INT8} | asked
    for here in (*(capabilities("card", sm, (3, 6)) for sm in (80, 86, 89, 120)), prebuilt("card", FORMS["C"], "C")):
        made = call(here, **asked)
        assert made.kernel == f"conv3d.{kernel}_kernel"
        assert kernel == "mma" or made.constants["SHARE"] == 3
    assert call(capabilities("card", 90, (3, 6)), **asked).kernel == "conv3d.conv_kernel"


@pytest.mark.parametrize(
    ("asked", "slices"),
    [
        (dict(), 2),
        (dict(stride=2), 4),
        (dict(stride=2, dtype=INT8), 4),
        (dict(stride=2, channels=512), 2),  # tiles are not tall
        (dict(stride=2, channels=64), 2),
        (dict(residual=True), 2),
        (dict(residual=True, groups=32), 2),
        (dict(residual=True, channels=1024, outputs=128), 4),
        (dict(residual=True, channels=32, outputs=1024), 4),
        (dict(residual=True, channels=1024, outputs=64), 2),
        (dict(residual=True, groups=32, channels=256, dtype=INT8), 4),
        (dict(residual=True, channels=256, dtype=INT8), 2),
        (dict(groups=32, channels=256, dtype=INT8), 2),
        (dict(residual=True, groups=32, dtype=INT8), 2),  # eight warps
        (dict(residual=True, groups=32, channels=256, dtype=INT8, width=1700, held=BF16, taps=1), 4),
        (dict(residual=True, groups=32, channels=256, dtype=INT8, width=1700, held=BF16), 2),  # taps share positions
        (dict(residual=True, groups=32, channels=256, dtype=INT8, width=1700), 2),  # measured with halves
        (dict(residual=True, groups=32, channels=512, dtype=INT8, width=1700, held=BF16), 2),
        (dict(residual=True, channels=256, dtype=INT8, width=1700, held=BF16), 2),
        (dict(outputs=256, taps=1, width=1700), 4),  # two steps, which are one turn
        (dict(outputs=256, taps=1, width=1700, channels=256), 2),
        (dict(outputs=256, width=1700), 2),
    ],
    ids=str,
)
def test_the_epilogue_is_in_quarters_only_where_halves_would_spill(asked, slices):
    """As `tools/build_kernels.py --check` finds. In another form it stays as the schedule has it."""
    made = call(CARD, **asked).constants
    assert made["SLICES"] == slices
    assert call(capabilities("card", 90, (3, 99)), **asked).constants["SLICES"] == 2


def test_a_step_of_one_slice_reads_nothing_ahead_in_four_warps():
    four, eight = call(CARD, channels=16, outputs=512).constants, call(CARD, channels=16, outputs=128).constants
    assert (four["BK"], four["num_warps"], four["AHEAD"]) == (16, 4, 1)
    assert (eight["BK"], eight["num_warps"], eight["AHEAD"]) == (16, 8, 2)


def test_fp16_sums_of_fp8_in_pairs_of_tiles_have_fewer_buffers():
    """Each step adds them to sums in fp32, and every buffer makes the code of a turn longer."""
    found = [op._loop(op.Schedule(128, 128, 64, 8, 4, tail=tail), 27, FP8, sums)["STAGES"]
             for sums in ("f16", "f32") for tail in (0, 16, 32, 64)]  # fmt: skip
    assert found == [4, 3, 3, 2, 4, 4, 4, 4]


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16, INT8])
@pytest.mark.parametrize("outputs, tail", [(144, 16), (288, 16), (576, 64), (96, 32), (48, 16)])
def test_pairs_of_tiles_with_one_of_128_channels_run_in_eight_warps(dtype, outputs, tail):
    """In four they spill up to 1.6 KB a thread."""
    made = call(CARD, dtype, 576, outputs=outputs).constants
    assert (made["TAIL"], made["num_warps"]) == (tail, 8 if outputs > 96 else 4)


def test_positions_that_taps_share_are_read_once():
    """In the code that ships: a slice of three taps takes eight reads of positions, one more for each other tap and two
    of weights for each, where taps on their own would take ten each."""
    here = prebuilt("card", FORMS["A"], "A")
    one = call(here, INT8, width=WHOLE_PLANE, bias=torch.empty(128, device="meta"))
    text = library().kernel("A", key(one.kernel, one.arguments, one.constants)).ptx
    slices = one.constants["BK"] // 32 * one.constants["STAGES"]
    assert text.count(b"mma.sync") == slices * 3 * 32
    assert text.count(b"ldmatrix") == slices * (8 + 2 + 3 * 2)
