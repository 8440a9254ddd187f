"""A server on a GPU, under the arguments people start it with: the same frames, room made and given back, stopping."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import running
import test_quantised as quantised
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.families.seedvr2 import ARCHITECTURE
from zerowaste_vae.engine.kernels.targets import gains_by_half_sums

fcntl = pytest.importorskip("fcntl")
pytestmark = [pytest.mark.host, pytest.mark.gpu]


@dataclass(frozen=True)
class Server:
    """Arguments of a server, and what its runs then are; off: optimisation -> how its reason begins."""

    arguments: tuple[str, ...] = ()
    precision: str = "fp16"
    off: dict[str, str] = field(default_factory=dict)
    device: str = "cuda:0"


HALF_SUMS = {"fp16_fast": "fp16 sums are no faster on"}
SERVERS = {
    "as it comes": Server(),
    "dynamic VRAM off": Server(("--disable-dynamic-vram",)),
    "fast": Server(("--fast",)),
    "lowvram with torch's allocator": Server(("--disable-cuda-malloc", "--lowvram", "--cache-none")),
    "nothing pinned": Server(
        ("--disable-pinned-memory", "--disable-async-offload"), off={"async_offload": "--disable-async-offload"}
    ),
    "novram with 2 GB reserved": Server(("--novram", "--reserve-vram", "2", "--cache-ram", "1")),
    "bf16": Server(("--bf16-vae",), "bf16"),
    "fp32": Server(("--fp32-vae",), "fp32"),
    "on the CPU": Server(("--cpu-vae",), "fp32", device="cpu"),
}
#: Those in which a second model takes the memory.
CROWDED = ("as it comes", "dynamic VRAM off", "novram with 2 GB reserved")
#: Other processes may run this file with other servers: a test that fills the card has this lock alone.
FILLING = Path(tempfile.gettempdir()) / "zerowaste-vae-fills-the-card"
GIB = 1 << 30
#: 17 frames of 640x368 take 4 GB without a target; 161 take a second, so that a request to stop finds them running.
LATENTS = {"z": (1, 16, 5, 46, 80), "long": (1, 16, 41, 46, 80), "small": (1, 16, 2, 8, 8)}


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder with a file of SeedVR2's published widths, which every server is shown: drawing it takes seconds."""
    folder = tmp_path_factory.mktemp("models")
    save_file(running.random_weights(ARCHITECTURE.published.config), folder / "full_width.safetensors")
    return folder


@pytest.fixture(scope="module", params=SERVERS, ids=lambda name: name.replace(" ", "-"))
def server(request, tmp_path_factory, host_places, models):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    heavy, base = Path(__file__).with_name("heavy_pack"), tmp_path_factory.mktemp("gpu")
    wanted = SERVERS[request.param]
    with ExitStack() as stack:
        card = stack.enter_context(FILLING.open("w"))
        fcntl.flock(card, fcntl.LOCK_SH)
        comfy = stack.enter_context(running.serving(base, host_places, others=[heavy], device=wanted.arguments))
        fcntl.flock(card, fcntl.LOCK_UN)
        stack.callback(fcntl.flock, card, fcntl.LOCK_SH)  # before it stops: the card is freer then
        for file in models.iterdir():
            (comfy.base / "models" / "vae" / file.name).symlink_to(file)
        for name, shape in LATENTS.items():
            z = torch.randn(shape, generator=torch.Generator().manual_seed(1))
            content = {"latent_tensor": z, "latent_format_version_0": torch.tensor([])}
            save_file(content, comfy.base / "input" / f"{name}.latent")
        comfy.name, comfy.wanted = request.param, wanted
        yield comfy


@pytest.fixture(autouse=True)
def card(request, server) -> Iterator[None]:
    """The card, shared with tests of other processes, or alone."""
    with FILLING.open("w") as file:
        if server.name in CROWDED or "alone" not in request.fixturenames:
            fcntl.flock(file, fcntl.LOCK_EX if "alone" in request.fixturenames else fcntl.LOCK_SH)
        yield


@pytest.fixture
def large(server):
    """Servers whose runs are large enough for what the test is about."""
    if server.wanted.device == "cpu" or server.wanted.precision == "fp32":
        pytest.skip("in fp16 and bf16 on a GPU")
    return server


@pytest.fixture
def alone(server) -> Iterator[running.Comfy]:
    """A server of CROWDED, on a card that no other test uses meanwhile; what fills the card goes behind it."""
    if server.name not in CROWDED:
        pytest.skip("the arguments say nothing of memory")
    yield server
    memory(server)


def decoding(latent: str = "z", **widgets) -> dict:
    """Nodes 'z', 'vae', 'decode' and 'look'."""
    return {
        "z": node("LoadLatent", latent=f"{latent}.latent"),
        "vae": node("ZeroWasteVAELoader", vae_name="full_width.safetensors"),
        "decode": node("ZeroWasteVAEDecode", samples=["z", 0], vae=["vae", 0], **widgets),
        "look": node("TestLook", images=["decode", 0]),
    }


def told(comfy, prompt: dict, name: str) -> dict:
    """Return what the node `name` says in a run, which must succeed."""
    run = comfy.run(prompt, timeout=240)
    assert run.status == "success", run.error
    return json.loads(run.outputs[name]["text"][0])


def frames(comfy, prompt: dict) -> dict:
    """Shape, spread and a digest of every bit: writing pictures would take longer than decoding."""
    return told(comfy, prompt, "look")


def memory(comfy) -> dict:
    return told(comfy, {"forget": node("TestForget")}, "forget")


