"""A plan takes few walks and few operations, whatever is asked for, and it can be stopped."""

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.errors import Cancelled, PlanError
from zerowaste_vae.engine.families import cosmos, hunyuan, hunyuan_refiner, ltx, minimax_h3, mochi
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning import dryrun, plain_walk, repeated
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.planning.make import make_planner
from zerowaste_vae.engine.planning.plain_walk import Torch
from zerowaste_vae.engine.precision.modes import Mode
from zerowaste_vae.engine.request import Request

GIB = 1 << 30
SIZE = 8, 40, 60


def planner_of(architecture):
    """Return a planner of published sizes, for plain torch on a GPU."""
    dtype = torch.float16
    return make_planner(
        architecture, architecture.published.config, dtype, DEFAULTS, Mode(), lambda: False,
        lambda: Torch(reserves=True),
    )  # fmt: skip


@pytest.fixture
def operations(monkeypatch):
    """Counts what dry walks of plain torch do."""
    count = [0]
    dispatch = dryrun.PeakMemory.__torch_dispatch__

    def counted(self, *args, **options):
        count[0] += 1
        return dispatch(self, *args, **options)

    monkeypatch.setattr(dryrun.PeakMemory, "__torch_dispatch__", counted)
    return count


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_a_walk_takes_no_longer_for_a_long_chunk(vae_file, operations, half):
    costs = []
    for chunk in (8, 4096):
        vae = load(vae_file, device="cpu")
        operations[0] = 0
        with pytest.raises(PlanError):
            vae.planner.plan(half, (25_000, 40, 60), Request(chunk=chunk), Limits(1 << 20))
        costs.append(operations[0])
    assert costs[1] < 1.5 * costs[0]
    assert costs[1] < 5_000  # of a handful of walks


#: Of torch, for a first plan: what a walk of a few latents takes of the largest network, some times over.
MOST_OPERATIONS = 7_500


