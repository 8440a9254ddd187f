"""Zero-Waste VAE Save in a real ComfyUI: what it writes loads again, and what it cannot write leaves nothing behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from zerowaste_vae.engine import demo_vae_path, read_checkpoint

pytestmark = pytest.mark.host


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def loader(name: str, **widgets) -> dict:
    return node("ZeroWasteVAELoader", vae_name=name, **widgets)


def save(prefix: object, kind: str = "safetensors f16", vae: str = "vae") -> dict:
    return node("ZeroWasteVAESave", vae=[vae, 0], filename_prefix=prefix, type=kind)


def files(comfy) -> set[Path]:
    return {path for path in comfy.base.rglob("*") if path.is_file() and path.suffix not in (".log", ".pyc")}


def test_report_and_path(comfy):
    """In the history (for headless graphs) and as outputs; two saves under one name are counted."""
    prompt = {"vae": loader("demo (small)"), "first": save("vae/named", "gguf q8_0"), "second": save("vae/named")}
    prompt |= {f"{name} path": node("PreviewAny", source=[name, 0]) for name in ("first", "second")}
    prompt |= {f"{name} report": node("PreviewAny", source=[name, 1]) for name in ("first", "second")}
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    text = {name: output["text"][0] for name, output in run.outputs.items()}
    paths = {Path(text["first path"]), Path(text["second path"])}
    assert {path.stem for path in paths} == {"named_00001_", "named_00002_"}
    assert all(path.parent == comfy.base / "output" / "vae" for path in paths)
    for name, kind in (("first", "q8_0"), ("second", "f16")):
        path = Path(text[f"{name} path"])
        report = text[f"{name} report"]
        assert report == text[name]
        # ComfyUI lists the VAEs of output/vae: by this name the Loader has it.
        assert report.startswith(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, ")
        assert f" tensors {kind}" in report.lower()
        assert str(comfy.base) not in json.dumps(run.outputs[name])
    assert "read back: every value equal to the source" in text["second"] and "mean" in text["first"]
    source = demo_vae_path().stat().st_size
    assert 0.53 < Path(text["first path"]).stat().st_size / source < 0.56


@pytest.mark.parametrize(("kind", "least"), [("safetensors f16", np.inf), ("gguf f16", np.inf), ("gguf q8_0", 45)])
def test_demo_vae_saved_and_loaded_decodes_alike(comfy, kind, least):
    suffix, name = ("." + kind.split()[0], kind.replace(" ", "_"))
    prompt = {"vae": loader("demo (small)"), "save": save(name, kind)}
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    written = comfy.base / "models" / "vae" / f"written{suffix}"
    shutil.move(comfy.base / "output" / f"{name}_00001_{suffix}", written)
    prompt = {
        "clip": node("ZeroWasteVAEDemoClip", frames=5),
        "crop": node("ImageCrop", image=["clip", 0], width=96, height=96, x=32, y=16),
        "demo": loader("demo (small)"),
        "written": loader(written.name),
        "encode": node("ZeroWasteVAEEncode", pixels=["crop", 0], vae=["demo", 0]),
    }
    for vae in ("demo", "written"):
        prompt[f"decode {vae}"] = node("ZeroWasteVAEDecode", samples=["encode", 0], vae=[vae, 0])
        prompt[f"save {vae}"] = node("SaveImage", images=[f"decode {vae}", 0], filename_prefix="test")
    run = comfy.run(prompt)
    written.unlink()
    assert run.status == "success", run.error
    ours, copy = (comfy.images(run, f"save {vae}").astype(float) for vae in ("demo", "written"))
    assert ours.shape == (5, 96, 96, 3)
    assert ours.std() > 10
    error = np.mean((ours - copy) ** 2)
    assert (error == 0) == (least == np.inf)
    assert error == 0 or 20 * np.log10(255 / error**0.5) >= least


def test_saved_weights_are_the_files(comfy):
    """bf16 would round fp16 weights; the groups of the norms, given to the Loader here, go into the new file."""
    source = load_file(comfy.base / "models" / "vae" / "tiny.safetensors")
    nameless = comfy.base / "models" / "vae" / "nameless.safetensors"
    save_file(source, nameless)
    prompt = {"vae": loader(nameless.name, precision="bf16", norm_groups=8), "save": save("from_bf16")}
    prompt["optimize"] = node("ZeroWasteVAEOptimize", vae=["vae", 0], precision="fp32")
    prompt["save optimized"] = save("optimized", "gguf f16", "optimize")
    run = comfy.run(prompt)
    nameless.unlink()
    assert run.status == "success", run.error
    path = comfy.base / "output" / "from_bf16_00001_.safetensors"
    optimized = read_checkpoint(comfy.base / "output" / "optimized_00001_.gguf")
    for saved in (load_file(path), optimized.tensors):
        assert saved.keys() == source.keys()
        assert all(torch.equal(saved[key], source[key]) for key in source)
    assert optimized.metadata["norm_num_groups"] == 8
    with safe_open(path, "pt") as file:
        assert file.metadata()["norm_num_groups"] == "8"


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("../escaped", "'../escaped' leads out of the output folder"),
        ("a/../../escaped", "leads out of the output folder"),
        ("/escaped", "leads out of the output folder"),
        ("", "'' names no file"),
        ("two\nlines", "control characters"),
        ("occupied/name", "'occupied/name'"),
        ("x" * 300, "too long"),
    ],
)
def test_bad_names_are_refused_and_the_server_goes_on(comfy, prefix, message):
    (comfy.base / "output").mkdir(exist_ok=True)
    (comfy.base / "output" / "occupied").write_text("a file")
    before = files(comfy)
    run = comfy.run({"vae": loader("tiny.safetensors"), "save": save(prefix, "gguf q8_0")})
    assert run.status == "error"
    assert message in run.error
    assert "\n" not in run.error.strip()
    assert files(comfy) == before
    assert comfy.run({"vae": loader("tiny.safetensors"), "save": save("good", "gguf q8_0")}).status == "success"


def test_other_vaes_are_refused(comfy):
    before = files(comfy)
    run = comfy.run({"vae": node("VAELoader", vae_name="pixel_space"), "save": save("pixels")})
    assert run.status == "error"
    assert "not a VAE the engine knows" in run.error
    assert files(comfy) == before


def test_file_replaced_while_the_graph_runs_is_not_saved(comfy):
    """The prefix comes from the decode's report, so that Save runs after it."""
    path = comfy.base / "models" / "vae" / "replaced.safetensors"
    weights = load_file(comfy.base / "models" / "vae" / "tiny.safetensors")
    save_file(weights, path, {"norm_num_groups": "8"})
    z = torch.randn(1, 16, 12, 10, 10, generator=torch.Generator().manual_seed(3))
    content = {"latent_tensor": z, "latent_format_version_0": torch.tensor([])}
    save_file(content, comfy.base / "input" / "replaced.latent")
    prompt = {
        "z": node("LoadLatent", latent="replaced.latent"),
        "vae": loader(path.name),
        "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0], chunk=1),
        "save": save(["decode", 1]),
    }
    weights["decoder.conv_out.bias"] += 0.5
    run = comfy.run(prompt, at="decode", do=lambda: save_file(weights, path, {"norm_num_groups": "8"}))
    path.unlink()
    assert run.status == "error"
    assert "replaced.safetensors: was changed or removed after it was loaded" in run.error


def test_old_host_saves_too(old_comfy):
    run = old_comfy.run({"vae": loader("tiny.gguf"), "save": save("vae/tiny", "gguf q4_k")})
    assert run.status == "success", run.error
    written = read_checkpoint(old_comfy.base / "output" / "vae" / "tiny_00001_.gguf")
    assert written.metadata["norm_num_groups"] == 8