def beside(gib: int, free: int, **widgets) -> dict:
    """A decode once the card has `free` GB left and a model of `gib` GB has run there."""
    prompt = decoding(**widgets) | {"heavy": node("TestLoadHeavy", samples=["z", 0], gib=gib, free=free)}
    prompt["decode"]["inputs"]["samples"] = ["heavy", 0]
    return prompt


def test_runs_are_what_the_arguments_order(server):
    """Type and device of "auto", and the reasons of what is off, in plans and runs alike."""
    run = server.run(decoding("small"), timeout=240)
    assert run.status == "success", run.error
    report = run.outputs["decode"]["zerowaste"][0]
    half_sums = server.name == "fast" and gains()
    expected = "fp16_fast" if half_sums else server.wanted.precision, server.wanted.device
    assert (report["precision"], report["plan_facts"]["device"]) == expected
    off = {entry["name"]: entry["reason"] for entry in report["off"]}
    reasons = server.wanted.off | (HALF_SUMS if server.name == "fast" and not half_sums else {})
    assert all(off[name].startswith(reason) for name, reason in reasons.items()), off
    plan = server.get("/zerowaste_vae/plan?model=full_width.safetensors&width=64&height=64&frames=5")
    assert (plan["precision"], plan["device"]) == expected


def gains() -> bool:
    major, minor = torch.cuda.get_device_capability()
    return gains_by_half_sums(10 * major + minor)


def test_same_frames_from_all_nodes(large):
    """Stock nodes, ours and every target give the same frames."""
    expected = frames(large, decoding())
    assert expected["shape"] == [17, 368, 640, 3]
    assert expected["std"] > 0.08
    before = memory(large)["locks"]
    assert frames(large, decoding(tiling="untiled", vram_gb=2.0)) == expected
    # Histories wait in host memory under that target.
    assert (memory(large)["locks"] > before) == (large.name != "nothing pinned")
    stock = decoding()
    stock["decode"] = node("VAEDecode", samples=["z", 0], vae=["vae", 0])
    assert frames(large, stock) == expected
    own = decoding()
    own["vae"] = node("VAELoader", vae_name="full_width.safetensors")
    assert frames(large, own) == expected


def test_a_quantised_file_runs_from_the_stock_loader(server):
    """With dynamic VRAM the host puts codes, and weights in fp8, as they are in the place of weights."""
    if server.name not in ("as it comes", "dynamic VRAM off"):
        pytest.skip("the arguments say nothing of loading")
    quantised.write(server)
    for name in (quantised.NAME, quantised.PLAIN):
        ours, theirs = (frames(server, decoding("small") | {"vae": node(kind, vae_name=name)})
                        for kind in ("ZeroWasteVAELoader", "VAELoader"))  # fmt: skip
        assert ours == theirs and ours["std"] > 0, name


def test_stopping_and_free_give_the_memory_back(large):
    expected = frames(large, decoding())  # and whatever stays for the life of a process is there
    large.free()
    before, said = memory(large), large.log().count("Traceback")
    stopped = large.run(decoding("long", chunk=1, output="float16"), at="decode", do=large.interrupt, timeout=240)
    assert stopped.status == "interrupted", stopped.error
    assert frames(large, decoding(chunk=3)) == expected
    large.free()
    after = memory(large)
    assert after["allocated"] <= before["allocated"] + 0.1 * GIB
    assert frames(large, decoding(chunk=2)) == expected
    assert large.log().count("Traceback") == said, large.log()[-3000:]


def test_room_for_the_peak_is_free(alone):
    """Another model holds the memory, dynamically or not: as much of it goes as the plan's peak takes, and the frames
    are the same; then that model runs again, and so does ours."""
    if "--novram" in alone.wanted.arguments:
        pytest.skip("no model stays on the card")
    expected = frames(alone, decoding())
    for chunk in (1, 2):
        assert frames(alone, beside(6, 8, chunk=chunk, keep_models="never")) == expected
        first, run = told(alone, {"rooms": node("TestRooms")}, "rooms")
        assert first["heavy"] > 3 * GIB and first["free"] < run["asked"]  # something has to go
        assert run["free"] + run["ours"] >= run["asked"] > 2 * GIB
        assert run["heavy"] < first["heavy"]


def test_a_run_beside_a_model_moves_none_of_it(alone):
    """With 2 GB free beside it: less is planned for, as much of the model stays as was there, and the frames are the
    same."""
    if "--novram" in alone.wanted.arguments:
        pytest.skip("no model stays on the card")
    expected = frames(alone, decoding())
    run = alone.run(beside(6, 8, keep_models="always"), timeout=240)
    assert run.status == "success", run.error
    assert json.loads(run.outputs["look"]["text"][0]) == expected
    report = run.outputs["decode"]["zerowaste"][0]
    assert report["plan_facts"]["predicted_gb"] < 3.6 and report["events"].get("oom_step_downs", 0) == 0
    assert any(note.startswith("beside Heavy (") for note in report["notes"]), report["notes"]
    first, then = told(alone, {"rooms": node("TestRooms")}, "rooms")
    assert then["heavy"] >= 0.9 * first["heavy"] > 3 * GIB


def test_room_that_is_reserved_stays_free(alone):
    """On a card with 5 GB left a run takes 4; where 2 are reserved it makes do with less, and the frames are the
    same."""
    reserved = 2 if "--reserve-vram" in alone.wanted.arguments else 0
    expected = frames(alone, decoding())
    run = alone.run(beside(0, 5), timeout=240)
    assert run.status == "success", run.error
    assert json.loads(run.outputs["look"]["text"][0]) == expected
    planned = run.outputs["decode"]["zerowaste"][0]["plan_facts"]["predicted_gb"]
    assert (planned > 3.6) == (not reserved)
    assert memory(alone)["least"] >= reserved * GIB
