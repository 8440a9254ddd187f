"""Plans: below the target, the leanest only when needed, and readable refusals."""

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine import log
from zerowaste_vae.engine.errors import InputError, PlanError
from zerowaste_vae.engine.kernels.exact import as_products
from zerowaste_vae.engine.planning.budget import Limits
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.system.memory import GIB, in_gb

SIZE = 8, 40, 60


def plan(vae, half="decoder", gb=None, host=0, **options):
    limits = Limits(None if gb is None else int(gb * GIB), host=host)
    return vae.planner.plan(half, SIZE, Request(**options), limits)


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_targets(vae, half):
    """Roomy target is untiled and tighter ones shrink."""
    roomy = plan(vae, half)
    assert not roomy.tiled
    assert roomy.steps.latents == 4
    seen = [roomy]
    while True:
        try:
            tighter = plan(vae, half, (seen[-1].peak_bytes - 1) / GIB, tiling="untiled")
        except PlanError as e:
            assert "480x320 untiled needs" in str(e)
            assert "tiling='auto' or 'blended'" in str(e)
            assert "fp16" not in str(e)
            break
        assert tighter.peak_bytes < seen[-1].peak_bytes
        seen.append(tighter)
    assert seen[-1].steps.latents == 1
    assert seen[-1].steps.frames == 1


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_blended_tile_is_picked_from_the_target(vae, half):
    least = plan(vae, half, chunk=1).peak_bytes
    picked = plan(vae, half, 0.4 * least / GIB, tiling="blended", overlap=32)
    assert picked.tiled
    assert picked.peak_bytes <= 0.4 * least
    assert not plan(vae, half, 10, tiling="blended").tiled
    with pytest.raises(PlanError, match="smallest tiles"):
        plan(vae, half, 0.0005, tiling="blended")


def test_fp32_on_a_gpu_is_told_of_16_bits(vae):
    with pytest.raises(PlanError, match="or use fp16 or bf16, which need less, or"):
        plan(vae, gb=0.0005, host=None, tiling="untiled")


def test_users_tile_and_chunk_are_kept(vae):
    p = plan(vae, tiling="blended", tile=96, overlap=32, chunk=3)
    assert (p.grid.rows.size, p.steps.latents) == (12, 3)
    with pytest.raises(PlanError, match="tile=96"):
        plan(vae, gb=0.0005, tiling="blended", tile=96, overlap=32)


def test_odd_options_are_refused(vae):
    with pytest.raises(InputError, match="tiling='spiral'"):
        plan(vae, tiling="spiral")
    with pytest.raises(InputError, match="chunk=-1"):
        plan(vae, chunk=-1)
    with pytest.raises(InputError, match="overlap=64"):
        plan(vae, tiling="blended", tile=64, overlap=64)
    for tile, why in ((-3, "below 0"), (8, "too small")):
        with pytest.raises(InputError, match=f"tile={tile} is {why}"):
            plan(vae, tiling="exact", tile=tile)


def test_plain_exact_tiles(vae, caplog, monkeypatch):
    """Plain torch has no exact tiles and says so."""
    monkeypatch.setattr(log, "_said", set())
    assert plan(vae, tiling="exact", tile=64, host=None) == plan(vae)
    assert "tile=64 of exact tiles at 480x320 is not used: bands need parked histories" in caplog.text


def test_describe_names_the_choice(vae):
    assert plan(vae).describe().startswith("plain torch, untiled, 4 latents per chunk, about ")
    assert "blended tiles" in plan(vae, tiling="blended", tile=96, overlap=32).describe()


def test_longer_clips_need_no_more(vae):
    short, long = (vae.planner.plan("decoder", (n, 40, 60)) for n in (8, 400))
    assert short.peak_bytes == long.peak_bytes


@pytest.mark.parametrize("half", ["decoder", "encoder"])
@pytest.mark.parametrize("options", [{}, {"tiling": "blended", "tile": 96}])
def test_inference_mode(vae, vae_file, half, options):
    """Plans are the same in the hosts inference mode."""
    expected = plan(vae, half, **options)
    fresh = load(vae_file, device="cpu")
    with torch.inference_mode():
        assert plan(fresh, half, **options) == expected
    assert plan(load(vae_file, device="cpu"), half, **options) == expected


