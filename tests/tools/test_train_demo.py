"""The demo VAE's training: its own forward, starting weights, data and export agree with the engine."""

import math

import numpy as np
import pytest
import torch
from zerowaste_vae.engine import demo_vae_path, load
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.tools.train_demo import canvases, export, fast, init, measure, motion, train

CONFIG = Config((8, 8, 16, 16), (8, 16, 16, 8), norm_groups=4)


@pytest.fixture
def model(seed_model):
    made = ARCHITECTURE.build(CONFIG)
    seed_model(made, 3)
    return made


def whole(model, x):
    """The engine's forward on channels-last clips: moments and the decode of their mean."""
    moments = model.encoder(x.permute(0, 4, 1, 2, 3))
    y = model.decoder(moments[:, :16])
    return moments.permute(0, 2, 3, 4, 1), y.permute(0, 2, 3, 4, 1)


@pytest.mark.parametrize("frames", [1, 5, 9])
def test_training_forward_equals_the_engine(model, noise, frames):
    x = noise(2, frames, 16, 24, 3)
    with torch.no_grad():
        moments, y = whole(model, x)
        mine = fast.encode(model, x, torch.float32)
        torch.testing.assert_close(mine, moments, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(fast.decode(model, moments[..., :16], torch.float32), y, atol=2e-5, rtol=1e-4)


def test_single_frames(model, noise):
    """Single frames can train the present tap alone."""
    fast.encode(model, noise(1, 1, 16, 16, 3), torch.float32, frozen_past=True).sum().backward()
    gradient = model.encoder.mid_block.resnets[0].conv1.weight.grad
    assert gradient[:, :, 2].abs().max() > 0 and gradient[:, :, :2].abs().max() == 0


def test_start(noise):
    """Start gives unit latents and inflating keeps single frames."""
    model = ARCHITECTURE.build(CONFIG)
    init.start(model, 0)
    x = noise(2, 1, 32, 32, 3)
    with torch.no_grad():
        moments, y = whole(model, x)
        assert 0.5 < moments[..., :16].std() < 2
        init.inflate(model)
        again_moments, again = whole(model, x)
        torch.testing.assert_close(again_moments, moments, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(again, y, atol=1e-5, rtol=1e-4)
        still = fast.decode(model, moments[..., :16].expand(-1, 2, -1, -1, -1), torch.float32)
    assert still.shape[1] == 5
    # A latent that stands still decodes to a clip that does, because sub-frames start as copies.
    assert (still - still[:, :1]).abs().max() < 0.05 * still.std()


def test_balance(model, noise):
    """Balance changes the scale inside and not the output."""
    x = noise(1, 5, 16, 16, 3)
    seen = []
    model.decoder.up_blocks[3].resnets[2].register_forward_hook(lambda *call: seen.append(call[2].std().item()))
    with torch.no_grad():
        before = whole(model, x)
        export.balance(model)
        after = whole(model, x)
    assert seen[1] == pytest.approx(seen[0] / 32, rel=1e-4)
    for a, b in zip(before, after, strict=True):
        # The norms' eps of 1e-6 is no longer negligible against variances of about 1/1000.
        assert (a - b).abs().max() < 5e-3 * a.std()


def test_export_is_what_the_engine_loads(model, tmp_path):
    export.save(model, tmp_path / "x.safetensors")
    vae = load(tmp_path / "x.safetensors", device="cpu")
    frames = np.random.default_rng(0).integers(0, 256, (5, 16, 24, 3), dtype=np.uint8)
    through = vae.decode(vae.encode(torch.from_numpy(frames).float() / 255))[0].numpy()
    np.testing.assert_allclose(through, measure.reconstruct(model, frames), atol=1e-4)


@pytest.fixture(scope="module")
def pictures():
    rng = np.random.default_rng(5)
    return [torch.from_numpy(rng.integers(0, 256, (3, h, w), dtype=np.uint8)) for h, w in ((90, 70), (64, 120))]


def test_canvases_are_varied_and_repeatable(pictures):
    pool = canvases.make_pool(pictures, 12, seed=1, device="cpu", side=48)
    assert pool.shape == (12, 3, 48, 48) and pool.dtype == torch.uint8
    assert torch.equal(pool, canvases.make_pool(pictures, 12, seed=1, device="cpu", side=48))
    assert not torch.equal(pool, canvases.make_pool(pictures, 12, seed=2, device="cpu", side=48))
    assert (pool.flatten(1).float().std(1) > 1).all()


def test_clips_move_smoothly(pictures):
    pool = canvases.make_pool(pictures, 8, seed=1, device="cpu", side=64)
    x = motion.clips(torch.Generator().manual_seed(0), pool, 6, 5, 24, 32)
    assert x.shape == (6, 5, 24, 32, 3) and x.min() >= -1 and x.max() <= 1
    step = (x[:, 1:] - x[:, :-1]).square().mean((1, 2, 3, 4))
    apart = (x - x[torch.arange(6).roll(1)]).square().mean((1, 2, 3, 4))
    assert (step > 0).any()
    assert step.mean() < 0.5 * apart.mean()


def test_training_learns_and_continues(pictures, tmp_path):
    phases = (train.Phase(1.0, 2, 1, 32, 32, 8, 64),)

    def go(steps):
        run = train.Run(tmp_path, torch.device("cpu"), CONFIG, seed=0)
        first = run.step, run.progress
        train.train(run, phases, pictures, math.inf, 1e9, 0.1, steps)
        return first, run

    first, run = go(12)
    assert first == (0, 0.0) and run.step == 12
    second, again = go(1)
    assert second == (12, run.progress) and again.step == 13
    pool = canvases.make_pool(pictures, 8, 0, "cpu", 64)
    x = motion.clips(torch.Generator().manual_seed(0), pool, 2, 1, 32, 32)
    fresh = ARCHITECTURE.build(CONFIG)
    init.start(fresh, 0)
    silent = torch.zeros(2, 1, 4, 4, 16)
    with torch.no_grad():
        untrained, trained = (train.loss_function(m, True)(x, silent)[0] for m in (fresh, run.model))
    assert trained < untrained


def test_psnr():
    source = np.full((1, 2, 2, 3), 51, np.uint8)
    assert measure.psnr(source, np.full((1, 2, 2, 3), 0.3)) == pytest.approx(20.0)
    assert measure.psnr(source, source / 255) == math.inf


def test_held_back_clip():
    """The shipped vae holds up on what it never saw."""
    pytest.importorskip("skimage", reason="the held-back picture is in the scikit-image package")
    from zerowaste_vae.tools.train_demo.make_clip import held_back_clip
    from zerowaste_vae.tools.train_demo.pictures import HELD_BACK, PICTURES

    assert not set(HELD_BACK) & set(PICTURES)
    frames = held_back_clip()[:5]
    vae = load(demo_vae_path(), device="cpu", precision="fp32")
    result = vae.decode(vae.encode(torch.from_numpy(frames).float() / 255))[0].numpy()
    assert measure.psnr(frames, result) > 26
