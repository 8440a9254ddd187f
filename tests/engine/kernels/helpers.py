"""Shared by the kernel tests: tolerances, error measure, bordered inputs."""

import torch
from zerowaste_vae.engine.kernels.conv3d import padded_channels
from zerowaste_vae.engine.kernels.targets import FP8

# ||got - reference|| / ||reference||. The interpreter's own faults are allowed for: it truncates where the hardware
# rounds when it casts to fp8 and bf16 (one step of those types), and cannot multiply bf16 (the kernels upcast there).
TOLERANCE = {torch.float16: 5e-4, torch.bfloat16: 8e-3, torch.float32: 1e-5, FP8: 4e-2, torch.int8: 2e-2}
CAST_STEP = {FP8: 0.125, torch.bfloat16: 8e-3}


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def operand(dtype, *shape):
    x = torch.randn(shape)
    return (x * 40).round().clamp(-127, 127).to(dtype) if dtype == torch.int8 else x.to(dtype)


def bordered(dtype, slots, h, w, c):
    """A zero-bordered ring of random frames."""
    x = torch.zeros(slots, h + 2, w + 2, padded_channels(c, dtype)).to(dtype)
    x[:, 1:-1, 1:-1, :c] = operand(dtype, slots, h, w, c)
    return x


def group_sums(partials, groups):
    return partials.data.double().sum(1).reshape(partials.data.shape[0], groups, -1, 2).sum(2)


def true_sums(stored, groups):
    own = stored.double().reshape(stored.shape[0], -1, groups, stored.shape[3] // groups)
    return torch.stack((own.sum((1, 3)), own.square().sum((1, 3))), -1)


def always(here):
    """Stands for `kernels_for`: whatever device asks for kernels has those of `here`."""
    return lambda device, backend, dtype=None: None if backend == "reference" else here
