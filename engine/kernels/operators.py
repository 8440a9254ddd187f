"""Operators: what each declares of its kernels, and the one way from a call to its kernels or its reference.

An operator is a function that launches kernels, with its declaration above it:

    @operator("twice_kernel", reference=_reference, check=_check, takes=Takes(torch.float16))
    def twice(here: Target, x: Tensor, out: Tensor) -> None:
        launcher("twice.twice_kernel", here)[grid](x, out, ...)

It is called without `here`. `backend` says what runs: "auto" the kernels where there are some and the reference
elsewhere, "triton" the kernels or an error, "reference" that. A profiler sees the call under the function's name.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from .launching import register
from .observe import listening, watched
from .targets import FP8, Target, kernels_for

#: The types that most kernels multiply.
HALVES = (torch.float16, torch.bfloat16)
#: All operators that were imported, by name. Each has as attributes `launch`, the function below its declaration,
#: `reference`, `check`, `kernels`, and `runs(device, dtype, backend, **sizes)`: whether kernels would run.
OPERATORS: dict[str, Callable[..., Any]] = {}


class Takes:
    """What the kernels of an operator take.

    types: of its first tensor; none: any. has: what the GPU must have, an attribute of `Target`. on: the generations
    that have kernels; None: all. sizes: by name, the numbers that are taken, such as range(16, 513, 16).
    """

    def __init__(
        self, *types: torch.dtype, has: str = "", on: Collection[int] | None = None, **sizes: Collection[int]
    ) -> None:
        self._types, self._has, self._on, self._sizes = types, has, on, sizes

    def why_not(self, dtype: torch.dtype, here: Target | None = None, **sizes: int) -> str | None:
        """Return why the kernels do not take operands of a type and some sizes; None: they do. here: the GPU; without
        it what a GPU must have is not asked."""
        if self._types and dtype not in self._types:
            return f"its kernels take {', '.join(map(str, self._types))}, not {dtype}"
        for name, size in sizes.items():
            if size not in self._sizes[name]:
                return f"{name} is {size}, and its kernels take {_words(self._sizes[name])}"
        if here is None:
            return None
        if dtype == FP8 and not here.fp8:
            return f"sm_{here.sm} has no fp8 matrix instruction"
        if self._has and not getattr(here, self._has):
            return f"sm_{here.sm} has no {self._has} here"
        return None if self._on is None or here.sm in self._on else f"sm_{here.sm} has no kernel of its own"


def operator(
    *kernels: str, reference: Callable[..., Any], check: Callable[..., None] | None = None, takes: Takes | None = None,
    sizes: Callable[..., Mapping[str, int]] | None = None, otherwise: Callable[..., Any] | None = None,
    in_place: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:  # fmt: skip
    """Make an operator of the function below, which launches its kernels and gets the `Target` first.

    Args:
        kernels: functions in kernels.py beside it, "gluon.NAME" in another file; prebuilt sets know them as
            FOLDER.NAME.
        reference: computes the same in plain torch, with fp32 arithmetic. It, `check` and `sizes` get the arguments of
            a call; what they do not need they take as **_.
        check: raises ValueError for arguments that do not fit together.
        takes: what the kernels take; None: whatever passes the check.
        sizes: returns those of a call that `takes` names.
        otherwise: runs instead of the kernels under "auto"; None: the reference.
        in_place: the results lie in arguments. So without kernels nothing is done for tensors on the meta device.
    """

    def declared(launch: Callable[..., Any]) -> Callable[..., Any]:
        name, known = launch.__name__, frozenset(inspect.signature(launch).parameters)
        register(launch.__module__, *kernels)

        def runs(device: torch.device, dtype: torch.dtype, backend: str = "auto", **named: int) -> bool:
            here = kernels_for(device, backend)
            return here is not None and (takes is None or takes.why_not(dtype, here, **named) is None)

        @functools.wraps(launch)
        def call(*args: Any, **more: Any) -> Any:
            if listening():
                return watched(call, args, more)
            backend = more.pop("backend", "auto")
            if check is not None:
                check(*args, **more)
            x = args[0] if isinstance(args[0], Tensor) else args[0].data
            here, why = kernels_for(x.device, backend), None
            if here is not None and takes is not None:
                why = takes.why_not(x.dtype, here, **sizes(*args, **more)) if sizes else takes.why_not(x.dtype, here)
            if here is not None and why is None:
                if x.is_cuda and x.get_device() != torch.cuda.current_device():  # Triton launches on the current one
                    with torch.cuda.device_of(x):
                        return launch(here, *args, **more)
                return launch(here, *args, **more)
            if why and backend == "triton":
                raise RuntimeError(f"no kernel of {name}: {why}")
            if not known.issuperset(more):  # the launch would have said so
                raise TypeError(f"{name} takes no {', '.join(more.keys() - known)}")
            if in_place and x.is_meta:
                return None
            instead = call.reference if otherwise is None or backend == "reference" else otherwise
            return instead(*args, **more)

        call.launch, call.reference, call.check, call.kernels, call.runs = launch, reference, check, kernels, runs
        OPERATORS[name] = call
        return call

    return declared


def strides_of(*tensors: Tensor) -> tuple[int, list[int]]:
    """Return a unit, and the strides of tensors over their first three dimensions in it: 16 where all of these are
    multiples of 16 elements, which tells the compiler that accesses are aligned, else 1."""
    strides = [stride for t in tensors for stride in t.stride()[:3]]
    return (16, [stride // 16 for stride in strides]) if math.gcd(16, *strides) == 16 else (1, strides)


def _words(numbers: Collection[int]) -> str:
    if isinstance(numbers, range):
        return f"{numbers[0]} to {numbers[-1]}" + (f" in steps of {numbers.step}" if numbers.step > 1 else "")
    return ", ".join(map(str, numbers))
