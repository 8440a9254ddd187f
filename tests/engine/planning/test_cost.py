"""Plans of the published SeedVR2 widths on the fused operators: parked histories, targets and refusals."""

import functools
import re
from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine import log
from zerowaste_vae.engine.errors import PlanError
from zerowaste_vae.engine.families import kl
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.planning.cost import GRAPH_BYTES, Rates, leanest, quickest
from zerowaste_vae.engine.planning.fused_walk import FusedWalk
from zerowaste_vae.engine.planning.planner import Planner
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.runtime.parking import Parking

GIB = 1 << 30
CONFIG = Config((128, 256, 512, 512), (128, 256, 512, 512))


@pytest.fixture(scope="module")
def walk():
    return FusedWalk(ARCHITECTURE, CONFIG, torch.float16, DEFAULTS)


@pytest.fixture(scope="module")
def planner(walk):
    return Planner(walk, lambda: True)


def plan(planner, height, width, gb, host_gb=62.0, half="decoder", **options):
    limits = Limits(int(gb * GIB), host=int(host_gb * GIB))
    return planner.plan(half, (6, height // 8, width // 8), Request(**options), limits)


@pytest.mark.parametrize(
    ("height", "width", "gb", "half"),
    [(720, 1280, 13, "decoder"), (720, 1280, 4, "decoder"), (720, 1280, 3, "decoder"), (1080, 1920, 13, "decoder"),
     (2160, 3840, 13, "decoder"), (1080, 1920, 8, "encoder"), (720, 1280, 3, "encoder")],
)  # fmt: skip
def test_whole_frames_fit_small_cards(planner, height, width, gb, half):
    found = plan(planner, height, width, gb, half=half)
    assert found.fused
    assert not found.tiled
    assert found.peak_bytes <= gb * GIB
    assert bool(found.parking) == (found.host_bytes > 0)
    assert ("parked in host memory" in found.describe()) == bool(found.parking)


def test_nothing_is_parked_without_need(planner, walk):
    assert plan(planner, 720, 1280, 13).parking is None
    work = []
    for gb in (13, 9, 7, 5, 3):
        found = plan(planner, 720, 1280, gb)
        steps = found.steps
        sizes = walk.sizes("decoder", steps.latents, steps.frames, 90, 160, torch.float32, None, found.parking)
        assert sizes.host == found.host_bytes
        work.append(sizes.work / steps.latents)
    assert work == sorted(work)


def test_720p_under_4_gb(planner, walk):
    """Steps of fewer frames than a latent has would move those of the last resolutions twice: 2.9 GB per frame."""
    found = plan(planner, 720, 1280, 4)
    assert (found.steps.latents, found.steps.frames) == (1, 4)
    assert found.host_bytes < 4 * found.far_bytes / 3.8 < 1.1 * found.host_bytes
    size = 1, 4, 90, 160, torch.float32, None
    assert walk.sizes("decoder", *size, found.parking).work < 1.85 * walk.sizes("decoder", *size).work


@pytest.mark.parametrize("link", [25e9, 12e9])
def test_a_slow_link_has_plans_that_move_less(planner, walk, link):
    slow = Planner(FusedWalk(ARCHITECTURE, CONFIG, torch.float16, DEFAULTS, Rates(link=link)), lambda: True)
    assert plan(slow, 720, 1280, 13) == plan(planner, 720, 1280, 13)
    fewer = 0
    for gb in (9.75, 8, 6.5, 4, 3):
        usual, found = plan(planner, 720, 1280, gb), plan(slow, 720, 1280, gb)
        assert found.peak_bytes <= gb * GIB

        def time(p):
            size = p.steps.latents, p.steps.frames, 90, 160, torch.float32, None
            return slow.walk.sizes("decoder", *size, p.parking).work / p.steps.latents

        assert time(found) <= time(usual)
        moved, before = (p.far_bytes / p.steps.latents for p in (found, usual))
        assert moved <= before
        fewer += moved < before
    assert fewer >= 2


def test_rates_of_the_machine_are_taken_up(walk):
    own = FusedWalk(ARCHITECTURE, CONFIG, torch.float16, DEFAULTS)
    ask = functools.partial(own.sizes, "decoder", 1, 4, 90, 160, torch.float16, None, Parking(None, 0))
    before = ask()
    own.rates = Rates(link=12e9)
    after = ask()
    assert after.work > 2 * before.work and replace(after, work=before.work) == before
    own.rates = Rates()
    assert ask() == before
    # Half the work a second hides twice the bytes.
    assert Rates(work=325e12, link=25e9).far_work == Rates().far_work == 15000


def test_1080p_hides_its_copies_below_13_gb(planner, walk):
    found = planner.plan("decoder", (41, 135, 240), Request(), Limits(13 * GIB, host=62 * GIB))
    size = found.steps.latents, found.steps.frames, 135, 240, torch.float32, None
    assert walk.sizes("decoder", *size, found.parking).work < 1.1 * walk.sizes("decoder", *size).work


def test_short_clip(planner):
    """Chunks of two latents take 3 % less for each, and longer to begin with."""
    few, many = (planner.plan("decoder", (n, 90, 160), Request(), Limits(6 * GIB, host=62 * GIB)) for n in (6, 100))
    assert (few.steps.latents, many.steps.latents) == (1, 2)
    assert few.parking is not None and many.parking is not None


def test_host_memory_refused(planner):
    """More host memory than allowed is refused with the way out."""
    with pytest.raises(PlanError, match=r"3840x2160 .* ram_gb to 56\.6\d GB \(it is 30\.00 GB; .* of GPU memory"):
        plan(planner, 2160, 3840, 13, host_gb=30, tiling="untiled")
    with pytest.raises(PlanError, match=r"or vram_gb to 1[01]\.\d\d GB and ram_gb to 56\.6\d GB \(it is 30\.00 GB"):
        plan(planner, 2160, 3840, 8, host_gb=30, tiling="untiled")
    with pytest.raises(PlanError) as e:
        plan(planner, 2160, 3840, 2, tiling="untiled")
    assert " ram_gb" not in str(e.value)  # more of it would not help


@pytest.mark.parametrize("tiling", ["auto", "untiled"])
@pytest.mark.parametrize("host_gb", [1, 2])
def test_parking(planner, tiling, host_gb):
    """All of them would take 6.3 GB there; the others stay on the GPU."""
    found = plan(planner, 720, 1280, 8, host_gb, tiling=tiling)
    assert not found.tiled and 0 < found.host_bytes <= host_gb * GIB and found.peak_bytes <= 8 * GIB


def test_exact_tile(planner):
    """Exact with a tile works in bands of that many rows."""
    found = plan(planner, 720, 1280, 13, tiling="exact", tile=128)
    assert (found.parking.keys, found.parking.rows) == (None, 128)
    assert plan(planner, 720, 1280, 13, tiling="exact").parking is None


@pytest.mark.parametrize(("gb", "host_gb", "tile"), [(13, 2, 128), (3, 62, 512)])
def test_bands_do_not_fit(planner, caplog, monkeypatch, gb, host_gb, tile):
    """Without enough host memory, or higher than the target allows; the frames are the same, and the log says why."""
    monkeypatch.setattr(log, "_said", set())
    assert plan(planner, 720, 1280, gb, host_gb, tiling="exact", tile=tile) == plan(planner, 720, 1280, gb, host_gb)
    words = rf"tile={tile} .* at 1280x720 is not used: .* is {gb}\.00 GB; 6\.3\d GB .* allows {host_gb}\.00 GB; other"
    assert re.search(words, caplog.text)
    with pytest.raises(PlanError, match="1280x720 untiled needs"):
        plan(planner, 720, 1280, 2, tiling="exact", tile=tile)


def test_no_bands(planner, caplog, monkeypatch):
    """On a CPU, where whole frames run, and the log says so."""
    monkeypatch.setattr(log, "_said", set())
    found = plan(planner, 720, 1280, 13, 0, tiling="exact", tile=128)
    assert found == plan(planner, 720, 1280, 13, 0)
    assert "only the fused kernels on a GPU have" in caplog.text
    with pytest.raises(PlanError) as e:
        plan(planner, 720, 1280, 3, 0, tiling="untiled")
    assert " ram_gb" not in str(e.value)


def test_users_chunk_is_kept_when_parking(planner):
    assert plan(planner, 720, 1280, 4, chunk=3).steps.latents == 3


def test_quickest(walk):
    """Quickest takes the room and no longer than with less."""
    measure = functools.partial(walk.sizes, "decoder", 1, 4, 90, 160, torch.float16, None)
    free, (_, least) = measure(None), leanest(measure, None)
    assert quickest(measure, least.device - 1, None) is None
    last = 2 * least.work
    for room in range(least.device, free.device, (free.device - least.device) // 5):
        parking, sizes = quickest(measure, room, None)
        assert sizes.device <= room
        assert sizes.host <= least.host
        # What stays on the GPU is copied, too: a little, once nothing else is left to gain.
        assert free.work <= sizes.work <= max(last, 1.12 * free.work)
        assert sizes == measure(parking)
        last = sizes.work
    # With nothing parked chunks may be recorded, which takes memory of its own.
    assert measure(Parking(frozenset(), 0)) == replace(free, device=free.device - GRAPH_BYTES)


def test_recomputed_pictures():
    """Flux's decoder at 4096x4096, whose widest stream has 8 GB: 4 GB of them stay."""
    walk = FusedWalk(kl.FLUX, kl.FLUX.published.config, torch.bfloat16, DEFAULTS)
    planner, size = Planner(walk, lambda: True), (1, 512, 512)

    def plan(gb):
        return planner.plan("decoder", size, limits=Limits(int(gb * GIB), host=GIB))

    plans = [plan(gb) for gb in (13, 11, 9, 6)]
    assert [p.parking is not None for p in plans] == [False, True, True, True]
    assert [p.rolls for p in plans] == [False, False, True, True]
    assert all(p.peak_bytes <= gb * GIB and not p.host_bytes for p, gb in zip(plans, (13, 11, 9, 6), strict=True))
    work = [walk.sizes("decoder", 1, 0, 512, 512, torch.float32, parking=p.parking).work for p in plans]
    assert work[0] == work[1] < work[2] < work[3] < 2 * work[0]
    assert plan(5).tiled


def test_only_pictures_are_known_to_be_alone(walk, planner):
    """Pictures are one clip, all of them; another video of a batch may arrive while one is encoded."""
    flux = FusedWalk(kl.FLUX, kl.FLUX.published.config, torch.bfloat16, DEFAULTS)
    for each, of, latents, alone in ((flux, Planner(flux, lambda: True), 1, True),
                                     (flux, Planner(flux, lambda: True), 8, False), (walk, planner, 1, False)):
        found = of.plan("encoder", (latents, 64, 64), limits=Limits(80 * GIB))
        size = found.steps.latents, found.steps.frames, 64, 64, torch.float32
        stated = each.sizes("encoder", *size, alone=alone).device
        assert found.peak_bytes == stated + of._besides("decoder", True)
