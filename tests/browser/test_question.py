"""Test the panel's questions to the planner, from nodes as the frontend has them; needs node, no browser and no
ComfyUI."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from urllib.parse import urlencode

import pytest
from zerowaste_vae.nodes.panel import Question

SCRIPT = Path(__file__).resolve().parents[2] / "web" / "js" / "question.js"
# A graph in few words: {name: {"class", "widgets", "inputs": {name: [type, source]}, "specs", "mode"}} -> question of
# "decode". An input of the type "widget" is a widget that another node feeds.
ASK = """
const { question } = await import(process.argv[1]);
const [graph, lastRun] = JSON.parse(process.argv[2]);
const root = { links: new Map(), nodes: [], getNodeById: (id) => root.nodes.find((node) => node.id === id) };
root.getLink = (id) => root.links.get(id);
const prototype = { getInputLink(slot) { return root.getLink(this.inputs[slot].link); } };
globalThis.window = { app: { rootGraph: root }, LiteGraph: { LGraphNode: { prototype } } };
const entries = Object.entries(graph);
for (const [name, { class: comfyClass, widgets = {}, inputs = {}, specs = {}, mode = 0, outputs = [] }] of entries) {
  class Kind {}
  const optional = Object.entries(specs).map(([key, spec]) => [key, ["BOOLEAN", spec]]);
  Kind.nodeData = { input: { optional: Object.fromEntries(optional) } };
  const node = Object.assign(new Kind(), { id: name, comfyClass, mode, graph: root });
  node.outputs = outputs.map((type) => ({ type }));
  node.widgets = Object.entries(widgets).map(([key, value]) => ({ name: key, value }));
  node.inputs = Object.entries(inputs).map(([key, [type, source]]) => {
    const id = root.links.size + 1;
    if (source) root.links.set(id, { origin_id: source, origin_slot: 0, target_id: name });
    return { name: key, type, link: source ? id : null, widget: type === "widget" ? { name: key } : undefined };
  });
  root.nodes.push(node);
}
console.log(JSON.stringify(question(root.getNodeById("decode"), lastRun)));
"""

#: Of Optimize's toggles, as the server describes them: what plans depend on, and what is on by default.
SPECS = {
    "fp8": {"default": False, "zerowaste_planned": True},
    "triton_fusion": {"default": True, "zerowaste_planned": True},
    "async_offload": {"default": True},
    "winograd": {"default": False, "zerowaste_planned": True},
}

pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="needs node")


def asked(graph: dict, last_run: dict | None = None) -> dict:
    """The question, whose query the server must understand."""
    run = subprocess.run(
        ["node", "--input-type=module", "-e", ASK, SCRIPT.as_uri(), json.dumps([graph, last_run])],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    if "query" not in found:
        return found
    query = {name: str(value) for name, value in found["query"].items()}
    assert urlencode(query)
    Question.parse(query)
    return found


def chain(decode: dict | None = None, optimize: dict | None = None, **more: dict) -> dict:
    """Loader, Optimize and Decode with these widgets; more: those of the loader, and what Optimize's toggles say."""
    return {
        "loader": {"class": "ZeroWasteVAELoader", "widgets": {"vae_name": "a.gguf", **more.get("loader", {})}},
        "optimize": {
            "class": "ZeroWasteVAEOptimize", "widgets": optimize or {}, "inputs": {"vae": ["VAE", "loader"]},
            "specs": more.get("specs", SPECS),
        },
        "latent": {"class": "EmptyHunyuanLatentVideo", "widgets": {"width": 640, "height": 360, "length": 33}},
        "decode": {
            "class": "ZeroWasteVAEDecode", "widgets": decode or {},
            "inputs": {"samples": ["LATENT", "latent"], "vae": ["VAE", "optimize"]},
        },
    }  # fmt: skip


