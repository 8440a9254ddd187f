"""Weights that wait in host memory, on a real GPU: what is there of them after each kind of run, what a run reserves,
and the same bits as with all of them there."""

import gc

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.engine.network.offload import moving_bytes
from zerowaste_vae.engine.options import DEFAULTS
from zerowaste_vae.engine.planning.besides import CUBLAS_BYTES, LIBRARY_BYTES
from zerowaste_vae.engine.runtime.kept import KEPT
from zerowaste_vae.engine.system.memory import GIB

from ..gpu_models import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WARM = ("seedvr2", "hunyuanvideo1.5")
SIZE = 1, 16, 3, 24, 32


def allocated():
    """Bytes in use, but for what libraries and runs keep for the next call."""
    KEPT.release()
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def frames_of(shape):
    return torch.randint(256, (*shape, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_packed_weights_alone(full_width, noise, precision):
    """After fused runs packed weights alone are there."""
    before = allocated()
    vae = load(full_width, precision, "cuda")
    assert allocated() == before and not any(p.is_cuda for p in vae.model.parameters())
    for _ in range(2):  # in 8 bit, the second one finds prepared weights
        vae.encode(frames_of((9, 192, 256)))
        vae.decode(noise(*SIZE))
        assert vae.last_report.mode.startswith("fused") and vae._plain.packed_bytes("decoder") == 0
        left = allocated() - before
        print(f"{precision}: {left / GIB:.3f} GB left, {vae.packed_bytes / GIB:.3f} packed")
        assert vae.packed_bytes <= left <= vae.packed_bytes + (2 << 20)
        vae.release()
        assert allocated() <= before + (1 << 20)
    assert not any(p.is_cuda for p in vae.model.parameters())


def test_equal_bits(full_width, noise):
    """Encode, decode, plain torch, the raw pair, and fused again; plain halves stay until they run fused."""
    vae = load(full_width, "fp16", "cuda")
    there = load(full_width, "fp16", "cuda", weights_on=torch.device("cuda"))
    off = DEFAULTS.switched(off=["triton_fusion"])
    own = there.with_options(off)
    z, video = noise(*SIZE), frames_of((9, 192, 256))
    latent, frames, raw = there.encode(video), there.decode(z), there.decode_raw(z)
    plain = own.encode(video), own.decode(z)
    there.release()
    del there, own
    before = allocated()
    half = {h: moving_bytes(*getattr(vae.model, h).everything()) for h in ("encoder", "decoder")}
    for _ in range(2):
        assert torch.equal(vae.encode(video), latent) and torch.equal(vae.decode(z), frames)
        other = vae.with_options(off)
        assert torch.equal(other.encode(video), plain[0]) and torch.equal(other.decode(z), plain[1])
        assert other.packed_bytes == sum(half.values())
        del other
        assert torch.equal(vae.decode_raw(z), raw) and vae._plain.packed_bytes("decoder") == half["decoder"]
        assert torch.equal(vae.decode(z), frames)
        assert allocated() - before <= vae.packed_bytes + raw.nbytes + (2 << 20)
    vae.release()
    assert allocated() <= before + (1 << 20)


@pytest.mark.parametrize(
    ("name", "latents", "height", "width", "gb"),
    [("hunyuanvideo1.5", 5, 45, 80, 4), ("hunyuanvideo1.5", 5, 45, 80, 6), ("hunyuanvideo1.5", 9, 45, 80, 13),
     ("seedvr2", 5, 60, 80, 3)],
)  # fmt: skip
def test_a_first_decode_keeps_to_its_target(noise, name, latents, height, width, gb):
    """Packing included, which borrows the weights of one step after the other."""
    vae = make(name, "fp16")
    allocated()
    torch.cuda.empty_cache()
    others = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    channels = vae.latent_channels
    frames = vae.decode(noise(1, channels, latents, height, width), vram_gb=gb + others / GIB, output="uint8")
    stated, most = vae.last_report.predicted_gb, (torch.cuda.max_memory_reserved() - others) / GIB
    print(f"{vae.last_report.plan}: reserved {most:.3f} GB")
    assert vae.last_report.mode.startswith("fused") and not vae.last_report.events["oom_step_downs"]
    assert 0.9 * stated <= most <= min(1.05 * stated, gb)
    assert len(frames[0]) == vae.frames(latents)


def test_plans_count_what_is_there(full_width):
    """A host that moves all weights has them counted, and more for what torch reserves beside them; a fused run of
    weights that wait has none of them."""
    vae = load(full_width, "fp16", "cuda")
    hosts = load(full_width, "fp16", "cuda", weights_on=torch.device("cpu"))
    whole = sum(p.nbytes for p in vae.model.parameters()) + LIBRARY_BYTES - CUBLAS_BYTES
    for half in ("decoder", "encoder"):
        size = 3, 90, 160
        assert hosts.planner.plan(half, size).peak_bytes - vae.planner.plan(half, size).peak_bytes == whole
