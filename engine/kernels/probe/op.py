"""Find out by running one if kernels work on a GPU, and tell their errors from others. Loading this imports no
Triton."""

from __future__ import annotations

import threading

import torch

from ...errors import named
from ..cards import AUTO, TRITON
from ..cure import cure
from ..launching import launcher, register
from ..prebuilt.errors import PrebuiltError, WrittenError
from ..prebuilt.library import SetError
from ..targets import Target, switch_off, switch_winograd_off, target, using, ways

register(__name__, "doubling_kernel")
_lock = threading.Lock()
_tried: set[tuple[torch.device, str]] = set()


def proven(device: torch.device, asked: str = AUTO) -> Target:
    """Return the result of `target` after a first kernel has run there: a way in which that fails is off, and the notes
    name the cause and the cure."""
    while (found := target(device, asked)).kernels and not works(device, found):
        pass
    return found


def works(device: torch.device, here: Target) -> bool:
    """Return True if kernels run on a GPU the way that `here` says, after trying a first one; if not, switch them
    off."""
    place = _place(device)
    with _lock:
        if (place, here.way) not in _tried:
            try:
                _run(place, here)
            except Exception as error:
                if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
                    return True  # no verdict on the kernels: try again another time
                give_up(place, error, here.way)
            _tried.add((place, here.way))
    return any(one.way == here.way for one in ways(place, here.way))


def give_up(device: torch.device, error: Exception, way: str) -> None:
    """Launch no kernel this way on `device` any more, after this error; after one of the Winograd form, no kernel of
    that form."""
    if isinstance(error, WrittenError):
        switch_winograd_off(_place(device), f"its kernels fail here ({named(error)}). A newer driver of NVIDIA's may "
                            "take them")  # fmt: skip
    elif way == TRITON:
        switch_off(_place(device), way, f"Triton fails here ({named(error)}). {cure()}")
    else:
        switch_off(_place(device), way, f"prebuilt kernels (set {way}) fail here ({named(error)})")


def from_kernels(error: BaseException) -> bool:
    """Return True if launching kernels raised the error: Triton while compiling or loading, or the prebuilt kernels'
    driver or files."""
    if isinstance(error, (PrebuiltError, SetError)):
        return True
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


def _run(device: torch.device, here: Target) -> None:
    x = torch.arange(128, dtype=torch.float32, device=device)
    out = torch.empty_like(x)
    with torch.cuda.device_of(x), using(here):
        launcher("probe.doubling_kernel", here)[(1,)](x, out, N=128, num_warps=4)
    if not torch.equal(out, 2 * x):
        raise RuntimeError("a first kernel computed wrong numbers")
