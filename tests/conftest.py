"""Fixtures every test may use: carried golden data, the optional larger set, and small seeded VAEs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported, which the first test module may do: here its interpreter runs the kernels.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from safetensors.torch import load_file, save_file
from zerowaste_vae.engine import load
from zerowaste_vae.engine.archs.seedvr2 import ARCHITECTURE, Config
from zerowaste_vae.engine.fused.weights import Conv
from zerowaste_vae.engine.network.fused import FusedDecoder, FusedEncoder

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = Path(__file__).resolve().parent / "fixtures"
#: fp32 noise of the original against its own fp64 run is up to 6.2e-6.
ATOL = 1.5e-5


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory):
    """What tests measure and prepare stays out of the user's cache, and what lies there out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROWASTE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def atol() -> float:
    return ATOL


@pytest.fixture(scope="session")
def fixtures() -> Path:
    return FIXTURES


@pytest.fixture(scope="session")
def shared() -> Path:
    """The larger golden set: $ZEROWASTE_SHARED, or a folder `shared` beside the repository."""
    path = Path(os.environ.get("ZEROWASTE_SHARED") or ROOT.parent / "shared")
    if not (path / "golden").is_dir():
        pytest.skip(f"the larger golden set is not at {path} (set ZEROWASTE_SHARED)")
    return path


def seeded_weights(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter from one generator, in name order: the recipe of the recorded full-width outputs."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            if p.ndim >= 2:
                p.copy_(torch.randn(p.shape, generator=g) * (1.2 / p[0].numel() ** 0.5))
            elif "norm" in name and name.endswith("weight"):
                p.copy_(1 + 0.2 * torch.randn(p.shape, generator=g))
            else:
                p.copy_(0.1 * torch.randn(p.shape, generator=g))


@pytest.fixture(scope="session")
def make_vae_file(tmp_path_factory):
    """make_vae_file(encoder, decoder widths, groups, seed) -> path of a seeded SeedVR2 file in fp32."""
    folder = tmp_path_factory.mktemp("vae")

    def make(encoder=(8, 16, 16, 16), decoder=(8, 16, 16, 16), groups=4, seed=0) -> Path:
        path = folder / f"{encoder}-{decoder}-{groups}-{seed}.safetensors".replace(" ", "")
        if not path.exists():
            model = ARCHITECTURE.build(Config(encoder, decoder, 16, groups))
            seeded_weights(model, seed)
            save_file(model.state_dict(), path, {"norm_num_groups": str(groups)})
        return path

    return make


@pytest.fixture(scope="session")
def vae_file(make_vae_file) -> Path:
    return make_vae_file()


@pytest.fixture(scope="session")
def vae(vae_file):
    """A tiny seeded VAE (widths 8 to 16) in fp32 on the CPU."""
    return load(vae_file, device="cpu")


@pytest.fixture(scope="session")
def seed_model():
    return seeded_weights


@pytest.fixture(scope="session")
def units() -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / "seedvr2" / "units.safetensors")


def packed_convolutions(value) -> dict:
    """{key: packed convolution} of all in a fused half, a list or a dataclass."""
    if isinstance(value, (FusedDecoder, FusedEncoder)):
        value = [link.packed for stage in value.stages for link in stage]
    if isinstance(value, Conv):
        return {value.key: value}
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    parts = map(packed_convolutions, value if isinstance(value, (list, tuple)) else ())
    return {key: conv for part in parts for key, conv in part.items()}


@pytest.fixture(scope="session")
def convolutions():
    return packed_convolutions


@pytest.fixture
def noise():
    """noise(*shape, seed=0): seeded normal values."""

    def make(*shape: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

    return make
