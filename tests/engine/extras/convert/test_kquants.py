"""Our K-quant encoders, decoded by the gguf package: right layout, small error, no bad values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from zerowaste_vae.engine.checkpoints.gguf_types import named
from zerowaste_vae.engine.extras.convert import kquants, quantize

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

# Relative RMS error on normal values, just above what was measured with the seed below.
BOUNDS = {"Q2_K": 0.271, "Q3_K": 0.144, "Q4_K": 0.0715, "Q5_K": 0.0360, "Q6_K": 0.0174}
# The step-32 type that takes about as many bits: the K type must beat it.
RIVALS = {"Q4_K": "Q4_0", "Q5_K": "Q5_0"}


def decoded(raw: np.ndarray, name: str) -> torch.Tensor:
    kind = gguf.GGMLQuantizationType[name]
    return torch.from_numpy(gguf.quants.dequantize(raw.reshape(1, -1), kind)[0])


def error(values: torch.Tensor, name: str) -> float:
    return float((decoded(quantize.encode(values, named(name)).numpy(), name) - values).norm() / values.norm())


@pytest.mark.parametrize("name", BOUNDS)
def test_error_on_normal_values(name):
    values = torch.randn(512 * 256, generator=torch.Generator().manual_seed(0)) * 0.03
    raw = kquants.quantize(values.numpy(), name)
    assert raw.dtype == np.uint8 and raw.size == named(name).nbytes(values.numel())
    assert error(values, name) < BOUNDS[name]
    if name in RIVALS:
        assert error(values, name) < 0.9 * error(values, RIVALS[name])


@pytest.mark.parametrize("name", BOUNDS)
def test_each_value_comes_back_in_its_place(name):
    """One large value among small ones, at every position of a block: a wrong bit order would move it."""
    values = torch.full((256, 256), 0.01)
    values.fill_diagonal_(-1.0)
    back = decoded(kquants.quantize(values.flatten().numpy(), name), name).reshape(256, 256)
    assert torch.equal(back.argmin(1), torch.arange(256))
    assert (back.diagonal() + 1).abs().max() < 0.1


@pytest.mark.parametrize("name", BOUNDS)
def test_levels_are_used_exactly(name):
    """Values that are a scale times an integer of the type's range come back to fp16 rounding of the scales."""
    levels = {"Q2_K": (0, 3), "Q3_K": (-4, 3), "Q4_K": (0, 15), "Q5_K": (0, 31), "Q6_K": (-32, 31)}[name]
    values = torch.arange(256).remainder(levels[1] - levels[0] + 1).add(levels[0]).flip(0) * 0.125
    if name == "Q6_K":
        values[::16] = -4.0  # 16 values cannot show 64 levels: the lowest one fixes the scale
    back = decoded(kquants.quantize(values.float().numpy(), name), name)
    assert (back - values).abs().max() < 2e-3 * values.abs().max()


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-9, 1.0, 6e4])
def test_extremes_stay_finite(name, scale):
    values = torch.linspace(-1, 1, 512) * scale
    values = torch.cat([values, torch.full((256,), scale), torch.full((256,), -scale), torch.zeros(256)])
    back = decoded(kquants.quantize(values.numpy(), name), name)
    assert torch.isfinite(back).all()
    assert (back - values).abs().max() <= 0.3 * scale + 1e-6


@pytest.mark.parametrize("name", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_block_32_types_equal_the_package(name):
    """In steps of 2^19 values, with a shorter last one."""
    values = torch.randn(2**19 + 320, generator=torch.Generator().manual_seed(1))
    ours = quantize.encode(values, named(name)).numpy()
    theirs = gguf.quants.quantize(values.numpy().reshape(-1, 32), gguf.GGMLQuantizationType[name])
    assert np.array_equal(ours, theirs.reshape(-1))


@pytest.mark.parametrize(
    ("name", "shape", "kind", "stored"),
    [
        ("decoder.mid_block.resnets.0.conv1.weight", (64, 64, 3, 3, 3), "q4_k", "Q4_K"),
        ("decoder.mid_block.attentions.0.to_q.weight", (64, 64), "q8_0", "Q8_0"),
        ("decoder.mid_block.resnets.0.conv1.weight", (8, 4, 3, 3, 3), "q4_k", "Q5_0"),  # 864 = 27 * 32
        ("decoder.mid_block.resnets.0.conv1.weight", (7, 4, 3, 3, 3), "q4_k", "F32"),  # divides by neither
        ("decoder.mid_block.resnets.0.norm1.weight", (512,), "q4_k", "F32"),
        ("decoder.middle.0.residual.0.gamma", (512, 1, 1, 1), "q4_k", "F32"),
        ("decoder.mid_block.resnets.0.conv1.bias", (512,), "q8_0", "F32"),
        ("decoder.mid_block.resnets.0.norm1.weight", (512,), "f16", "F32"),
        ("decoder.mid_block.resnets.0.conv1.weight", (64, 64, 3, 3, 3), "bf16", "BF16"),
        *[
            (name, (64, 64, 3, 3, 3), "q8_0", "F32")
            for name in (
                "decoder.conv_in.weight", "encoder.conv_out.weight", "decoder.conv_in.conv.weight", "conv2.weight",
                "encoder.conv1.weight", "decoder.head.2.weight", "decoder.conv_out.0.conv3d.weight",
                "decoder.blocks.0.0.weight", "decoder.up_blocks.0.time_embedder.timestep_embedder.linear_1.weight",
            )
        ],
    ],
)  # fmt: skip
def test_which_type_a_tensor_gets(name, shape, kind, stored):
    assert quantize.stored_type(name, torch.zeros(shape), kind).name == stored
