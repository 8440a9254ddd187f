"""Measure decodes beside a model that stays on its card, in a real ComfyUI on a GPU whose other memory is held here.

    python tools/measure_beside.py OUT.json --cases wan2.1 flux --servers dynamic
    python tools/measure_beside.py OUT.json --cases wan2.1 seedvr2 --servers dynamic --frames 5 21 81 --passes keep
    python tools/measure_beside.py OLD.json --pack OTHER_CHECKOUT, then OUT.json --than OLD.json

It needs what the tests in tests/host need (COMFYUI_DIR, COMFY_VENV), a GPU alone, and the pack as zerowaste_vae. The
VAEs have random weights of published sizes, the model any. Each case is a workflow: the model runs, a latent is
decoded, the model runs again. A line for each way to decode has the seconds of the decode with making room, of it those
of the run alone, those of the model's run behind it, the sum of decode and that, those of the model's run before it,
and the GB of the model that were on the card before and after the decode. Of our runs the first does not count, and of
the others the one with the lowest sum does; ComfyUI's own decode runs once, since what counts is only what it leaves of
the model.

All cases pass under what Keep models says, then under ComfyUI's own decode, then without the model under as much memory
as `auto` stated. Each line is printed, and OUT.json written, as soon as it is known: a run that is stopped loses
nothing. What must hold follows each case. Clips of several lengths show from which on moving the model pays (`crossing`
in engine/extras/residents/keeping.py computes it).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.extras.bench.subject import noise_latent, random_checkpoint
from zerowaste_vae.engine.extras.residents import link
from zerowaste_vae.engine.families import by_name

HOST = Path(__file__).resolve().parent.parent / "tests" / "host"
sys.path.insert(0, str(HOST))

import running  # noqa: E402

GIB = 1 << 30
#: What tells two plans apart.
PLAN = ("mode", "tile_width", "tile_height", "chunk_latents", "passes", "waiting_gb", "band_rows", "predicted_gb")
#: GB that ComfyUI keeps free on Linux.
RESERVED = 0.4
#: Family -> frames, width and height, and precision of the decode.
CASES = {
    "wan2.1": (33, 1280, 720, "auto"), "flux": (1, 2048, 2048, "auto"), "seedvr2": (21, 1280, 720, "auto"),
    "ltx-diffusion": (121, 1280, 704, "auto"), "minimaxh3": (90, 1280, 720, "int8"),
}  # fmt: skip
SERVERS = {
    "dynamic": (), "plain": ("--disable-dynamic-vram",), "pageable": ("--disable-pinned-memory",),
}  # fmt: skip
#: ComfyUI's own decode; ours by what Keep models says, of another checkout, and without the model.
STOCK, KEEP, OTHER, ALONE = "ComfyUI", ("always", "never", "auto"), "as it is", "alone"
PASSES = {"keep": KEEP, "stock": (STOCK,), "alone": (ALONE,)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="JSON of all figures")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--frames", nargs="+", type=int, metavar="N", help="of each case, in place of its own")
    parser.add_argument("--servers", nargs="+", default=list(SERVERS)[:2], choices=SERVERS)
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    parser.add_argument("--runs", type=int, default=3, help="of each of our ways, with the one that does not count")
    parser.add_argument("--card-gb", type=float, default=16.0, help="memory of the card that is left to ComfyUI")
    parser.add_argument("--model-gb", type=int, default=12)
    parser.add_argument("--pack", type=Path, help="another checkout, which decodes as it does")
    parser.add_argument("--than", type=Path, metavar="OLD.json", help="of --pack: what the next run begins sooner than")
    asked = parser.parse_args()
    passes = [(OTHER,)] if asked.pack else [PASSES[name] for name in asked.passes]
    old = json.loads(asked.than.read_text()) if asked.than else {}
    speeds = link.measured(torch.device("cuda", 0))
    print(f"the link: {speeds.pinned / 1e9:.1f} GB/s page-locked, {speeds.pageable / 1e9:.1f} else", flush=True)
    results: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "card_gb": asked.card_gb, "link": vars(speeds)}
    with tempfile.TemporaryDirectory() as folder:
        lengths = {case: asked.frames or CASES[case][:1] for case in asked.cases}
        files = {case: written(Path(folder), case, frames) for case, frames in lengths.items()}
        torch.cuda.empty_cache()
        ballast = torch.empty(max(0, free() - int(asked.card_gb * GIB)), dtype=torch.uint8, device="cuda")
        for name in asked.servers:
            base, pack = Path(folder) / name, (asked.pack or HOST.parent.parent).resolve()
            speed = speeds.pageable if name == "pageable" else speeds.pinned
            with running.serving(base, running.newest(), pack, [HOST / "heavy_pack"], SERVERS[name]) as comfy:
                for weights, latents in files.values():
                    (base / "models" / "vae" / weights.name).symlink_to(weights)
                    for latent in latents:  # ComfyUI refuses inputs that links name outside its folder
                        shutil.copy(latent, base / "input" / latent.name)
                every = [(case, latent) for case, (_, latents) in files.items() for latent in latents]
                for ways, (case, latent) in itertools.product(passes, every):
                    print(f"{name}, {latent.stem}:", flush=True)
                    found = results.setdefault(name, {}).setdefault(latent.stem, {})
                    for way in ways:
                        found[way] = measured(comfy, asked, case, latent, way, found)
                        print(line(way, found[way]), flush=True)
                        asked.out.write_text(json.dumps(results, indent=1))
                    before = found | old.get(name, {}).get(latent.stem, {})
                    for text in told(before, ways, asked.card_gb, asked.model_gb, speed):
                        print(text, flush=True)
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


def measured(
    comfy: running.Comfy, asked: argparse.Namespace, case: str, latent: Path, way: str, found: dict[str, dict[str, Any]]
) -> dict[str, Any]:  # fmt: skip
    """Return the figures of the best run that counts, or the error of the first that failed."""
    ours, gib = way != STOCK, 0 if way == ALONE else asked.model_gb
    vae, decode = {"vae_name": f"{case}.safetensors"}, {"samples": ["first", 0], "vae": ["vae", 0]}
    vae |= {"precision": CASES[case][3]} if ours else {}
    decode |= {"keep_models": way} if way in KEEP else {}
    if way == ALONE:
        if "peak" not in found.get("auto", {}):
            return {"error": "not known how much memory `auto` takes"}
        decode["vram_gb"] = math.ceil(1000 * found["auto"]["peak"]) / 1000
    prompt = {
        "z": node("LoadLatent", latent=latent.name),
        "vae": node("ZeroWasteVAELoader" if ours else "VAELoader", **vae),
        "first": node("TestStep", gib=gib, samples=["z", 0]),
        "decode": node("ZeroWasteVAEDecode" if ours else "VAEDecode", **decode),
        "last": node("TestStep", gib=gib, images=["decode", 0]),
    }
    runs = []
    for _ in range(asked.runs if ours else 1):
        run = comfy.run(prompt, timeout=240)
        if run.status != "success":
            return {"error": run.error or run.status}
        runs.append(figures(run))
    return min(runs[1:] or runs, key=lambda made: made["whole"])


def figures(run: running.Run) -> dict[str, Any]:
    """Return seconds and GB of a run."""
    first, last = (json.loads(run.outputs[name]["text"][0]) for name in ("first", "last"))
    made = {"decode": last["began"] - first["ended"], "next": last["ended"] - last["began"]}
    made |= {"again": first["ended"] - first["began"], "had": first["after"] / GIB, "kept": last["before"] / GIB}
    if shown := run.outputs.get("decode", {}).get("zerowaste"):
        report, facts = shown[0], shown[0]["plan_facts"]
        made |= {"peak": facts["predicted_gb"], "run": report["seconds"]["decode"], "load": report["load_seconds"]}
        made |= {"notes": report["notes"], "events": report["events"], "plan": facts}
    return made | {"whole": made["decode"] + made["next"]}


def node(kind: str, **inputs: object) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def line(way: str, made: dict[str, Any]) -> str:
    """Return a way's figures in words."""
    if "error" in made:
        return f"  {way:<10} {made['error'][:300]}"
    seconds = ", ".join(f"{name} {made[name]:.2f} s" for name in ("decode", "run", "next", "whole", "again")
                        if name in made)  # fmt: skip
    parts = [f"{seconds}; {made['had']:.1f} GB of the model before, {made['kept']:.1f} after", *made.get("notes", ())]
    parts += [f"stated {made['peak']:.2f} GB"] if "peak" in made else []
    return f"  {way:<10} " + "; ".join(parts + [f"{name} {n}" for name, n in made.get("events", {}).items() if n])


