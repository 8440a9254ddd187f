"""Alternatives on the same weights: torch alone, and ComfyUI's own VAE object.

The torch peers are our reference modules (engine/network/plain.py) without any kernel of ours, in the same
time-streaming and under the same memory target. ComfyUI runs in a process of its own (tools/comfy_peer.py), because the
engine never imports comfy and because its memory is its own then."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...errors import one_line
from ...system.hardware import no_window
from ...vae import VideoVAE

TOOL = Path(__file__).resolve().parents[3] / "tools" / "comfy_peer.py"
#: ComfyUI's ways of running, in this order; the flag is its own command line option.
COMFY = (("ComfyUI", ()), ("ComfyUI, fp16 accumulation", ("fp16_accumulation",)))
#: Ways in which each of them runs, and the suffix of its name.
WAYS = {"plain": "", "tiled": ", tiled"}
#: The stock tiled nodes' defaults, in pixels and in frames.
COMFY_TILE, COMFY_OVERLAP, COMFY_FRAMES, COMFY_FRAMES_OVERLAP = 512, 64, 64, 8
#: Parts of each component that VideoVAE calls (network/plain.py), which torch.compile compiles.
_PARTS = ("low", "between", "high")


def eager(vae: VideoVAE, half: str) -> VideoVAE:
    """Set a VAE to plain torch with its defaults."""
    vae.options = vae.options.switched(off=["triton_fusion"])
    return vae


def channels_last(vae: VideoVAE, half: str) -> VideoVAE:
    """Set a VAE to plain torch with its convolutions in torch.channels_last_3d."""
    vae.options = vae.options.switched(on=["channels_last_3d"], off=["triton_fusion"])
    return vae


def compiled(vae: VideoVAE, half: str) -> VideoVAE:
    """Set a VAE to plain torch with the component's three parts through torch.compile (default mode, fixed shapes)."""
    eager(vae, half)
    part = vae._plain.there(half, vae.device)
    for name in _PARTS:
        setattr(part, name, torch.compile(getattr(part, name), dynamic=False))
    return vae


#: Name of a row -> function that makes a loaded VAE run that way.
TORCH: dict[str, Callable[[VideoVAE, str], VideoVAE]] = {
    "torch eager": eager,
    "torch channels-last": channels_last,
    "torch.compile": compiled,
}


@contextmanager
def compiler() -> Iterator[Callable[[], str | None]]:
    """Turn a silent fallback to eager into an error during a compiled run, and drop the compiled code afterwards.

    Yields: a function that returns how many graphs were compiled, as text, or None if none was.
    """
    import torch._dynamo as dynamo
    from torch._dynamo.utils import counters

    strict = {name: True for name in ("fail_on_recompile_limit_hit",) if hasattr(dynamo.config, name)}
    dynamo.reset()
    counters.clear()

    def told() -> str | None:
        graphs = counters["stats"].get("unique_graphs", 0)
        breaks = sum(counters["graph_break"].values())
        return f"{graphs} compiled graphs, {breaks} graph breaks" if graphs else None

    try:
        with dynamo.config.patch(suppress_errors=False, **strict):
            yield told
    finally:
        dynamo.reset()


def comfy(folder: str, python: str | None, weights: Mapping[str, Tensor], inputs: Tensor, short: Tensor,
          about: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Tensor | None]]:
    """Measure ComfyUI's VAE object plain and tiled, without and with fp16 accumulation.

    Args:
        folder: a checkout of ComfyUI.
        python: its interpreter; None for this one.
        weights: tensors under the network's own keys.
        inputs: input of its decode or encode.
        short: beginning of `inputs`, whose result is returned.
        about: half ("decoder" or "encoder"), precision, device, runs, metadata (of the file), spatial and temporal
            (pixels and frames per latent).

    Returns: an iterator over (figures of a row, result or None).
    """
    names = [who + how for who, _ in COMFY for how in WAYS.values()]
    reason = _cannot(folder, about["precision"])
    if reason:
        yield from (({"who": name, "skipped": reason}, None) for name in names)
        return
    with tempfile.TemporaryDirectory(prefix="zerowaste-bench-") as place:
        base = Path(place)
        save_file({k: v.contiguous() for k, v in weights.items()}, base / "weights.safetensors")
        save_file({"input": inputs.contiguous()}, base / "input.safetensors")
        save_file({"input": short.contiguous()}, base / "short.safetensors")
        for who, fast in COMFY:
            if fast and not about["device"].startswith("cuda"):
                for how in WAYS.values():
                    yield {"who": who + how, "skipped": "fp16 accumulation needs a GPU"}, None
                continue
            job = {
                **about, "comfyui": str(folder), "fast": list(fast), "ways": list(WAYS), "tile": COMFY_TILE,
                "overlap": COMFY_OVERLAP, "frames": COMFY_FRAMES, "frames_overlap": COMFY_FRAMES_OVERLAP,
                **{name: str(base / f"{name}.safetensors") for name in ("weights", "input", "short")},
                "out": str(base / "out"),
            }  # fmt: skip
            answer = _run(python or sys.executable, job)
            for how, suffix in WAYS.items():
                figures = dict(answer.get(how) or {"skipped": answer.get("error", "no answer")})
                figures["who"] = who + suffix
                path = base / f"out-{how}.safetensors"
                result = load_file(path)["result"] if path.exists() else None
                path.unlink(missing_ok=True)
                yield figures, result


def _cannot(folder: str, precision: str) -> str | None:
    if not (Path(folder) / "comfy" / "sd.py").is_file():
        return f"{folder}: no ComfyUI there (comfy/sd.py is missing)"
    if precision not in ("fp32", "fp16", "bf16"):
        return f"ComfyUI's VAE has no {precision}"
    if not TOOL.is_file():
        return "tools/comfy_peer.py is not part of an installed package; run from the repository"
    return None


def _run(python: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the tool and return its answer, or {"error": one line}."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    try:
        command = [python, str(TOOL), json.dumps(job)]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", env=environment, creationflags=no_window()
        )
    except OSError as error:
        return {"error": f"{python}: {error.strerror}"}
    lines = done.stdout.strip().splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"ComfyUI's process ended with code {done.returncode}: {last}"}


def said(error: BaseException) -> str:
    """Return an error as one short line, for a row."""
    return f"{type(error).__name__}: {one_line(str(error).strip(), 200) or 'no message'}"