@pytest.mark.parametrize("half", ["decoder", "encoder"])
@pytest.mark.parametrize("gb", [3, None])
@pytest.mark.parametrize("family", [mochi, cosmos, ltx], ids=lambda family: family.ARCHITECTURE.name)
def test_long_clip(operations, family, half, gb):
    """Also where something of every frame stays until it ends, and all of them go through one by one."""
    planner = planner_of(family.ARCHITECTURE)
    if getattr(planner.walk.config, f"{half}_widths") is None:
        pytest.skip("the published file lacks that half")
    limits = Limits(None if gb is None else gb * GIB)
    try:
        planner.plan(half, (100_000 // family.ARCHITECTURE.temporal, 90, 160), limits=limits)
    except PlanError as refused:
        assert "use smaller frames or a shorter clip" in str(refused)
    assert 0 < operations[0] < MOST_OPERATIONS


@pytest.mark.parametrize("half", ["decoder", "encoder"])
@pytest.mark.parametrize("tiling", ["auto", "blended"])
def test_many_pictures(operations, half, tiling):
    """Walk one picture if each is a clip that goes through all of the network alone."""
    planner = planner_of(hunyuan_refiner.ARCHITECTURE)
    planner.plan(half, (100_000, 45, 80), Request(chunk=4096, tiling=tiling), Limits(13 * GIB, 13 * GIB))
    assert 0 < operations[0] < MOST_OPERATIONS


@pytest.mark.parametrize("reserves", [False, True])
@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_later_pictures(half, reserves):
    """With every picture of a chunk walked as the judge."""
    size, peaks = (7, 9, 12), []
    for stand_in in (repeated._stand_in, repeated.Repeated):
        planner = make_planner(
            hunyuan_refiner.ARCHITECTURE, hunyuan_refiner.ARCHITECTURE.published.config, torch.float16, DEFAULTS,
            Mode(), lambda: False, lambda: Torch(reserves=reserves),
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(repeated, "_stand_in", stand_in)
            peaks.append([planner.plan(half, size, Request(chunk=chunk)).peak_bytes for chunk in (1, 3, 7)])
    assert peaks[0] == peaks[1]
    assert peaks[0][0] <= peaks[0][2]


def test_longer_clips_of_what_waits_need_more():
    """Exact up to a few latents, then on the line through them: 30 latents walked one by one as the judge."""
    planner, short = planner_of(mochi.ARCHITECTURE), (4, 10, 20)
    peaks = [planner.plan("encoder", (n, 30, 53)).peak_bytes for n in short]
    assert peaks[2] - peaks[1] == pytest.approx((peaks[1] - peaks[0]) / 6 * 10, rel=1e-6)
    stated = planner.plan("encoder", (30, 30, 53)).peak_bytes
    walked = planner_of(mochi.ARCHITECTURE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_walk, "LINE", (1, 30))
        exact = walked.plan("encoder", (30, 30, 53)).peak_bytes
    assert stated == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_gathered_clips(operations, half):
    """On the line through shorter ones, with all latents as the judge, in so many walks as those take."""
    size, peaks, counts = (1500, 16, 16), [], []

    def peak(chunk):
        return planner_of(hunyuan.ARCHITECTURE).plan(half, size, Request(chunk=chunk)).peak_bytes

    for latents in (plain_walk.GATHERED, (1, size[0])):
        operations[0] = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plain_walk, "GATHERED", latents)
            peaks.append([peak(1), peak(3)])
        counts.append(operations[0])
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)
    operations[0] = 0
    planner_of(hunyuan.ARCHITECTURE).plan(half, (25_000, *size[1:]), Request(chunk=1))
    assert operations[0] < counts[0]


def test_too_large(monkeypatch):
    """Whole frames of a clip as short as any; tiles not where what sees whole frames takes more, but for the smallest,
    which the refusal tells of."""
    walk, walked = plain_walk.PlainWalk._walk_clip, []

    def noted(self, half, latents, steps, size, *more):
        walked.append((latents, size))
        return walk(self, half, latents, steps, size, *more)

    monkeypatch.setattr(plain_walk.PlainWalk, "_walk_clip", noted)
    with pytest.raises(PlanError, match="smallest tiles"):
        planner_of(mochi.ARCHITECTURE).plan("encoder", (100, 270, 480), limits=Limits(4 * GIB))
    first, last = plain_walk.LINE
    assert walked == [(first, (270, 480)), *((n, (2, 2)) for n in (first, last))]


@pytest.mark.parametrize("gb", [3, 6, 12])
def test_tiles(monkeypatch, gb):
    """Whole frames were walked no further than shows that they do not fit: what they take of it tells of the rest."""
    walk, sizes = plain_walk.PlainWalk._walk_clip, set()

    def noted(self, half, latents, steps, size, *more):
        if size != (76, 130):
            sizes.add(size)
        return walk(self, half, latents, steps, size, *more)

    monkeypatch.setattr(plain_walk.PlainWalk, "_walk_clip", noted)
    found = planner_of(mochi.ARCHITECTURE).plan("encoder", (21, 76, 130), limits=Limits(gb * GIB))
    rows = found.grid.rows.size
    assert found.tiled and len(sizes) == 2 and min(sizes)[0] == rows < max(sizes)[0]


def test_many_grids_take_few_walks(vae_file, operations):
    vae = load(vae_file, device="cpu")
    vae.planner.plan("decoder", (4, 64, 64))
    one = operations[0]
    found = vae.planner.plan("decoder", (100, 2048, 2048), limits=Limits(1 << 40))
    assert not found.tiled
    with pytest.raises(PlanError):
        vae.planner.plan("decoder", (100, 2048, 2048), limits=Limits(1 << 30))
    assert operations[0] < 16 * one


def test_a_plan_stops_when_it_is_told_to(vae_file):
    """Between two walks."""
    asked = []

    def check():
        asked.append(1)
        if len(asked) == 2:
            raise Cancelled("cancelled")

    vae = load(vae_file, device="cpu")
    with pytest.raises(Cancelled):
        vae.planner.plan("decoder", SIZE, limits=Limits(1 << 20), check=check)
    assert len(asked) == 2


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_networks_that_tile_themselves_stop_too(half):
    planner, asked = planner_of(minimax_h3.ARCHITECTURE), []

    def check():
        asked.append(1)
        raise Cancelled("cancelled")

    with pytest.raises(Cancelled):
        planner.plan(half, SIZE, check=check)
    assert asked == [1]


def test_cancel(vae_file):
    """A decode can be stopped while it is planned."""
    calls = []

    def cancel():
        calls.append(1)
        return True

    vae = load(vae_file, device="cpu")
    with pytest.raises(Cancelled):
        vae.decode(torch.zeros(1, vae.latent_channels, 3, 4, 4), cancel=cancel)
    assert vae.last_report.plan == ""  # there was none yet
    assert len(calls) == 1