def test_size_and_file_come_from_the_nodes_before():
    found = asked(chain())
    assert found["source"] == "traced"
    size = {"width": 640, "height": 360, "frames": 33, "batch": 1}
    assert found["query"] == {"model": "a.gguf", "channels": 16, **size}


def test_channels_follow_from_what_made_the_latent():
    """A sampler makes an empty latent fit its model: behind one nothing is known."""
    graph = chain()
    graph["larger"] = {"class": "LatentUpscaleBy", "widgets": {"scale_by": 1.5}, "outputs": ["LATENT"],
                       "inputs": {"samples": ["LATENT", "latent"]}}  # fmt: skip
    graph["decode"]["inputs"]["samples"] = ["LATENT", "larger"]
    assert asked(graph)["query"]["channels"] == 16
    graph["larger"] = {"class": "KSampler", "widgets": {"seed": 1}, "outputs": ["LATENT"],
                       "inputs": {"latent_image": ["LATENT", "latent"]}}  # fmt: skip
    assert not {"channels", "encoded_by"} & asked(graph)["query"].keys()
    graph["other"] = {"class": "VAELoader", "widgets": {"vae_name": "b.safetensors"}}
    graph["larger"] = {"class": "VAEEncode", "outputs": ["LATENT"],
                       "inputs": {"pixels": ["IMAGE", "latent"], "vae": ["VAE", "other"]}}  # fmt: skip
    assert asked(graph)["query"]["encoded_by"] == "b.safetensors"


def test_batches_are_counted():
    graph = chain()
    graph["latent"]["widgets"]["batch_size"] = 3
    query = asked(graph)["query"]
    assert (query["frames"], query["batch"]) == (33, 3)
    # Four images are four clips of one frame, not a clip of five.
    graph["latent"] = {"class": "EmptySD3LatentImage", "widgets": {"width": 640, "height": 360, "batch_size": 4}}
    query = asked(graph)["query"]
    assert (query["frames"], query["batch"]) == (1, 4)
    graph["latents"] = graph.pop("latent")
    inputs = {"samples": ["LATENT", "latents"]}
    graph["latent"] = {"class": "RepeatLatentBatch", "widgets": {"amount": 2}, "inputs": inputs}
    assert asked(graph)["query"]["batch"] == 8


def test_linked_values_are_followed_or_unknown():
    graph = chain({"vram_gb": 1})
    graph["decode"]["inputs"]["vram_gb"] = ["widget", "number"]
    graph["number"] = {"class": "PrimitiveFloat", "widgets": {"value": 7}}
    assert asked(graph)["query"]["vram_gb"] == 7
    graph["number"] = {"class": "SomeMaths", "widgets": {"value": 7}}
    assert asked(graph) == {"why": "computed", "names": ["vram_gb"]}
    # A size that is computed is not known either: no other node's size is taken in its place.
    graph = chain()
    graph["latent"]["inputs"] = {"width": ["widget", "number"], "image": ["IMAGE", "picture"]}
    graph["number"] = {"class": "SomeMaths"}
    graph["picture"] = {"class": "EmptyImage", "widgets": {"width": 64, "height": 64, "batch_size": 1}}
    assert asked(graph) == {"why": "no_size"}


def test_bypassed_and_switched_nodes():
    graph = chain({}, {"vram_gb": 6})
    graph["optimize"] |= {"mode": 4, "outputs": ["VAE", "STRING"]}
    query = asked(graph)["query"]
    assert "vram_gb" not in query and query["model"] == "a.gguf"
    graph = chain()
    graph["small"] = {"class": "EmptyHunyuanLatentVideo", "widgets": {"width": 64, "height": 64, "length": 5}}
    graph["switch"] = {
        "class": "ComfySwitchNode", "widgets": {"switch": True},
        "inputs": {"on_false": ["LATENT", "latent"], "on_true": ["LATENT", "small"]},
    }  # fmt: skip
    graph["decode"]["inputs"]["samples"] = ["LATENT", "switch"]
    assert asked(graph)["query"]["width"] == 64
    graph["switch"]["widgets"]["switch"] = False
    assert asked(graph)["query"]["width"] == 640


