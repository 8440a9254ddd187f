"""Results that are not finite on a real GPU are found wherever they arise, in every precision, and made again."""

import inspect
import math

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.kernels.norm_act import statistics
from zerowaste_vae.engine.runtime.context import ExecutionContext

from ..gpu_models import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ("seedvr2",)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One folder for all tests: packed weights are written once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROWASTE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=["fp16", "fp8", "int8"])
def known(request, cache, full_width):
    """(VAE, latent, its frames from the type that a rerun takes); the ranges are known."""
    z = torch.randn(1, 16, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    # A file for what is kept beside it; of 16 bit each rerun would read it again, 1 GB.
    vae = make("seedvr2", "fp16") if request.param == "fp16" else load(full_width, request.param, "cuda")
    vae.options = vae.options.switched(off=["cuda_graphs"])  # a replay would pass by the fault
    vae.decode(z)
    yield vae, z, vae._safer("").decode(z)
    vae.release()


class Struck:
    """Puts a value into one number of what the convolution of this key makes, the first time."""

    def __init__(self, monkeypatch, key, value):
        self.key, self.value, self.done = key, value, 0
        monkeypatch.setattr(ExecutionContext, "conv", self.after(ExecutionContext.conv))

    def after(self, original):
        signature = inspect.signature(original)

        def call(run, conv, x, out, *args, **options):
            sums = original(run, conv, x, out, *args, **options)
            if run.dry or self.done or not getattr(conv, "key", "").endswith(self.key):
                return sums
            self.done += 1
            out[-1, 1, 0, 3] = self.value
            groups = signature.bind(run, conv, x, out, *args, **options).arguments.get("groups", 0)
            return None if sums is None else statistics(out, groups)

        return call


@pytest.mark.parametrize(("key", "value"), [
    ("mid_block.resnets.0.conv1", math.inf), ("up_blocks.0.resnets.2.conv2", math.nan),
    ("up_blocks.3.resnets.1.conv1", math.inf), ("up_blocks.3.resnets.1.conv1", math.nan),
])  # fmt: skip
def test_rerun(known, monkeypatch, key, value):
    """Results that are not finite are computed again."""
    vae, z, safer = known
    struck = Struck(monkeypatch, key, value)
    out = vae.decode(z)
    assert (struck.done, vae.last_report.events["nan_reruns"]) == (1, 1)
    assert torch.equal(out, safer)


def test_rerun_last_norm(known):
    """A clamp would hide the overflow here. The rerun packs anew."""
    vae, z, safer = known
    vae._fused.decoder().stages[-1][-1].packed.conv.bias[1] = math.nan
    out = vae.decode(z)
    assert vae.last_report.events["nan_reruns"] == 1
    assert torch.equal(out, safer)