# -- auto gives way before it refuses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_raised_target(vae, half):
    """A clip that needs a little more than the default target has exact frames if that much is free."""
    least = plan(vae, half, chunk=1, tiling="untiled").peak_bytes
    while True:
        try:
            least = plan(vae, half, (least - 1) / GIB, tiling="untiled").peak_bytes
        except PlanError:
            break
    target, room = int(0.9 * least), int(1.1 * least)
    raised = vae.planner.plan(half, SIZE, limits=Limits(target, room))
    assert (raised.tiled, raised.raised) == (False, room)
    assert target < raised.peak_bytes <= room
    assert "target of" in raised.describe() and "is raised to" in raised.describe()
    crowded = vae.planner.plan(half, SIZE, limits=Limits(0, room, beside=13 * GIB))
    held = "0.00 GB (other models and data of this program hold 13.00 GB)"
    assert f"the target of {held} is raised to the {in_gb(room)} that are free: whole frames need it" in crowded.note
    with pytest.raises(PlanError) as refused:
        vae.planner.plan(half, SIZE, limits=Limits(0, beside=13 * GIB))
    assert f"and the target is {held}: raise vram_gb" in str(refused.value)
    blended = vae.planner.plan(half, SIZE, limits=Limits(target))  # the user's own target is not
    assert blended.tiled
    assert blended.peak_bytes <= target
    assert "blended tiles are approximate; 480x320 untiled needs" in blended.describe()
    assert " ram_gb" not in blended.note
    within = vae.planner.plan(half, SIZE, limits=Limits(target, target + 1))  # not even what is free will do
    assert (within.tiled, within.raised) == (True, None)
    for tiling in ("untiled", "exact"):
        with pytest.raises(PlanError, match="480x320 untiled needs"):
            vae.planner.plan(half, SIZE, Request(tiling), Limits(target, room))


def test_raised_target_blended(vae):
    """Blended tiles may need the raised target too."""
    smallest = plan(vae, tiling="blended", tile=16, overlap=8, chunk=1).peak_bytes
    for low in range(1, 60):
        with pytest.raises(PlanError):
            plan(vae, gb=smallest * (1 - low / 100) / GIB)
            continue
        break
    found = vae.planner.plan("decoder", SIZE, limits=Limits(int(smallest * (1 - low / 100)), smallest))
    assert found.tiled
    assert found.raised == smallest
    assert "nothing smaller fits" in found.note


def test_long_chunk(vae):
    """The frames are the same, so it costs nothing but the wish."""
    roomy, long = plan(vae), plan(vae, chunk=8)
    assert long.steps.latents == 8
    target = (roomy.peak_bytes + long.peak_bytes) / 2 / GIB
    assert plan(vae, chunk=8, gb=target, tiling="untiled").steps.latents == 8  # fewer frames per step come first
    gb = target
    with pytest.raises(PlanError, match="chunk=8"):
        while True:
            gb *= 0.98
            plan(vae, chunk=8, gb=gb, tiling="untiled")
    found = plan(vae, chunk=8, gb=gb)
    assert not found.tiled
    assert found.steps.latents < 8
    assert "chunk=8 does not fit the target and is not used: same frames" in found.describe()
    with pytest.raises(PlanError, match=r"chunk=8 needs .*: lower chunk \(\d fits; 0 lets the planner choose\)$"):
        plan(vae, chunk=8, gb=gb, tiling="untiled")


def test_chunk_and_frames(vae):
    """The message names the need of the frames, and apart from it the chunk's own."""
    for options in ({"tiling": "untiled"}, {"tiling": "blended", "tile": 96}):
        with pytest.raises(PlanError) as short:
            plan(vae, gb=0.0005, **options)
        with pytest.raises(PlanError) as long:
            plan(vae, gb=0.0005, chunk=8, **options)
        said, _, more = str(long.value).partition("; chunk=8 needs ")
        assert said == str(short.value)
        assert more.endswith("GB: lower it too (0 lets the planner choose)")


def test_smallest_tiles(vae):
    """The smallest tiles are named with what would help."""
    needed = plan(vae, tiling="blended", tile=128, overlap=64, chunk=1).peak_bytes
    while True:
        try:
            needed = plan(vae, gb=(needed - 1) / GIB, tiling="blended", tile=128, overlap=64).peak_bytes
        except PlanError as refused:
            assert "tile=128 at 480x320 needs" in str(refused)
            assert "use a smaller tile" in str(refused)
            break
    with pytest.raises(PlanError, match=r"overlap=120 .*: lower the overlap"):
        plan(vae, gb=needed / GIB, tiling="blended", overlap=120)
    with pytest.raises(PlanError, match="raise vram_gb, or use smaller frames"):
        plan(vae, gb=0.0005, tiling="blended")
    with pytest.raises(PlanError, match="raise vram_gb, or use smaller frames"):
        plan(vae, gb=0.0005)


# -- what is there to count -------------------------------------------------------------------------------------------


def test_pixels_that_fill_no_latent_are_counted(vae):
    plans = [vae.planner.plan("encoder", SIZE, rest=rest) for rest in ((0, 0), (7, 0), (7, 7))]
    peaks = [p.peak_bytes for p in plans]
    assert peaks == sorted(set(peaks))


def test_fp32_on_cuda_is_planned_as_it_runs(vae_file, monkeypatch):
    """By matrix products there, which take more than cuDNN's convolutions."""
    vae = load(vae_file, precision="fp32", device="cpu")
    cpu = plan(vae)
    monkeypatch.setattr(vae.planner, "_fused", lambda: None)
    monkeypatch.setattr(vae, "device", torch.device("cuda"))
    cuda = plan(vae)
    assert cuda.peak_bytes > cpu.peak_bytes
    monkeypatch.setattr(vae, "_options", vae.options.switched(on=["tf32"]))
    assert not as_products(vae.device, vae.dtype, vae.options.tf32)
