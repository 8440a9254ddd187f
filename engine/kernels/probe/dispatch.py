"""Whether Triton really compiles and launches kernels on a GPU, found out by doing it once; and whether an error is
Triton's own. Loading this imports no Triton."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import threading
from pathlib import Path

import torch

from ...errors import named
from ..targets import Target, on_device, switch_off, target

_lock = threading.Lock()
_tried: set[torch.device] = set()


def proven(device: torch.device) -> Target:
    """As `target`, after a first kernel has run there: on a GPU where that fails the kernels are off, and the target's
    note names the cause and the cure."""
    found = target(device)
    if not found.kernels:
        return found
    place = _place(device)
    with _lock:
        if place not in _tried:
            try:
                _run(place)
            except Exception as error:
                if "out of memory" in str(error).lower():  # says nothing of Triton: another time
                    return found
                give_up(place, error)
            _tried.add(place)
    return target(device)


def give_up(device: torch.device, error: Exception) -> None:
    """After this error no kernel is launched on `device` any more."""
    why = f"Triton fails here ({named(error)}): the fused kernels are off, torch runs instead"
    switch_off(_place(device), f"{why}. {_cure()}")


def from_triton(error: BaseException) -> bool:
    """Whether Triton raised it: compiling, loading or launching."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] == "triton":
            return True
        trace = trace.tb_next
    return False


def _place(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _run(device: torch.device) -> None:
    from .triton import doubling_kernel

    x = torch.arange(128, dtype=torch.float32, device=device)
    out = torch.empty_like(x)
    with on_device(x):
        doubling_kernel[(1,)](x, out, N=128)
    if not torch.equal(out, 2 * x):
        raise RuntimeError("a first kernel computed wrong numbers")


def _cure() -> str:
    compiler = os.environ.get("CC")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # where Triton looks
    header = Path(sysconfig.get_paths(scheme=scheme)["include"], "Python.h")
    if compiler and shutil.which(compiler) is None:
        return f"CC names {compiler}, which is no program: let it name a C compiler, or unset it"
    if not compiler and not any(map(shutil.which, ("gcc", "clang", "cl"))):
        return "There is no C compiler, which Triton needs: install gcc or clang"
    if not header.exists():
        version = ".".join(map(str, sys.version_info[:2]))
        return f"{header} is missing, which Triton needs: install the headers of Python {version} (python3-dev)"
    if compiler:
        return f"Triton compiles with CC={compiler}: see whether that is a working C compiler, or unset it"
    return "Another version of Triton or a newer driver may serve this GPU"
