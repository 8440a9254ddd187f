"""Benchmark of loading a VAE file, from disk until the VAE is ready on its device."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ...errors import ZeroWasteError
from ...loader import load
from ...system.memory import GIB
from .calls import figures_of, settle, synchronize
from .peers import said


def load_rows(files: Sequence[Path], precisions: Sequence[str], device: torch.device, runs: int,
              norm_groups: int | None = None) -> Iterator[dict[str, Any]]:
    """Measure loading each file in each precision.

    The first load may read the disk; later ones find the file in the system's cache.

    Returns: an iterator over rows (bench/schema.py). A file that cannot be loaded is a row that gives the reason.
    """
    for path in files:
        for precision in precisions:
            row = {"file": path.name, "file_gb": path.stat().st_size / GIB if path.exists() else 0.0,
                   "precision": precision, "skipped": None}
            times = []
            try:
                for _ in range(runs + 1):
                    settle(device)
                    began = time.perf_counter()
                    vae = load(path, precision=precision, device=device, norm_groups=norm_groups)
                    synchronize(device)
                    times.append(time.perf_counter() - began)
                    row["loaded_as"] = vae.precision
                    del vae
            except (ZeroWasteError, torch.OutOfMemoryError) as error:
                yield row | {"skipped": said(error)}
                continue
            yield row | figures_of(times)


def line(row: dict[str, Any]) -> str:
    """Format a row as text."""
    name = f"{row['file']:40} {row['file_gb']:8.3f} GB  {row['precision']:6}"
    if row["skipped"] is not None:
        return f"{name} did not load: {row['skipped']}"
    spread = f"({row['low_s']:.3f} to {row['high_s']:.3f})"
    return (f"{name} {row['median_s']:8.3f} s {spread}, first {row['first_s']:.3f} s, "
            f"{row['file_gb'] / row['median_s']:.2f} GB/s")
