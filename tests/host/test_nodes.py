"""The pack in a real ComfyUI: what its nodes do, alone and together with the host's own."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.host

OURS = {"Loader", "Optimize", "Encode", "Decode", "Save", "DemoClip"}


def loader(name: str = "tiny.safetensors", **widgets) -> dict:
    return {"class_type": "ZeroWasteVAELoader", "inputs": {"vae_name": name, **widgets}}


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def save(source: str) -> dict:
    return node("SaveImage", images=[source, 0], filename_prefix="test")


def clip() -> dict:
    """Nodes 'video' and 'clip': nine frames of 64x48."""
    return {"video": node("LoadVideo", file="clip.mp4"), "clip": node("GetVideoComponents", video=["video", 0])}


def latents(comfy, *shape: int) -> dict:
    """Seeded latents through the host's LoadLatent."""
    file = "-".join(map(str, shape)) + ".latent"
    z = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    save_file({"latent_tensor": z, "latent_format_version_0": torch.tensor([])}, comfy.base / "input" / file)
    return node("LoadLatent", latent=file)


def difference(a: np.ndarray, b: np.ndarray) -> int:
    assert a.shape == b.shape
    return int(np.abs(a.astype(int) - b.astype(int)).max())


def test_all_nodes_are_offered_with_the_files_of_models_vae(comfy):
    nodes = comfy.get("/object_info")
    assert {f"ZeroWasteVAE{name}" for name in OURS} <= nodes.keys()
    ours = nodes["ZeroWasteVAELoader"]["input"]["required"]["vae_name"]
    options = ours[1]["options"] if ours[0] == "COMBO" else ours[0]
    ours = ["tiny.gguf", "tiny.safetensors", "demo (small)", "not_a_vae.safetensors"]
    assert [name for name in options if name in ours] == ours
    assert "tiny.gguf" not in json.dumps(nodes["VAELoader"])


def test_help_pages_are_served(comfy):
    for name in OURS:
        page = comfy.text(f"/extensions/ComfyUI-ZeroWasteVAE/docs/ZeroWasteVAE{name}.md")
        assert page.startswith("# Zero-Waste")


@pytest.mark.parametrize("file", ["tiny.safetensors", "tiny.gguf"])
def test_load_encode_decode_save(comfy, file):
    run = comfy.run(
        {
            **clip(),
            "vae": loader(file),
            "encode": node("ZeroWasteVAEEncode", pixels=["clip", 0], vae=["vae", 0]),
            "decode": node("ZeroWasteVAEDecode", samples=["encode", 0], vae=["vae", 0]),
            "stock": node("VAEDecode", samples=["encode", 0], vae=["vae", 0]),
            "report": node("PreviewAny", source=["decode", 1]),
            "save": save("decode"),
            "save stock": save("stock"),
        }
    )
    assert run.status == "success", run.error
    frames = comfy.images(run, "save")
    assert frames.shape == (9, 48, 64, 3)
    assert frames.std() > 20
    assert difference(frames, comfy.images(run, "save stock")) <= 1
    assert "decode 9 frames of 64x48" in run.outputs["report"]["text"][0]
    assert run.progress("decode")[-1][0] == run.progress("decode")[-1][1]


def test_stock_nodes_agree(comfy):
    """VAEEncode, VAEEncodeTiled, VAEDecode, VAEDecodeTiled: tiles are exact, so all four pairs give equal frames."""
    prompt = {**clip(), "vae": loader()}
    prompt["encode"] = node("VAEEncode", pixels=["clip", 0], vae=["vae", 0])
    tiles = {"tile_size": 64, "overlap": 0, "temporal_size": 8, "temporal_overlap": 4}
    prompt["encode tiled"] = node("VAEEncodeTiled", pixels=["clip", 0], vae=["vae", 0], **tiles)
    for source in ("encode", "encode tiled"):
        prompt[f"decode {source}"] = node("VAEDecode", samples=[source, 0], vae=["vae", 0])
        prompt[f"tiled {source}"] = node("VAEDecodeTiled", samples=[source, 0], vae=["vae", 0], **tiles)
        prompt[f"save decode {source}"] = save(f"decode {source}")
        prompt[f"save tiled {source}"] = save(f"tiled {source}")
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    frames = [comfy.images(run, name) for name in prompt if name.startswith("save")]
    assert len(frames) == 4
    assert all(difference(frames[0], other) <= 1 for other in frames[1:])


def test_collapsed_latents_equal_five_dimensional_ones(comfy):
    z = torch.randn(1, 16, 3, 4, 6, generator=torch.Generator().manual_seed(2))
    for name, tensor in (("five", z), ("four", z.reshape(1, 48, 4, 6))):
        content = {"latent_tensor": tensor.contiguous(), "latent_format_version_0": torch.tensor([])}
        save_file(content, comfy.base / "input" / f"{name}.latent")
    prompt = {"vae": loader()}
    for name in ("five", "four"):
        prompt[name] = node("LoadLatent", latent=f"{name}.latent")
        prompt[f"decode {name}"] = node("ZeroWasteVAEDecode", samples=[name, 0], vae=["vae", 0])
        prompt[f"save {name}"] = save(f"decode {name}")
        prompt[f"stock {name}"] = node("VAEDecode", samples=[name, 0], vae=["vae", 0])
        prompt[f"save stock {name}"] = save(f"stock {name}")
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    frames = [comfy.images(run, name) for name in prompt if name.startswith("save")]
    assert frames[0].shape == (9, 32, 48, 3)
    assert all(np.array_equal(frames[0], other) for other in frames[1:])