def test_what_changes_a_size_unseen_makes_it_unknown():
    graph = chain()
    graph["larger"] = {"class": "ImageScaleToTotalPixels", "inputs": {"image": ["IMAGE", "latent"]}}
    graph["decode"]["inputs"]["samples"] = ["LATENT", "larger"]
    assert asked(graph) == {"why": "no_size"}
    inputs = {"samples": ["LATENT", "latent"]}
    graph["larger"] = {"class": "LatentUpscaleBy", "widgets": {"scale_by": 1.5}, "inputs": inputs}
    query = asked(graph)["query"]
    assert (query["width"], query["height"], query["frames"]) == (960, 544, 33)


def test_the_nearest_wish_counts():
    optimize, loader = {"vram_gb": 6, "chunk": 1, "ram_gb": 3}, {"vram_gb": 9, "precision": "bf16"}
    graph = chain({"vram_gb": 0, "chunk": 2}, optimize, loader=loader)
    query = asked(graph)["query"]
    assert (query["vram_gb"], query["chunk"], query["ram_gb"], query["precision"]) == (6, 2, 3, "bf16")


def test_nested_and_flat_tiles():
    nested = {"tiling": "blended", "tiling.tile": 256, "tiling.overlap": 32}
    for widgets in (nested, {"tiling": "blended", "tile": 256, "overlap": 32}):
        query = asked(chain(optimize=widgets))["query"]
        assert (query["tiling"], query["tile"], query["overlap"]) == ("blended", 256, 32)
    assert "tile" not in asked(chain({"tiling": "untiled", "tile": 256, "overlap": 32}))["query"]


def test_toggles():
    switched = {"triton_fusion": False, "fp8": False, "tf32": True, "async_offload": False}
    assert asked(chain(optimize=switched))["query"]["off"] == "triton_fusion"
    graph = chain(optimize={"composed_upsample": False}, specs={"composed_upsample": SPECS["triton_fusion"]})
    assert asked(graph)["query"]["off"] == "composed_upsample"
    assert asked(chain(optimize={"fp8": True, "min_db": 0}))["query"]["precision"] == "fp8"
    assert asked(chain(optimize={"fp8": True, "precision": "fp16"}))["query"]["precision"] == "fp8"
    assert asked(chain(optimize={"fp8": True, "precision": "int8"}))["query"]["precision"] == "int8"
    assert "precision" not in asked(chain(optimize={"fp8": True, "min_db": 45}))["query"]
    assert asked(chain(optimize={"winograd": True}))["query"]["on"] == "winograd"
    nowhere = {"winograd": SPECS["winograd"] | {"zerowaste_off": "no CUDA device"}}
    assert "on" not in asked(chain(optimize={"winograd": True}, specs=nowhere))["query"]
    reason = {"fp8": {"zerowaste_off": "no CUDA device"}}
    assert "precision" not in asked(chain(optimize={"fp8": True}, specs=reason))["query"]


def test_the_last_run_counts_until_the_nodes_before_say_otherwise():
    traced = {"batch": 1, "width": 640, "height": 360, "frames": 33}
    last = {"size": {"width": 640, "height": 368, "frames": 33, "batch": 1}, "model": "b", "traced": traced}
    assert asked(chain(), last)["source"] == "last_run"
    graph = chain()
    graph["latent"]["widgets"]["length"] = 49
    found = asked(graph, last)
    assert (found["source"], found["query"]["frames"]) == ("traced", 49)


def test_nothing_is_asked_without_a_size_a_vae_or_links():
    graph = chain()
    del graph["latent"]["widgets"]
    assert asked(graph) == {"why": "no_size"}
    graph = chain()
    graph["loader"] = {"class": "SomeLoader", "widgets": {}}
    assert asked(graph) == {"why": "no_vae"}
    graph = chain()
    del graph["decode"]["inputs"]["vae"]
    assert asked(graph) == {"why": "unconnected"}


