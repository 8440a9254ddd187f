"""Time ComfyUI's own VAE object on given weights and input; `zerowaste-vae bench` starts this in a process of its own.

    python tools/comfy_peer.py '{"comfyui": "/path/to/ComfyUI", "half": "decoder", ...}'

The job is one JSON object (engine/extras/bench/peers.py writes it); the answer is one JSON line on stdout with the
figures of engine/extras/bench/calls.py for "plain" and "tiled", or "error". Results: OUT-plain.safetensors and
OUT-tiled.safetensors.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

CALLS = Path(__file__).resolve().parent.parent / "engine" / "extras" / "bench" / "calls.py"


def main() -> int:
    job = json.loads(sys.argv[1])
    try:
        answer = measure(job)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    print(json.dumps(answer))
    return 0


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Time the ways of running that the job names; for a way that fails return the reason, and go on with the other."""
    start_comfy(job)
    import comfy.sd
    import torch
    from safetensors.torch import load_file

    calls = load_calls()
    device = torch.device(job["device"])
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[job["precision"]]
    vae = comfy.sd.VAE(sd=load_file(job["weights"]), dtype=dtype, metadata=job["metadata"])
    vae.throw_exception_if_invalid()
    inputs, short = (load_file(job[name])["input"] for name in ("input", "short"))
    answer = {}
    for how in job["ways"]:
        try:
            answer[how] = run(vae, how, inputs, short, job, device, calls)
        except Exception as error:
            answer[how] = {"skipped": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return answer


def start_comfy(job: dict[str, Any]) -> None:
    """Import ComfyUI with the options a user would start it with; it reads them from the command line at import."""
    sys.path.insert(0, job["comfyui"])
    cpu = ["--cpu"] if job["device"] == "cpu" else []
    fast = ["--fast", *job["fast"]] if job["fast"] else []
    sys.argv = ["main.py", *cpu, *fast]
    import comfy.options

    comfy.options.enable_args_parsing()


def load_calls() -> ModuleType:
    """Load the package's own timing code by its path: the package itself need not be importable here."""
    spec = importlib.util.spec_from_file_location("calls", CALLS)
    module = importlib.util.module_from_spec(spec)
    sys.modules["calls"] = module
    spec.loader.exec_module(module)
    return module


def run(
    vae: Any, how: str, inputs: Any, short: Any, job: dict[str, Any], device: Any, calls: ModuleType
) -> dict[str, Any]:
    """Time one way, and store its result for the short input: frames [B, F, H, W, 3] or a latent [B, C, T, h, w], both
    without time where the VAE has none."""
    import torch
    from safetensors.torch import save_file

    # Out of memory makes the plain calls retry in small tiles with a line in the log; that is no plain run.
    retried = []
    for name in ("_decode_tiled_owned", "_encode_tiled_owned", "decode_tiled_3d", "encode_tiled_3d"):
        watch(vae, name, retried)
    call = getattr(vae, ("decode" if job["half"] == "decoder" else "encode") + ("" if how == "plain" else "_tiled"))
    options = {} if how == "plain" else tiling(job)
    with torch.inference_mode():
        figures, result = calls.time_calls(lambda: call(inputs, **options), job["runs"], device)
        if short.shape != inputs.shape:
            result = None
            result = call(short, **options)
    if how == "plain" and retried:
        raise RuntimeError("out of memory, ComfyUI went on in tiles of 256; see the tiled row")
    save_file({"result": result.float().cpu().contiguous()}, f"{job['out']}-{how}.safetensors")
    ways = f"tiles of {job['tile']} sharing {job['overlap']}" if how == "tiled" else "untiled"
    kind = str(vae.vae_dtype).removeprefix("torch.")
    fast = "".join(f", --fast {name}" for name in job["fast"])
    return {**figures, "ran": f"ComfyUI {version()}'s VAE object, {kind}, {ways}{fast}", "skipped": None}


def tiling(job: dict[str, Any]) -> dict[str, int]:
    """Return the options of the tiled calls: latent pixels and latents to decode, pixels and frames to encode."""
    spatial, temporal = (job["spatial"], job["temporal"]) if job["half"] == "decoder" else (1, 1)
    tile, overlap = job["tile"] // spatial, job["overlap"] // spatial
    options = {"tile_x": tile, "tile_y": tile, "overlap": overlap}
    if job["temporal"] > 1:  # the nodes pass no sizes in time to VAEs of pictures
        frames = max(2, job["frames"] // temporal)
        options |= {"tile_t": frames, "overlap_t": max(1, min(frames // 2, job["frames_overlap"] // temporal))}
    return options


def watch(vae: Any, name: str, seen: list[str]) -> None:
    """Record every call of a method of this one object."""
    method = getattr(vae, name, None)
    if method is None:
        return

    def noting(*args: Any, **options: Any) -> Any:
        seen.append(name)
        return method(*args, **options)

    setattr(vae, name, noting)


def version() -> str:
    try:
        import comfyui_version
    except ImportError:
        return "of unknown version"
    return comfyui_version.__version__


if __name__ == "__main__":
    sys.exit(main())
