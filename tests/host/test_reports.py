"""Nodes report their work as text, in the history for headless clients, and while they run."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from zerowaste_vae.engine.options import TOGGLES

pytestmark = pytest.mark.host


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def latent(comfy, *shape: int) -> dict:
    z = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    file = "reports-" + "-".join(map(str, shape)) + ".latent"
    save_file({"latent_tensor": z, "latent_format_version_0": torch.tensor([])}, comfy.base / "input" / file)
    return node("LoadLatent", latent=file)


def shown(source: str, slot: int = 1) -> dict:
    return node("PreviewAny", source=[source, slot])


@pytest.mark.parametrize("host", ["comfy", "old_comfy"])
def test_every_node_reports_as_text_and_in_the_history(host, request):
    comfy = request.getfixturevalue(host)
    prompt = {
        "clip": node("ZeroWasteVAEDemoClip", frames=3),
        "crop": node("ImageCrop", image=["clip", 0], width=50, height=40, x=0, y=0),
        "vae": node("ZeroWasteVAELoader", vae_name="tiny.safetensors"),
        "fast": node("ZeroWasteVAEOptimize", vae=["vae", 0], fp8=True, min_db=60.0),
        "encode": node("ZeroWasteVAEEncode", pixels=["crop", 0], vae=["fast", 0]),
        "decode": node("ZeroWasteVAEDecode", samples=["encode", 0], vae=["fast", 0], vram_gb=2.0),
        "save": node("ZeroWasteVAESave", vae=["fast", 0], filename_prefix=f"vae/{host}", type="gguf q8_0"),
    }
    ours = list(prompt)
    ours.remove("crop")
    prompt |= {f"{name} text": shown(name, 2 if name == "clip" else 1) for name in ours}
    comfy.free()  # of what it has in its cache from another prompt a host tells nothing
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    texts = {name: run.outputs[name]["text"][0] for name in ours}
    assert texts == {name: run.outputs[f"{name} text"]["text"][0] for name in ours}
    assert texts == {name: run.outputs[name]["zerowaste"][0]["text"] for name in ours}
    assert "3 frames of 288x176" in texts["clip"]
    assert texts["vae"].startswith("tiny.safetensors: seedvr2 in fp32 on cpu")
    assert "fp8: no CUDA device" in texts["fast"]
    assert "padded to 5 frames of 64x48" in texts["encode"]
    assert "cropped to 3 frames of 50x40" in texts["decode"]
    facts = run.outputs["decode"]["zerowaste"][0]
    assert facts["complete"]
    assert facts["clip"] == {"batch": 1, "frames": 5, "height": 48, "width": 64}
    assert facts["total_seconds"] == pytest.approx(sum(facts["seconds"].values()))
    assert facts["predicted_gb"] == facts["plan_facts"]["predicted_gb"]
    assert facts["plan_facts"]["model"] == "tiny.safetensors"
    assert facts["plan_facts"]["target_gb"] == 2
    assert {entry["name"] for entry in facts["off"]} >= {"fp8", "triton_fusion", "cuda_graphs"}


def test_the_plan_in_the_report_is_the_one_that_ran(comfy):
    z = latent(comfy, 1, 16, 3, 8, 12)
    tiles = {"tiling": "blended", "tiling.tile": 48, "tiling.overlap": 16}
    prompt = {
        "z": z,
        "vae": node("ZeroWasteVAELoader", vae_name="tiny.safetensors"),
        "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0], chunk=1, **tiles),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="plan"),
    }
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    plan = run.outputs["decode"]["zerowaste"][0]["plan_facts"]
    assert (plan["width"], plan["height"], plan["frames"]) == (96, 64, 9)
    assert (plan["tile_width"], plan["tile_height"]) == (48, 48)
    assert plan["columns"][0] == 0
    assert plan["columns"][-1] + 48 == 96
    assert plan["tiles"] == len(plan["columns"]) * len(plan["rows"]) > 1
    assert (plan["chunk_latents"], plan["chunks"]) == (1, 3)
    # A pass over the whole frame, then one per tile, of three chunks each.
    assert run.progress("decode")[-1] == ((plan["tiles"] + 1) * 3,) * 2


def test_stage_text_is_sent_while_a_node_runs(comfy):
    prompt = {
        "z": latent(comfy, 1, 16, 6, 16, 16),
        "vae": node("ZeroWasteVAELoader", vae_name="tiny.safetensors"),
        "fast": node("ZeroWasteVAEOptimize", vae=["vae", 0], chunk=1),
        "ours": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["fast", 0]),
        "stock": node("VAEDecode", samples=["z", 0], vae=["fast", 0]),
    }
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="stage") for n in ("ours", "stock")}
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    for name in ("ours", "stock"):
        lines = run.texts(name)
        # From the first second on, before there is a first chunk.
        assert lines[:2] == ["decode: making room and loading the weights", "decode: planning"]
        assert lines[2].startswith("decode: chunk 1 of 6, about")
        assert lines[-1].startswith("decode: done in ")


def test_previews_of_a_decode(comfy):
    """Frames are shown while a decode runs if previews are on."""
    prompt = {
        "z": latent(comfy, 1, 16, 5, 16, 24),
        "vae": node("ZeroWasteVAELoader", vae_name="tiny.safetensors"),
        "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0], chunk=1),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="shown"),
    }
    quiet = comfy.run(prompt)
    assert quiet.status == "success", quiet.error
    assert quiet.previews() == []
    prompt["decode"]["inputs"]["chunk"] = 2
    run = comfy.run(prompt, preview_method="auto")
    assert run.status == "success", run.error
    picture = Image.open(io.BytesIO(run.previews()[0]))
    assert picture.size == (512, 341)  # the host fits 192x128 into what it shows
    assert np.asarray(picture).std() > 20


def test_toggles_that_can_do_nothing_here_say_why(comfy):
    optional = comfy.get("/object_info/ZeroWasteVAEOptimize")["ZeroWasteVAEOptimize"]["input"]["optional"]
    toggles = {name: options for name, (kind, options) in optional.items() if kind == "BOOLEAN"}
    assert [name for name in toggles if name != "direct"] == list(TOGGLES)  # the third state of one of them
    for name in ("fp8", "triton_fusion", "cuda_graphs", "tf32", "async_offload"):
        reason = toggles[name]["zerowaste_off"]
        assert reason and reason in toggles[name]["tooltip"]
    assert "zerowaste_off" not in toggles["flash_attention"]
    assert toggles["tf32"]["advanced"]
    assert optional["ram_gb"][1]["advanced"]


def test_nodes_are_found_by_other_words(comfy):
    nodes = comfy.get("/object_info")
    aliases = {name: n.get("search_aliases") for name, n in nodes.items() if name.startswith("ZeroWaste")}
    assert len(aliases) == 11
    assert all(words and "zerowaste" in words for words in aliases.values())
    sought = {"oom", "out of memory", "vram", "memory", "tiled", "slow", "seedvr2", "wan", "qwen", "flux", "long video"}
    for name in ("ZeroWasteVAEDecode", "ZeroWasteVAEOptimize"):
        assert sought <= set(aliases[name])


def test_options_change_how_and_not_what(comfy):
    """Every toggle off: the same frames in fp32, and the report says what was switched off."""
    z, vae = latent(comfy, 1, 16, 2, 4, 6), node("ZeroWasteVAELoader", vae_name="tiny.safetensors")
    names = ["channels_last_3d", "triton_fusion", "composed_upsample"]
    names += ["cuda_graphs", "flash_attention", "async_offload"]
    prompt = {
        "z": z,
        "vae": vae,
        "plain vae": node("ZeroWasteVAEOptimize", vae=["vae", 0], **dict.fromkeys(names, False)),
        "loaded plain": node("ZeroWasteVAELoader", vae_name="tiny.safetensors", optimise=False),
        "fast": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0]),
        "plain": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["plain vae", 0]),
        "loader": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["loaded plain", 0]),
    }
    for name in ("fast", "plain", "loader"):
        prompt[f"save {name}"] = node("SaveImage", images=[name, 0], filename_prefix="options")
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    fast = comfy.images(run, "save fast").astype(int)
    assert abs(comfy.images(run, "save plain") - fast).max() <= 1
    assert abs(comfy.images(run, "save loader") - fast).max() <= 1
    off = {entry["name"]: entry["reason"] for entry in run.outputs["plain"]["zerowaste"][0]["off"]}
    assert all(off[name] == "switched off" for name in names)


def test_frames_come_in_the_type_asked_for(comfy):
    prompt = {
        "z": latent(comfy, 1, 16, 2, 4, 6),
        "vae": node("ZeroWasteVAELoader", vae_name="tiny.safetensors"),
        "half": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0], output="float16"),
        "full": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0], output="float32"),
    }
    prompt |= {f"save {n}": node("SaveImage", images=[n, 0], filename_prefix="type") for n in ("half", "full")}
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    full, half = (run.outputs[n]["zerowaste"][0]["plan_facts"]["result_gb"] for n in ("full", "half"))
    assert half == full / 2
    difference = abs(comfy.images(run, "save full").astype(int) - comfy.images(run, "save half"))
    assert difference.max() <= 1
    del prompt["full"], prompt["save full"]
    prompt["half"]["inputs"]["output"] = "uint8"
    assert comfy.run(prompt).status == "invalid"


def test_model_files_cannot_be_named_outside_the_model_folders(comfy):
    (comfy.base / "outside.safetensors").write_bytes((comfy.base / "models/vae/tiny.safetensors").read_bytes())
    for name in ("../../outside.safetensors", str(comfy.base / "outside.safetensors"), "demo (small)/../x", ""):
        prompt = {"vae": node("ZeroWasteVAELoader", vae_name=name), "show": shown("vae")}
        run = comfy.run(prompt)
        assert run.status == "invalid"
        assert "vae_name" in run.error
