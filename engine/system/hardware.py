"""Survey of this machine: GPUs, versions, memory, and the fast paths that are on. Probes never raise."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from .memory import available_ram

if TYPE_CHECKING:
    from ..kernels.targets import Target
T = TypeVar("T")

#: Name shown -> distributions that provide it, in the order they are looked for.
OPTIONAL = {
    "triton": ("triton", "triton-windows", "pytorch-triton", "pytorch-triton-rocm"),
    "flash-attn": ("flash-attn",),
    "comfy-kitchen": ("comfy-kitchen",),
}


@dataclass(frozen=True)
class Gpu:
    """One CUDA (or ROCm) device. Sizes in bytes; `free` is None when the driver did not answer."""

    index: int
    name: str
    sm: int  # 90 for compute capability 9.0
    total: int
    free: int | None
    runnable: bool  # the installed torch holds code for this generation


@dataclass(frozen=True)
class FastPath:
    """One fast path: on or off for decode and encode on this machine, with the reason."""

    name: str
    on: bool
    reason: str


@dataclass(frozen=True)
class Hardware:
    """`packages` and the torch, CUDA and cuDNN versions are None where absent. RAM in bytes."""

    system: str
    python: str
    cores: int
    ram_free: int | None
    torch: str | None
    cuda: str | None
    cudnn: str | None
    packages: dict[str, str | None]
    gpus: tuple[Gpu, ...]
    gpu_problem: str | None  # why there is no GPU to use
    kernels: bool  # fused kernels run on the default device
    kernel_limits: tuple[str, ...]  # their limits there
    kernel_words: str = ""  # the chosen ones, and why no others
    cure: str = ""  # a command that brings a torch for the GPU, where this one is a build for CPUs alone

    @property
    def fast_paths(self) -> tuple[FastPath, ...]:
        """Return the fast paths that decode and encode use on the default device, and the unused ones with the
        reason."""
        usable = next((gpu for gpu in self.gpus if gpu.runnable), None)
        if usable is None:
            gpu = FastPath("GPU", False, f"{self.gpu_problem}; the CPU is used")
            half = FastPath("fp16", False, "fp32 is the default on a CPU")
        else:
            gpu = FastPath("GPU", True, f"{usable.name} (sm_{usable.sm})")
            half = FastPath("fp16", True, "the default on a GPU")
        limits = self.kernel_limits
        if usable is None:
            kernels = FastPath("fused kernels", False, "they need a GPU; torch's own operators are used")
        elif self.kernels:
            what = "known networks in fp16 and bf16; torch's own operators for fp32 and for encoding in blended tiles"
            kernels = FastPath("fused kernels", True, "; ".join((self.kernel_words, what, *limits)))
        else:
            kernels = FastPath("fused kernels", False, "; ".join(limits) or "not available on this GPU")
        return gpu, half, kernels


def survey(kernels: str = "auto") -> Hardware:
    """Survey this machine. It starts the CUDA driver where there is one, and is otherwise cheap. kernels: the requested
    ones."""
    here = _probe(lambda: _kernel_target(kernels), None)
    return Hardware(
        system=_probe(platform.platform, "unknown"),
        python=platform.python_version(),
        cores=_probe(cores, 1),
        ram_free=_probe(available_ram, None),
        torch=_probe(_torch_version, None),
        cuda=_probe(_cuda_version, None),
        cudnn=_probe(_cudnn_version, None),
        packages={name: _installed(distributions) for name, distributions in OPTIONAL.items()},
        gpus=_probe(_gpus, ()),
        gpu_problem=_probe(_gpu_problem, "CUDA could not be asked"),
        kernels=here is not None and here.kernels,
        kernel_limits=() if here is None else here.notes,
        kernel_words="" if here is None else here.words,
        cure=_probe(_cure, ""),
    )


def runs_on(sm: int, built_for: Sequence[str]) -> bool:
    """Return True if code built for `built_for` (torch.cuda.get_arch_list()) runs on compute capability `sm`.

    Binary code runs on its own major version from its minor on; PTX (compute_XX) on everything from its version on.
    """
    for entry in built_for:
        kind, _, digits = entry.partition("_")
        digits = digits.rstrip("af")
        if not digits.isdigit():
            continue
        built = int(digits)
        if (kind == "sm" and built // 10 == sm // 10 and built <= sm) or (kind == "compute" and built <= sm):
            return True
    return False


def _probe(ask: Callable[[], T], otherwise: T) -> T:
    # Drivers and half-installed packages fail in undocumented ways: OSError, RuntimeError, AssertionError, ...
    try:
        return ask()
    except Exception:
        return otherwise


def _installed(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
        except Exception:  # a damaged installation is as good as none
            continue
    return None


def no_window() -> int:
    """Return the flag of `subprocess` by which Windows opens no console for a program; 0 elsewhere."""
    return 0x08000000 if sys.platform == "win32" else 0


def cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _torch_version() -> str:
    import torch

    return torch.__version__


def _cuda_version() -> str | None:
    import torch

    return torch.version.cuda or (f"ROCm {torch.version.hip}" if torch.version.hip else None)


def _cudnn_version() -> str | None:
    import torch

    number = torch.backends.cudnn.version() if torch.version.cuda else None
    if number is None:
        return None
    major = 10_000 if number >= 90_000 else 1_000  # cuDNN 9 went from 8902 to 90100
    return f"{number // major}.{number % major // 100}.{number % 100}"


def _gpus() -> tuple[Gpu, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    built_for = torch.cuda.get_arch_list()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        sm = properties.major * 10 + properties.minor
        free = _probe(lambda index=index: torch.cuda.mem_get_info(index)[0], None)
        runnable = torch.version.hip is not None or runs_on(sm, built_for)
        found.append(Gpu(index, properties.name, sm, properties.total_memory, free, runnable))
    return tuple(found)


def _kernel_target(kernels: str) -> Target:
    import torch

    from ..kernels.probe import proven

    return proven(torch.device("cuda" if torch.cuda.is_available() else "cpu"), kernels)


#: Wheels of torch for NVIDIA GPUs; the usual index has builds for CPUs alone on Windows.
CUDA_WHEELS = "https://download.pytorch.org/whl/cu128"


def _cure() -> str:
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None or not _has_nvidia():
        return ""
    command = f"pip install --force-reinstall torch --index-url {CUDA_WHEELS}"
    return f'this torch is a build for CPUs alone; for an NVIDIA GPU: "{sys.executable}" -m {command}'


def _has_nvidia() -> bool:
    """Check for NVIDIA's driver without asking torch."""
    if sys.platform == "win32":
        return (Path(os.environ.get("SYSTEMROOT", r"C:\Windows")) / "System32" / "nvcuda.dll").exists()
    return Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None


def _gpu_problem() -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a CPU build"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU or no driver"
    strangers = [gpu for gpu in _gpus() if not gpu.runnable]
    if strangers:
        return f"torch {torch.__version__} holds no code for {strangers[0].name} (sm_{strangers[0].sm})"
    return None
