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


def rest_is_cut_off(vae, monkeypatch, fused, more):
    """Encode a picture of 2 x 3 latents and `more` rows and columns, which fill none, as without these."""
    s = vae.spatial
    if fused:
        monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
        vae = vae.with_options(vae.options)
        assert vae.plan_encode(1, 2, 3, tuple(n % s for n in more)).fused
    video = torch.rand(1, 1, 2 * s + more[0], 3 * s + more[1], 3, generator=torch.Generator().manual_seed(0))
    whole = video[:, :, : video.shape[2] // s * s, : video.shape[3] // s * s]
    assert torch.equal(vae.encode(video), vae.encode(whole))
