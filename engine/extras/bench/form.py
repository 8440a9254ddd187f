"""Run kernels in the form of another generation of GPUs on the one at hand, so that they can be timed and checked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from ...errors import InputError
from ...kernels.gpus import winograd
from ...kernels.targets import Target, capabilities, standing_in, target, triton_version

#: Values of `--as`: generation -> the oldest compute capability that its code runs on.
GENERATIONS = {"sm_80": 80, "sm_86": 80, "sm_89": 89, "sm_120": 90}
#: Bytes of shared memory per processor: of a consumer card, of this GPU, and reserved for each block.
_CARD, _HERE, _BLOCK = 100 << 10, 227 << 10, 1 << 10
#: Warps that a processor of a consumer card holds.
_WARPS = 48
_VARIABLE = "TRITON_OVERRIDE_ARCH"


def checked(name: str, device: torch.device) -> Target:
    """Return the capabilities of a GPU of generation `name`.

    Args:
        name: a key of GENERATIONS.
        device: the CUDA device that is to run its code.

    Raises: InputError where the device cannot run it, or Triton is not installed.
    """
    if device.type != "cuda":
        raise InputError(f"--as {name}: needs a CUDA GPU, not {device}")
    own = torch.cuda.get_device_capability(device)
    if own[0] * 10 + own[1] < GENERATIONS[name]:
        raise InputError(f"--as {name}: its code does not run on {torch.cuda.get_device_name(device)} "
                         f"(sm_{own[0]}{own[1]}); it needs sm_{GENERATIONS[name]} or later")
    here = capabilities(f"{torch.cuda.get_device_name(device)} as {name}", int(name[3:]), triton_version())
    if not here.kernels:
        raise InputError(f"--as {name}: {here.notes[0]}")
    # Only sm_120 itself has block-scaled products.
    return replace(here, mxfp8=here.mxfp8 and target(device).mxfp8, winograd=winograd("", here.sm))


def padded(shared: int, warps: int) -> int:
    """Return the bytes of shared memory with which no more blocks share a processor of 227 KiB than one of 100 KiB.

    Args:
        shared: bytes that a block needs.
        warps: of a block.
    """
    blocks = max(min(_CARD // (shared + _BLOCK), _WARPS // warps), 1)
    return max(shared, _HERE // blocks // 1024 * 1024 - _BLOCK)


@contextmanager
def in_form(name: str | None, device: torch.device) -> Iterator[Target]:
    """Choose and compile kernels as for a GPU of generation `name`, with no more blocks per processor than it has.

    Args:
        name: a key of GENERATIONS, or None for the device's own kernels.
        device: the CUDA device that runs their code.

    Yields: the capabilities of that GPU.
    Raises: InputError as `checked`.
    """
    if name is None:
        yield target(device)
        return
    here = checked(name, device)
    from triton.compiler.compiler import CompiledKernel, make_backend

    before, made = os.environ.get(_VARIABLE), CompiledKernel.__init__

    def loaded(self: CompiledKernel, *args: object, **kwargs: object) -> None:
        made(self, *args, **kwargs)
        held = self.metadata
        self.metadata = held._replace(shared=padded(held.shared, held.num_warps))
        self.packed_metadata = make_backend(held.target).pack_metadata(self.metadata)

    os.environ[_VARIABLE] = f"sm{here.sm}"
    CompiledKernel.__init__ = loaded
    try:
        with standing_in(here):
            yield here
    finally:
        CompiledKernel.__init__ = made
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
