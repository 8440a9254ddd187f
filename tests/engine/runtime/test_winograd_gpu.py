"""On a real GPU: convolutions in Winograd form give the same bits under every placement of histories, near those of
direct ones."""

from dataclasses import replace

import pytest
import torch
from zerowaste_vae.engine.extras.eight_bit.sampling import decibel
from zerowaste_vae.engine.network.steps import Steps
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.runtime.parking import Parking

from ..gpu_models import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
PLACEMENTS = [
    (Steps(1, 1), Parking(None, 0)),
    (Steps(2, 3), Parking(None, 1 << 30, buffers=3)),
    (Steps(2, 4), Parking(None, 8 << 20, buffers=4, near=24 << 20)),
    (Steps(1, 2), Parking(None, 8 << 20, near=1 << 30)),
    (Steps(3, 0), None),
]
WARM = ("seedvr2-128 winograd", "hunyuanvideo1.5-128 winograd")
#: Of a decode in Winograd form against the direct one, dB. In 8 bit only the layers that stay in 16 bit have it.
LEAST = {"fp16": 60, "fp8": 26, "int8": 30}


@pytest.mark.parametrize("precision", LEAST)
def test_every_placement_has_the_same_bits(precision, monkeypatch):
    direct = make("seedvr2-128", precision).with_options(DEFAULTS.switched(off=["winograd"]))
    vae = direct.with_options(DEFAULTS.switched(on=["winograd"]))
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(1, 16, 3, 37, 27, generator=generator)
    video = torch.rand(1, 9, 8 * 37 + 5, 8 * 27 + 3, 3, generator=generator)
    frames, latent = vae.decode(z), vae.encode(video)
    assert LEAST[precision] < decibel(4 * (frames - direct.decode(z)).square().mean().item())
    assert ("in Winograd form" in vae.last_report.kernels) == bool(vae.planner.walk.network("encoder").formed[0])
    plan = vae.planner.plan
    for steps, parking in PLACEMENTS:
        monkeypatch.setattr(vae.planner, "plan", lambda *a, s=steps, p=parking, **o: replace(
            plan(*a, **o), steps=s, parking=p))  # fmt: skip
        assert torch.equal(vae.decode(z), frames)
        assert torch.equal(vae.encode(video), latent)


def test_equal_bits(monkeypatch):
    """HunyuanVideo 1.5: behind norms over channels, upsamplers of a residual stream, borders that are copies."""
    direct = make("hunyuanvideo1.5-128", "fp16").with_options(DEFAULTS.switched(off=["winograd"]))
    vae = direct.with_options(DEFAULTS.switched(on=["winograd"]))
    z = torch.randn(1, vae.latent_channels, 4, 7, 6, generator=torch.Generator().manual_seed(1))
    frames, plan = vae.decode(z), vae.planner.plan
    assert LEAST["fp16"] - 5 < decibel(4 * (frames - direct.decode(z)).square().mean().item()) < 120
    for steps, parking in PLACEMENTS[:4]:
        monkeypatch.setattr(vae.planner, "plan", lambda *a, s=steps, p=parking, **o: replace(
            plan(*a, **o), steps=s, parking=p))  # fmt: skip
        assert torch.equal(vae.decode(z), frames)
