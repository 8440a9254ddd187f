"""Measure decodes beside a model that stays on its card, in a real ComfyUI on a GPU whose other memory is held here.

    python tools/measure_beside.py OUT.json --cases wan2.1 flux --servers dynamic
    python tools/measure_beside.py OUT.json --cases wan2.1 seedvr2 --servers dynamic --frames 5 21 81
    python tools/measure_beside.py OLD.json --pack OTHER_CHECKOUT

It needs what the tests in tests/host need (COMFYUI_DIR, COMFY_VENV), a GPU alone, and the pack as zerowaste_vae. The
VAEs have random weights of published sizes, the model any. Each case is a workflow (the model runs, a latent is
decoded, the model runs again) that is run twice; the second run counts. A line for each way to decode has the seconds
of the decode with making room, those of the model's run behind it, the sum of both, those of the model's run before it,
and the GB of the model that were on the card before and after the decode. What must hold follows each case. Clips of
several lengths show from which on moving the model pays (`crossing` in engine/planning/keeping.py computes it).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.archs import by_name
from zerowaste_vae.engine.bench.subject import noise_latent, random_checkpoint

HOST = Path(__file__).resolve().parent.parent / "tests" / "host"
sys.path.insert(0, str(HOST))

import running  # noqa: E402

GIB = 1 << 30
#: Family -> frames, width and height, and precision of the decode.
CASES = {
    "minimaxh3": (90, 1280, 720, "int8"), "seedvr2": (21, 1280, 720, "auto"), "wan2.1": (33, 1280, 720, "auto"),
    "ltx-diffusion": (121, 1280, 704, "auto"), "flux": (1, 2048, 2048, "auto"),
}  # fmt: skip
SERVERS = {"dynamic": (), "plain": ("--disable-dynamic-vram",)}
#: ComfyUI's own decode, and ours by what Keep models says.
STOCK, KEEP = "ComfyUI", ("never", "always", "auto")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="JSON of all figures")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--frames", nargs="+", type=int, metavar="N", help="of each case, in place of its own")
    parser.add_argument("--servers", nargs="+", default=list(SERVERS), choices=SERVERS)
    parser.add_argument("--card-gb", type=float, default=16.0, help="memory of the card that is left to ComfyUI")
    parser.add_argument("--model-gb", type=int, default=12)
    parser.add_argument("--pack", type=Path, help="another checkout, which decodes as it does")
    asked = parser.parse_args()
    ways = (STOCK, *(("as it is",) if asked.pack else KEEP))
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "card_gb": asked.card_gb}
    with tempfile.TemporaryDirectory() as folder:
        lengths = {case: asked.frames or CASES[case][:1] for case in asked.cases}
        files = {case: written(Path(folder), case, frames) for case, frames in lengths.items()}
        torch.cuda.empty_cache()
        ballast = torch.empty(max(0, free() - int(asked.card_gb * GIB)), dtype=torch.uint8, device="cuda")
        for name in asked.servers:
            base, pack = Path(folder) / name, (asked.pack or HOST.parent.parent).resolve()
            with running.serving(base, running.newest(), pack, [HOST / "heavy_pack"], SERVERS[name]) as comfy:
                for case, (weights, latents) in files.items():
                    (base / "models" / "vae" / weights.name).symlink_to(weights)
                    for latent in latents:
                        (base / "input" / latent.name).symlink_to(latent)
                        found = {way: measured(comfy, asked.model_gb, case, weights, latent, way) for way in ways}
                        results.setdefault(name, {})[latent.stem] = found
                        lines = [f"{name}, {latent.stem}:", *told(found, asked.card_gb, asked.model_gb)]
                        print("\n".join(lines), flush=True)
                        asked.out.write_text(json.dumps(results, indent=1))
        del ballast
    return 0


def free() -> int:
    return torch.cuda.mem_get_info()[0]


def written(folder: Path, case: str, lengths: Sequence[int]) -> tuple[Path, list[Path]]:
    """Write a family's random weights and latents of so many frames; return their files."""
    _, width, height, _ = CASES[case]
    family, weights, latents = by_name(case), folder / f"{case}.safetensors", []
    checkpoint = random_checkpoint(architecture=family, device=torch.device("cuda"))
    save_file({name: t.cpu() for name, t in checkpoint.tensors.items()}, weights, checkpoint.metadata)
    s, channels = family.spatial * family.side, family.published.config.latent_channels * family.side**2
    for frames in lengths:
        z = noise_latent(channels, family.latents(frames), height // s, width // s)
        content = {"latent_tensor": z[:, :, 0] if family.still else z, "latent_format_version_0": torch.tensor([])}
        latents.append(folder / f"{case} of {frames}.latent")
        save_file(content, latents[-1])
    return weights, latents


def measured(comfy: running.Comfy, gib: int, case: str, weights: Path, latent: Path, way: str) -> dict[str, Any]:
    """Return the figures of the second of two runs, or its error."""
    vae, decode = {"vae_name": weights.name}, {"samples": ["first", 0], "vae": ["vae", 0]}
    ours = way != STOCK
    vae |= {"precision": CASES[case][3]} if ours else {}
    decode |= {"keep_models": way} if way in KEEP else {}
    prompt = {
        "z": node("LoadLatent", latent=latent.name),
        "vae": node("ZeroWasteVAELoader" if ours else "VAELoader", **vae),
        "first": node("TestStep", gib=gib, samples=["z", 0]),
        "decode": node("ZeroWasteVAEDecode" if ours else "VAEDecode", **decode),
        "last": node("TestStep", gib=gib, images=["decode", 0]),
    }
    for _ in range(2):
        run = comfy.run(prompt, timeout=240)
        if run.status != "success":
            return {"error": run.error or run.status}
    first, last = (json.loads(run.outputs[name]["text"][0]) for name in ("first", "last"))
    made = {"decode": last["began"] - first["ended"], "next": last["ended"] - last["began"]}
    made |= {"again": first["ended"] - first["began"], "had": first["after"] / GIB, "kept": last["before"] / GIB}
    if ours:
        report = run.outputs["decode"]["zerowaste"][0]
        made |= {"peak": report["plan_facts"]["predicted_gb"], "notes": report["notes"], "events": report["events"]}
    return made | {"whole": made["decode"] + made["next"]}


def node(kind: str, **inputs: object) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def told(found: dict[str, dict[str, Any]], card: float, model: float) -> list[str]:
    """Return lines of a case's figures, and whether what must hold does."""
    lines = []
    for way, made in found.items():
        if "error" in made:
            lines.append(f"  {way:<10} {made['error'][:150]}")
            continue
        seconds = ", ".join(f"{name} {made[name]:.2f} s" for name in ("decode", "next", "whole", "again"))
        lines.append(f"  {way:<10} {seconds}; {made['had']:.1f} GB of the model before, {made['kept']:.1f} after; "
                     + "; ".join(made.get("notes", ())))  # fmt: skip
    if any("error" in found.get(way, {"error": ""}) for way in KEEP):
        return lines
    kept, least = found["always"]["kept"], min(model, card - 0.5 - found["always"]["peak"])
    lines.append(f"  {verdict(kept >= 0.9 * least)}: always keeps {kept:.1f} of at most {least:.1f} GB")
    best = min(found[way]["whole"] for way in ("always", "never"))
    share = found["auto"]["whole"] / best - 1
    lines.append(f"  {verdict(share <= 0.05)}: auto takes {100 * share:+.1f} % of the better of always and never")
    if "error" not in found[STOCK]:
        gain = found[STOCK]["next"] - found["auto"]["next"]
        lines.append(f"  the next run of the model begins {gain:.2f} s sooner than behind {STOCK}'s decode")
    return lines


def verdict(holds: bool) -> str:
    return "holds" if holds else "FAILS"


if __name__ == "__main__":
    sys.exit(main())