def test_a_ring_of_nodes_ends():
    graph = chain()
    graph["latent"] = {"class": "Reroute", "inputs": {"": ["*", "other"]}, "outputs": ["*"]}
    graph["other"] = {"class": "Reroute", "inputs": {"": ["*", "latent"]}, "outputs": ["*"]}
    assert "why" in asked(graph)
    graph = chain()
    graph["latent"] = {"class": "KSampler", "inputs": {"latent_image": ["LATENT", "other"]}}
    graph["other"] = {"class": "KSampler", "inputs": {"latent_image": ["LATENT", "latent"]}}
    assert asked(graph) == {"why": "no_size"}


def test_a_video_is_planned_in_its_own_number_type():
    """And the VAE of a checkpoint by the checkpoint's name."""
    graph = chain({"pixels": "yuv420p10"})
    graph["decode"]["class"] = "ZeroWasteVAEDecodeToVideo"
    assert asked(graph)["query"]["output"] == "float32"
    graph["decode"]["widgets"]["pixels"] = "yuv444p"
    assert asked(graph)["query"]["output"] == "uint8"
    graph["loader"] = {"class": "CheckpointLoaderSimple", "widgets": {"ckpt_name": "sd_xl.safetensors"}}
    assert asked(graph)["query"]["model"] == "sd_xl.safetensors"


def test_gpus_are_named():
    assert "gpus" not in asked(chain({"gpus": "auto"}))["query"]
    assert asked(chain({"gpus": " all"}))["query"]["gpus"] == "all"


def test_a_latent_comes_before_the_pictures_put_into_it():
    """LTX's nodes take a first frame and a latent, in this order, and put the sound beside the frames."""
    graph = chain()
    graph["picture"] = {"class": "EmptyImage", "widgets": {"width": 64, "height": 64, "batch_size": 1}}
    graph["start"] = {
        "class": "LTXVImgToVideoInplace", "outputs": ["LATENT"],
        "inputs": {"image": ["IMAGE", "picture"], "latent": ["LATENT", "latent"]},
    }  # fmt: skip
    graph["sound"] = {"class": "LTXVEmptyLatentAudio", "widgets": {"frames_number": 97, "batch_size": 1}}
    graph["both"] = {
        "class": "LTXVConcatAVLatent", "outputs": ["LATENT"],
        "inputs": {"video_latent": ["LATENT", "start"], "audio_latent": ["LATENT", "sound"]},
    }  # fmt: skip
    graph["decode"]["inputs"]["samples"] = ["LATENT", "both"]
    query = asked(graph)["query"]
    assert (query["width"], query["height"], query["frames"]) == (640, 360, 33)
    inputs = {"samples": ["LATENT", "both"], "vae": ["VAE", "loader"]}
    graph["larger"] = {"class": "LTXVLatentUpsampler", "inputs": inputs, "outputs": ["LATENT"]}
    graph["decode"]["inputs"]["samples"] = ["LATENT", "larger"]
    assert asked(graph) == {"why": "no_size"}


def test_layers_are_not_known_before_a_run():
    graph = chain()
    graph["latent"] = {
        "class": "EmptyQwenImageLayeredLatentImage",
        "widgets": {"width": 640, "height": 640, "layers": 3, "batch_size": 1},
    }  # fmt: skip
    assert asked(graph) == {"why": "no_size"}


def test_what_ran_is_known_better_than_its_file():
    last = {"model": "wan2.1 (96, 192)", "file": "a.gguf", "size": None, "traced": None}
    last["traced"] = {"batch": 1, "width": 640, "height": 360, "frames": 33}
    last["size"] = last["traced"]
    assert asked(chain(), last)["query"]["model"] == "wan2.1 (96, 192)"
    assert asked(chain(loader={"vae_name": "b.gguf"}), last)["query"]["model"] == "b.gguf"
