"""ComfyUI's start options in a real ComfyUI on a CPU: what they order happens, and the log says so once."""

from __future__ import annotations

import pytest
import running

pytestmark = pytest.mark.host

OPTIONS = ("--bf16-vae", "--cpu-vae", "--disable-async-offload", "--disable-pinned-memory", "--reserve-vram", "1.5",
           "--fast", "fp16_accumulation", "--cache-none")  # fmt: skip
SAID = (
    "--bf16-vae: precision auto is bf16", "--disable-async-offload: copies wait", "(--disable-pinned-memory)",
    "--reserve-vram: runs leave 1.5 GB", "--fast fp16_accumulation: precision auto is fp16_fast", "--cache-none: VAEs",
)  # fmt: skip


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    places = running.newest()
    with running.serving(tmp_path_factory.mktemp("flags"), places, device=("--cpu", *OPTIONS)) as server:
        yield server


@pytest.fixture(scope="module")
def pressed(tmp_path_factory):
    """A host that is always short of memory, and keeps nothing between runs and as little as it can within one."""
    options = ("--cpu", "--default-device", "1", "--cache-ram", "1000000", "1000000")
    with running.serving(tmp_path_factory.mktemp("pressed"), running.newest(), device=options) as server:
        yield server


def node(kind: str, **inputs) -> dict:
    return {"class_type": kind, "inputs": inputs}


def chain(**loader) -> dict:
    return {
        "vae": node("ZeroWasteVAELoader", vae_name="demo (small)", **loader),
        "clip": node("ZeroWasteVAEDemoClip", frames=1),
        "encode": node("ZeroWasteVAEEncode", pixels=["clip", 0], vae=["vae", 0]),
        "decode": node("ZeroWasteVAEDecode", samples=["encode", 0], vae=["vae", 0]),
        "show": node("PreviewImage", images=["decode", 0]),
    }


def test_the_type_is_what_auto_means_in_runs_and_plans(host):
    """A type that a node names goes before it; nothing is kept between runs, and each reports."""
    for _ in range(2):
        run = host.run(chain())
        assert run.status == "success", run.error
        report = run.outputs["decode"]["zerowaste"][0]
        assert report["precision"] == "bf16" and report["plan_facts"]["device"] == "cpu"
        off = {entry["name"]: entry["reason"] for entry in report["off"]}
        assert off["async_offload"] == "--disable-async-offload"
        assert off["fp16_fast"] == "fp16_fast is for models made for fp16: bf16 runs instead"
    run = host.run(chain(precision="fp32"))
    assert run.outputs["decode"]["zerowaste"][0]["precision"] == "fp32"
    plan = host.get("/zerowaste_vae/plan?model=demo%20(small)&width=64&height=64&frames=1")
    assert plan["precision"] == "bf16"


def test_each_option_is_named_once(host):
    log = host.log()
    assert [log.count(text) for text in SAID] == [1] * len(SAID)


def test_a_switch_that_an_option_turned_off_says_so(host):
    node = host.get("/object_info/ZeroWasteVAEOptimize")["ZeroWasteVAEOptimize"]
    assert node["input"]["optional"]["async_offload"][1]["zerowaste_off"] == "--disable-async-offload"


def test_dropped_from_the_cache(pressed):
    """Run under --cache-ram; --default-device orders GPUs before the pack is loaded, and is nothing to a VAE on a
    CPU."""
    frames = []
    for _ in range(2):
        run = pressed.run(chain() | {"show": node("SaveImage", images=["decode", 0], filename_prefix="pressed")})
        assert run.status == "success", run.error
        assert {"vae", "encode", "decode"} <= run.executed() and not run.cached() & {"vae", "decode"}
        report = run.outputs["decode"]["zerowaste"][0]
        assert report["plan_facts"]["device"] == "cpu"
        frames.append(pressed.images(run, "show"))
    assert (frames[0] == frames[1]).all()
