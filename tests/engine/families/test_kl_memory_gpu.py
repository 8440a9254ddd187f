"""Memory of Flux's VAE at its published widths on a real GPU equals what plans state. No other test's VAE lives
meanwhile: the gaps between its weights would be used, and counted as its own."""

import pytest
import torch
from zerowaste_vae.engine.request import Request
from zerowaste_vae.engine.runtime.kept import KEPT

from ..gpu_models import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ("flux",)


def test_a_lean_plan_takes_what_it_states(noise):
    others = torch.cuda.memory_reserved()
    vae = make("flux", "bf16")
    z = noise(1, vae.latent_channels, 1, 256, 256)
    vae.decode(z[..., :8, :8])
    roomy = vae.plan_decode(1, 256, 256).peak_bytes
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    whole = vae.decode(z)
    assert 0.95 * roomy < torch.cuda.max_memory_reserved() - others < 1.05 * roomy
    lean = vae._plan("decoder", (1, 256, 256), Request(), below=roomy)
    assert lean.parking is not None
    assert torch.equal(vae.decode(z, vram_gb=lean.peak_bytes / 2**30 + 0.01), whole)


@pytest.mark.parametrize("half", ["decoder", "encoder"])
def test_recomputing(noise, monkeypatch, half):
    """Recomputed pictures have the same bits and take what is stated."""
    others, used = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    vae = make("flux", "bf16")
    if half == "decoder":
        run, x = vae.decode, noise(1, vae.latent_channels, 1, 256, 256)
    else:
        run, x = vae.encode, (noise(1, 2048, 2048, 3) * 50 + 128).clamp(0, 255).byte()
    whole, plan = run(x), vae._plan(half, (1, 256, 256), Request())
    while not plan.rolls:
        plan = vae._plan(half, (1, 256, 256), Request(), below=plan.peak_bytes)
    monkeypatch.setattr(vae.planner, "plan", lambda *a, **k: plan)
    KEPT.release()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert torch.equal(run(x), whole)
    most = torch.cuda.max_memory_reserved()  # gaps in what others have reserved may be used, too
    assert 0.95 * plan.peak_bytes < most - used and most - others < 1.05 * plan.peak_bytes
