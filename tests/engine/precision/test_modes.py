"""Resolve precisions by hardware, with the reason for anything else."""

import pytest
import torch
from zerowaste_vae.engine.kernels.targets import capabilities
from zerowaste_vae.engine.precision import modes
from zerowaste_vae.engine.precision.modes import Mode, resolve

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def on(monkeypatch):
    return lambda sm, triton=(3, 6): monkeypatch.setattr(modes, "target", lambda *_: capabilities("GPU", sm, triton))


@pytest.mark.parametrize(
    ("sm", "asked", "kind", "half", "word"),
    [
        (90, "fp8", "fp8", False, None),
        (120, "fp8", "fp8", False, None),
        (86, "fp8", "int8", False, "no fp8 matrix instruction: int8"),
        (80, "int8", "int8", False, None),
        (120, "fp16_fast", None, True, None),
        (90, "fp16_fast", None, False, "no faster"),
        (90, "fp16", None, False, None),
        (90, "auto", None, False, None),
    ],
)
def test_on_gpus(on, sm, asked, kind, half, word):
    on(sm)
    mode = resolve(asked, CUDA, 0.0, None)
    assert (mode.kind, mode.half_accumulate) == (kind, half)
    assert word in mode.refused if word else mode.refused is None


def test_auto(on):
    """auto takes 8 bit only under a floor, and where it is faster."""
    on(90)
    assert resolve("auto", CUDA, 50.0, None) == Mode("fp8")
    assert resolve("fp16", CUDA, 50.0, None).plain
    on(86)
    assert resolve("auto", CUDA, 50.0, None) == Mode("int8")
    assert resolve("auto", CPU, 50.0, None).plain
    assert resolve("auto", CUDA, 50.0, "switched off").plain


def test_no_kernels(on):
    """Without kernels the reason is given."""
    on(75)
    mode = resolve("int8", CUDA, 0.0, "Triton is not installed", "bf16")
    assert mode.plain
    assert "Triton is not installed" in mode.refused
    assert "bf16 runs" in mode.refused
    assert resolve("fp8", CPU, 0.0, None) == Mode("fp8")