def test_odd_clips_are_padded_and_cropped_back(comfy):
    """Six frames of 50x45 become 9 frames of 64x48 for the network and come back as six of 50x45."""
    prompt = {
        **clip(),
        "cut": node("ImageFromBatch", image=["clip", 0], batch_index=0, length=6),
        "crop": node("ImageCrop", image=["cut", 0], width=50, height=45, x=0, y=0),
        "vae": loader(),
        "encode": node("ZeroWasteVAEEncode", pixels=["crop", 0], vae=["vae", 0]),
        "decode": node("ZeroWasteVAEDecode", samples=["encode", 0], vae=["vae", 0]),
        "stock": node("VAEDecode", samples=["encode", 0], vae=["vae", 0]),
        "save": save("decode"),
        "save stock": save("stock"),
        "report": node("PreviewAny", source=["decode", 1]),
    }
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    assert "cropped to 6 frames of 50x45" in run.outputs["report"]["text"][0]
    frames, padded = comfy.images(run, "save"), comfy.images(run, "save stock")
    assert padded.shape == (9, 48, 64, 3)
    assert np.array_equal(frames, padded[:6, :45, :50])


def test_saved_vae_holds_the_weights_of_the_file(comfy):
    prompt = {"vae": loader("tiny.gguf"), "save": node("VAESave", vae=["vae", 0], filename_prefix="vae/tiny")}
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    saved = load_file(next((comfy.base / "output" / "vae").glob("tiny*.safetensors")))
    source = load_file(comfy.base / "models" / "vae" / "tiny.safetensors")
    assert saved.keys() == source.keys()
    assert all(torch.equal(saved[key].half(), source[key]) for key in source)


def test_optimize_leaves_its_input_alone(comfy):
    """bf16 on the optimised VAE changes its frames and not those of the VAE that went in, decoded before or after."""
    prompt = {
        "z": latents(comfy, 1, 16, 2, 4, 4),
        "vae": loader(),
        "before": node("VAEDecode", samples=["z", 0], vae=["vae", 0]),
        "optimize": node("ZeroWasteVAEOptimize", vae=["vae", 0], precision="bf16", chunk=1),
        "report": node("PreviewAny", source=["optimize", 1]),
        "bf16": node("VAEDecode", samples=["z", 0], vae=["optimize", 0]),
        "save before": save("before"),
        "save bf16": save("bf16"),
    }
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    before, bf16 = comfy.images(run, "save before"), comfy.images(run, "save bf16")
    assert 0 < difference(before, bf16) < 16
    assert "bf16" in run.outputs["report"]["text"][0]
    again = {"z": prompt["z"], "vae": prompt["vae"], "optimize": prompt["optimize"]}
    again["after"] = node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0])
    again["save"] = save("after")
    assert np.array_equal(comfy.images(comfy.run(again), "save"), before)


def test_optimize_passes_an_unknown_vae_on_and_says_so(comfy):
    prompt = {
        "vae": node("VAELoader", vae_name="pixel_space"),
        "optimize": node("ZeroWasteVAEOptimize", vae=["vae", 0]),
        "report": node("PreviewAny", source=["optimize", 1]),
    }
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    assert "passed on unchanged" in run.outputs["report"]["text"][0]


def test_cached_rerun_and_changed_widget(comfy):
    prompt = {
        "z": latents(comfy, 1, 16, 2, 6, 5),
        "vae": loader(),
        "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0]),
        "save": save("decode"),
    }
    first = comfy.run(prompt)
    assert first.status == "success", first.error
    again = comfy.run(prompt)
    assert {"z", "vae", "decode"} <= again.cached()
    prompt["decode"]["inputs"].update({"tiling": "blended", "tiling.tile": 32, "tiling.overlap": 16})
    prompt["decode"]["inputs"].update({"tile": 32, "overlap": 16})
    changed = comfy.run(prompt)
    assert changed.status == "success", changed.error
    assert {"z", "vae"} <= changed.cached()
    assert "decode" in changed.executed()
    assert difference(comfy.images(first, "save"), comfy.images(changed, "save")) > 0


def test_decodes_alike_after_the_host_freed_everything(comfy):
    prompt = {
        "z": latents(comfy, 1, 16, 2, 5, 6),
        "vae": loader(),
        "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0]),
        "save": save("decode"),
    }
    before = comfy.images(comfy.run(prompt), "save")
    comfy.free()
    after = comfy.run(prompt)
    assert "vae" in after.executed()
    assert np.array_equal(before, comfy.images(after, "save"))


