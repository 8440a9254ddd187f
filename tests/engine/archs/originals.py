"""Measure how near outputs come to those of the original implementations."""

import torch
from zerowaste_vae.engine.options import DEFAULTS

#: Of an output's standard deviation.
BOUND = 4e-5


def close(actual, expected, bound=BOUND):
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound * float(expected.std()))


def close_when_fused(vae, z, expected, monkeypatch, bound=BOUND):
    """Decode raw latents [B, C, T, h, w] on the fused walk, through the reference operators, whole and by latents."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    fused = vae.with_options(DEFAULTS)
    assert fused.plan_decode(*z.shape[2:]).fused
    whole = fused.decode(z)
    pictures = expected.clamp(-1, 1).mul(0.5).add(0.5).permute(0, 2, 3, 4, 1)
    torch.testing.assert_close(whole, pictures, rtol=0, atol=bound / 2 * float(expected.std()))
    assert torch.equal(fused.decode(z, chunk=1), whole)
