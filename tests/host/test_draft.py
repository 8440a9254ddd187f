"""A draft by the tiny decoder of Wan's latents, and all frames played while a decode runs, in a real ComfyUI."""

from __future__ import annotations

import io

import numpy as np
import pytest
import running
import torch
from PIL import Image
from safetensors.torch import save_file
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families.taehv import ARCHITECTURE, SCALE, SHIFT, Config

pytestmark = pytest.mark.host


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


@pytest.fixture(scope="module")
def wan(comfy, host_places) -> str:
    """The name of a small Wan 2.1 VAE of the host's own class."""
    running.write_tiny_wan(host_places, comfy.base / "models" / "vae" / "wan.safetensors")
    z = torch.randn(1, 16, 3, 8, 12, generator=torch.Generator().manual_seed(0))
    save_file({"latent_tensor": z, "latent_format_version_0": torch.tensor([])}, comfy.base / "input" / "wan.latent")
    return "wan.safetensors"


@pytest.fixture
def taew(comfy):
    """The file of a small decoder of its latents, as such are published."""
    path = comfy.base / "models" / "vae_approx" / "taew2_1.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn = random_checkpoint(Config(None, (8, 8, 12, 16)), architecture=ARCHITECTURE).tensors
    save_file({n: t for n, t in drawn.items() if n not in (SCALE, SHIFT)}, path)
    yield path
    path.unlink()


def graph(wan: str, loader: str = "VAELoader", **widgets) -> dict:
    return {
        "z": node("LoadLatent", latent="wan.latent"),
        "vae": node(loader, vae_name=wan),
        "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0], **widgets),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="draft"),
    }


def test_a_draft_without_its_file_stops_in_one_line(comfy, wan):
    run = comfy.run(graph(wan, draft=True))
    assert run.status == "error"
    assert run.error.strip() == (
        "No draft: put taew2_1.safetensors into models/vae_approx (a tiny decoder of Wan 2.1's latents); switch Draft "
        "off for the VAE itself"
    )


@pytest.mark.parametrize("loader", ["VAELoader", "ZeroWasteVAELoader"])
def test_a_draft_of_either_loader(comfy, wan, taew, loader):
    prompts = graph(wan, loader, draft=True), graph(taew.name, "ZeroWasteVAELoader"), graph(wan, loader)
    runs = [comfy.run(prompt) for prompt in prompts]
    assert [run.status for run in runs] == ["success"] * 3, [run.error for run in runs]
    draft, tiny, full = (comfy.images(run, "save") for run in runs)
    assert draft.shape == (9, 64, 96, 3) and np.array_equal(draft, tiny)
    assert full.shape == draft.shape and not np.array_equal(full, draft)
    report, usual = (run.outputs["decode"]["zerowaste"][0] for run in (runs[0], runs[2]))
    assert report["plan_facts"]["draft"] == "TAEHV" and "draft by taew2_1.safetensors" in report["text"]
    assert "draft" not in usual["text"] and report["plan_facts"]["model"] == usual["plan_facts"]["model"]


def test_its_plan_before_the_run(comfy, wan, taew):
    comfy.get("/object_info/ZeroWasteVAELoader")  # lists the files
    query = f"model={wan}&width=96&height=64&frames=9"
    full, draft = (comfy.get(f"/zerowaste_vae/plan?{query}{more}") for more in ("", "&draft=1"))
    assert draft["draft"] == "TAEHV" and draft["model"] == wan and 0 < draft["predicted_gb"] < full["predicted_gb"]


def pictures(run) -> list[np.ndarray]:
    return [np.asarray(Image.open(io.BytesIO(shown))).astype(int) for shown in run.previews()]


def test_frames_are_played_while_a_clip_is_decoded(comfy, wan, taew):
    """From the first second on, whatever the decode has made by then; not without the user's wish."""
    quiet = comfy.run(graph(wan, vram_gb=1))
    assert quiet.status == "success" and quiet.previews() == []
    run = comfy.run(graph(wan, vram_gb=2), preview_method="auto")
    assert run.status == "success", run.error
    assert "preview of all frames by taew2_1.safetensors: " in run.outputs["decode"]["zerowaste"][0]["text"]
    assert "decode: preview of all frames" in run.texts("decode")
    tiny = comfy.run(graph(taew.name, "ZeroWasteVAELoader"))
    first = Image.fromarray(comfy.images(tiny, "save")[0]).resize((512, 341), Image.Resampling.BILINEAR)
    assert np.abs(pictures(run)[0] - np.asarray(first).astype(int)).mean() < 4  # JPEG
    bar = [done for done, _ in run.progress("decode")]
    assert bar == sorted(bar)  # pictures leave it where it is


def test_a_preview_that_fails_is_said_and_the_run_goes_on(comfy, wan, taew):
    whole = taew.read_bytes()
    comfy.get(f"/zerowaste_vae/plan?model={wan}&width=96&height=64&frames=9&draft=1")
    taew.write_bytes(whole[:-40])
    run = comfy.run(graph(wan, vram_gb=3), preview_method="auto")
    assert run.status == "success", run.error
    lines = run.outputs["decode"]["zerowaste"][0]["text"].splitlines()
    (line,) = (line for line in lines if "no preview of all frames: " in line)
    assert "frames: taew2_1.safetensors: " in line and str(comfy.base) not in line
    assert np.array_equal(comfy.images(run, "save"), comfy.images(comfy.run(graph(wan, vram_gb=4)), "save"))
