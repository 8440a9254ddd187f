"""Plans: below the target, the leanest only when needed, and readable refusals."""

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine import log
from zerowaste_vae.engine.errors import InputError, PlanError

GIB = 1 << 30


def plan(vae, half="decoder", gb=None, **options):
    target = None if gb is None else int(gb * GIB)
    return vae.planner.plan(half, 1, 8, 40, 60, target=target, **options)


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_roomy_target_is_untiled_and_tighter_ones_shrink(vae, half):
    roomy = plan(vae, half)
    assert not roomy.tiled
    assert roomy.steps.latents == 4
    seen = [roomy]
    while True:
        try:
            tighter = plan(vae, half, (seen[-1].peak_bytes - 1) / GIB)
        except PlanError as e:
            assert "480x320 untiled needs" in str(e)
            assert "tiling='blended'" in str(e)
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
        plan(vae, gb=0.0005, host=None)


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
    for tile in (-3, 8):
        with pytest.raises(InputError, match=f"tile={tile} is too small"):
            plan(vae, tiling="exact", tile=tile)


def test_plain_torch_has_no_exact_tiles_and_says_so(vae, caplog, monkeypatch):
    monkeypatch.setattr(log, "_said", set())
    assert plan(vae, tiling="exact", tile=64, host=None) == plan(vae)
    assert "tile=64 of exact tiles at 480x320 is not used: bands need parked histories" in caplog.text


def test_describe_names_the_choice(vae):
    assert plan(vae).describe().startswith("plain torch, untiled, 4 latent(s) per chunk, about ")
    assert "blended tiles" in plan(vae, tiling="blended", tile=96, overlap=32).describe()


def test_longer_clips_need_no_more(vae):
    short, long = (vae.planner.plan("decoder", 1, n, 40, 60) for n in (8, 400))
    assert short.peak_bytes == long.peak_bytes


@pytest.mark.parametrize("half", ["decoder", "encoder"])
@pytest.mark.parametrize("options", [{}, {"tiling": "blended", "tile": 96}])
def test_plans_are_the_same_in_the_hosts_inference_mode(vae, vae_file, half, options):
    expected = plan(vae, half, **options)
    fresh = load(vae_file, device="cpu")
    with torch.inference_mode():
        assert plan(fresh, half, **options) == expected
    assert plan(load(vae_file, device="cpu"), half, **options) == expected
