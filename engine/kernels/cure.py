"""Advice for Triton on this machine: how it is installed, and what it lacks when it fails."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: torch -> the Triton of its own release, which triton-windows has to match (its maintainers ask to cap it).
PAIRS = {
    (2, 6): (3, 2), (2, 7): (3, 3), (2, 8): (3, 4), (2, 9): (3, 5), (2, 10): (3, 6), (2, 11): (3, 6), (2, 13): (3, 7),
}  # fmt: skip


def install(torch: str, platform: str = sys.platform) -> str:
    """Return the command that installs Triton for a torch ("2.11.0+cu130"); no version number where the pair is
    unknown."""
    if platform != "win32":
        return "pip install triton"
    numbers = torch.split(".")[:2]
    pair = PAIRS.get(tuple(map(int, numbers))) if len(numbers) == 2 and all(n.isdecimal() for n in numbers) else None
    return "pip install triton-windows" if pair is None else f'pip install "triton-windows<{pair[0]}.{pair[1] + 1}"'


def not_installed(platform: str = sys.platform) -> str:
    """Return the note that Triton is not installed, with the command to install it on this machine."""
    if platform != "win32":
        return "Triton is not installed"
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = ""
    return f"Triton is not installed ({install(torch, platform)})"


def cure(platform: str = sys.platform) -> str:
    """Return the advice for an installed Triton that fails, by what it lacks on this machine."""
    compiler = os.environ.get("CC")
    if compiler and shutil.which(compiler) is None:
        return f"CC names {compiler}, which is no program: let it name a C compiler, or unset it"
    return _on_windows(compiler) if platform == "win32" else _elsewhere(compiler)


def _on_windows(compiler: str | None) -> str:
    """Return the advice for triton-windows, which has a compiler and CUDA's files of its own and takes Python's headers
    from Python."""
    python = ".".join(map(str, sys.version_info[:3]))
    folders = [Path(sysconfig.get_paths()["include"]), Path(sys.base_prefix, "libs")]
    lacking = [str(folder) for folder in folders if not folder.is_dir()]
    if lacking:
        return (f"Triton needs {' and '.join(lacking)}, which an embedded Python lacks: copy the folders include and "
                f"libs of Python {python}, exactly this version, there")  # fmt: skip
    if compiler:
        return f"Triton compiles with CC={compiler}: unset it, triton-windows brings a compiler of its own"
    return f"triton-windows has to be of torch's own release: {install(version('torch'), 'win32')}"


def _elsewhere(compiler: str | None) -> str:
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # the scheme that Triton uses
    header = Path(sysconfig.get_paths(scheme=scheme)["include"], "Python.h")
    if not compiler and not any(map(shutil.which, ("gcc", "clang", "cl"))):
        return "There is no C compiler, which Triton needs: install gcc or clang"
    if not header.exists():
        version = ".".join(map(str, sys.version_info[:2]))
        return f"{header} is missing, which Triton needs: install the headers of Python {version} (python3-dev)"
    if compiler:
        return f"Triton compiles with CC={compiler}: see whether that is a working C compiler, or unset it"
    return "Another version of Triton or a newer driver may serve this GPU"
