"""Stand-ins on a GPU: what they leave there, and diffusers' numbers."""

from types import SimpleNamespace

import pytest
import torch
from zerowaste_vae import load
from zerowaste_vae.adapters import SeedVR2VAE, WanVideoVAE, for_diffusers
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import seedvr2, wan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
WIDTHS, WHERE = (32, 32, 64, 64), (("fp16", "cuda"), ("fp32", "cpu"))


def made(kind):
    """(stand-in in fp16 on the GPU, the same in fp32 on the CPU)."""
    if kind == "wan":
        stored = random_checkpoint(wan.Config(WIDTHS, WIDTHS), architecture=wan.WAN21)
        like = SimpleNamespace(mean=torch.zeros(16), inv_std=torch.ones(16))
        return [WanVideoVAE(load(stored.tensors, *where), like) for where in WHERE]
    stored = random_checkpoint(seedvr2.Config(WIDTHS, WIDTHS), architecture=seedvr2.ARCHITECTURE)
    return [SeedVR2VAE(load(stored.tensors, *where)) for where in WHERE]


@pytest.mark.parametrize("kind", ["wan", "seedvr2"])
def test_frames_are_those_of_a_cpu_and_offloading_frees_the_gpu(kind, noise):
    ours, same = made(kind)
    z = noise(1, 16, 2, 8, 8)
    frames = [torch.stack(list(one.decode(z)[0])) for one in (ours, same)]
    assert frames[0].sub(frames[1]).abs().max() < 0.1 * frames[1].std()
    x = noise(1, 3, 5, 64, 64).tanh()
    means = [one.moments_of(x.to(one.device))[0] for one in (ours, same)]
    assert means[0].sub(means[1]).abs().max() < 0.1 * means[1].std()
    assert ours.vae.packed_bytes > 0
    ours.to("cpu")
    assert ours.vae.packed_bytes == 0
    # Another GPU is away, too; the run's own is not.
    ours.decode(z)
    ours.to(torch.device("cuda", ours.device.index or 0)).to("cuda")
    assert ours.vae.packed_bytes > 0
    ours.to("cuda:7")
    assert ours.vae.packed_bytes == 0


@pytest.mark.parametrize("name", ["AutoencoderKLHunyuanVideo", "AutoencoderKLCogVideoX"])
def test_diffusers_own_numbers(name, noise, seed_model):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    theirs = getattr(diffusers, name)(block_out_channels=WIDTHS, layers_per_block=2, latent_channels=16).eval().cuda()
    seed_model(theirs, 4)
    ours = for_diffusers(theirs, precision="fp32")
    z, x = noise(1, 16, 3, 8, 8).cuda(), noise(1, 3, 9, 64, 64).cuda()
    with torch.no_grad():
        wanted = theirs.decode(z).sample, theirs.encode(x).latent_dist.parameters
    for found, exact in zip((ours.decode(z).sample, ours.encode(x).latent_dist.parameters), wanted, strict=True):
        assert found.device == exact.device and found.sub(exact).abs().max() < 1e-3 * exact.std()