def told(
    found: dict[str, dict[str, Any]], ways: Sequence[str], card: float, model: float, speed: float
) -> list[str]:  # fmt: skip
    """Return lines that say whether what must hold of these ways does. speed: at which the model comes back, in bytes
    per second."""
    good, lines = {way: made for way, made in found.items() if "error" not in made}, []
    if set(KEEP) <= good.keys() and ways == KEEP:
        kept, least = good["always"]["kept"], min(model, card - RESERVED - good["always"]["peak"])
        lines.append(f"  {verdict(kept >= 0.9 * least)}: always keeps {kept:.1f} of at most {least:.1f} GB")
        best = min(good[way]["whole"] for way in ("always", "never"))
        share = good["auto"]["whole"] / best - 1
        lines.append(f"  {verdict(share <= 0.05)}: auto takes {100 * share:+.1f} % of the better of always and never")
        lines += sooner(good["auto"], good[OTHER], "that of the other checkout", 0.8, speed) if OTHER in good else []
    if ways == (STOCK,) and good.keys() >= {STOCK, "auto"}:
        lines += sooner(good["auto"], good[STOCK], f"{STOCK}'s decode", 1.0, speed)
    if ways == (ALONE,) and good.keys() >= {ALONE, "auto"}:
        share = good["auto"]["run"] / good[ALONE]["run"] - 1
        same = all(good["auto"]["plan"].get(fact) == good[ALONE]["plan"].get(fact) for fact in PLAN)
        what = f"{'the same' if same else 'another'} plan's without the model"
        lines.append(f"  {verdict(share <= 0.05)}: auto's run takes {100 * share:+.1f} % of {what}")
    return lines


def sooner(ours: dict[str, Any], theirs: dict[str, Any], name: str, part: float, speed: float) -> list[str]:
    """Return a line on the seconds that the next run of the model is sooner done than behind another decode: at least
    `part` of the way back of what only that one has moved out."""
    gain, least = theirs["next"] - ours["next"], part * max(0.0, ours["kept"] - theirs["kept"]) * GIB / speed
    text = f"the next run of the model is done {gain:.2f} s sooner than behind {name}, at least {least:.2f} asked"
    return [f"  {verdict(gain >= least)}: {text}"]


def verdict(holds: bool) -> str:
    return "holds" if holds else "FAILS"


if __name__ == "__main__":
    sys.exit(main())