def test_replaced_file_is_loaded_anew(comfy):
    path = comfy.base / "models" / "vae" / "changing.safetensors"
    weights = load_file(comfy.base / "models" / "vae" / "tiny.safetensors")
    save_file(weights, path, {"norm_num_groups": "8"})
    prompt = {
        "z": latents(comfy, 1, 16, 1, 4, 4),
        "vae": loader("changing.safetensors"),
        "decode": node("VAEDecode", samples=["z", 0], vae=["vae", 0]),
        "save": save("decode"),
    }
    first = comfy.images(comfy.run(prompt), "save")
    weights["decoder.conv_out.bias"] += 0.5
    save_file(weights, path, {"norm_num_groups": "8"})
    second = comfy.run(prompt)
    path.unlink()
    assert "vae" in second.executed()
    assert difference(first, comfy.images(second, "save")) > 32


@pytest.mark.parametrize("kind", ["ZeroWasteVAEDecode", "VAEDecode"])
def test_interrupt_stops_within_a_chunk(comfy, kind):
    """A chunk of 4 frames of 256x256 takes far longer than the request: the one that runs is the last."""
    prompt = {"z": latents(comfy, 1, 16, 60, 32, 32), "vae": loader()}
    prompt["optimize"] = node("ZeroWasteVAEOptimize", vae=["vae", 0], chunk=1)
    prompt["decode"] = node(kind, samples=["z", 0], vae=["optimize", 0])
    prompt["save"] = save("decode")
    run = comfy.run(prompt, at="decode", do=comfy.interrupt)
    assert run.status == "interrupted"
    done, total = run.progress("decode")[-1]
    assert total == 60
    assert done <= 2
    prompt["z"] = latents(comfy, 1, 16, 2, 8, 8)
    assert comfy.run(prompt).status == "success"


@pytest.mark.parametrize(
    ("vae", "latent", "widgets", "message"),
    [
        ("not_a_vae.safetensors", (1, 16, 1, 4, 4), {}, "not_a_vae.safetensors: not a VAE"),
        ("tiny.safetensors", (1, 4, 8, 8), {}, "decodes latents [B, 16, T, h, w]"),
        ("tiny.safetensors", (1, 12, 2, 8, 8), {}, "decodes latents [B, 16, T, h, w]"),
        ("tiny.safetensors", (1, 16, 1, 8, 8), {"tile": 8, "overlap": 0}, "tile=8"),
        ("tiny.safetensors", (1, 16, 1, 8, 8), {"tile": 32, "overlap": 48}, "overlap=48"),
        ("tiny.safetensors", (1, 16, 1, 64, 64), {"vram_gb": 0.001}, "This decode does not fit into its memory limit."),
        ("tiny.safetensors", (1, 16, 1, 8, 8), {"tiling": "every"}, "tiling='every' is not known: use one of auto"),
    ],
)
def test_errors_are_readable_and_the_server_goes_on(comfy, vae, latent, widgets, message):
    prompt = {
        "z": latents(comfy, *latent),
        "vae": loader(vae),
        "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0], **widgets),
        "save": save("decode"),
    }
    if "tile" in widgets:
        nested = {f"tiling.{key}": value for key, value in widgets.items()}
        prompt["decode"]["inputs"].update({"tiling": "blended", **nested})
    run = comfy.run(prompt)
    assert run.status == "error"
    assert message in run.error
    assert "\n" not in run.error.strip()
    prompt = {"z": latents(comfy, 1, 16, 1, 4, 4), "vae": loader(), "save": save("decode")}
    prompt["decode"] = node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0])
    assert comfy.run(prompt).status == "success"


def test_unknown_vae_runs_on_the_host(comfy):
    """Our nodes and the host's give the same frames and latents; the report says who did it and what was in vain."""
    prompt = {
        **clip(),
        "vae": node("VAELoader", vae_name="pixel_space"),
        "encode": node("ZeroWasteVAEEncode", pixels=["clip", 0], vae=["vae", 0]),
        "decode": node("ZeroWasteVAEDecode", samples=["encode", 0], vae=["vae", 0], chunk=1, vram_gb=2.0),
        "encode stock": node("VAEEncode", pixels=["clip", 0], vae=["vae", 0]),
        "decode stock": node("VAEDecode", samples=["encode stock", 0], vae=["vae", 0]),
        "save": save("decode"),
        "save stock": save("decode stock"),
    }
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    frames = comfy.images(run, "save")
    assert frames.shape == (9, 48, 64, 3)
    assert np.array_equal(frames, comfy.images(run, "save stock"))
    text, facts = run.outputs["decode"]["text"][0], run.outputs["decode"]["zerowaste"][0]
    assert "decode 9 frames of 64x48" in text
    assert "ComfyUI's own code" in text
    assert "without effect on it: tiling auto, 1 latent per chunk, at most 2 GB" in text
    assert facts["complete"] and facts["load_seconds"] is None and facts["predicted_gb"] is None
    assert "ComfyUI's own code" in run.outputs["encode"]["text"][0]
