"""The route behind the panel, over HTTP: what it answers, what it refuses, and that it agrees with the run."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest
import torch
from safetensors.torch import save_file

pytestmark = pytest.mark.host

ROUTE = "/zerowaste_vae/plan"


def ask(comfy, query: str, method: str = "GET") -> tuple[int, dict]:
    request = urllib.request.Request(f"http://127.0.0.1:{comfy.port}{ROUTE}?{query}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as refused:
        body = refused.read()
        return refused.code, json.loads(body) if body.startswith(b"{") else {}


def known(comfy, name: str) -> dict:
    """The plan for a listed file, asked for again until its header was read (which starts with the list)."""
    query = urllib.parse.urlencode({"model": name, "width": 64, "height": 48, "frames": 9})
    for _ in range(100):
        status, plan = ask(comfy, query)
        assert status == 200
        if not plan.get("assumed", True):
            break
        time.sleep(0.1)
    return plan


@pytest.mark.parametrize("host", ["comfy", "old_comfy"])
def test_listed_vaes_are_known_before_any_run(host, request):
    comfy = request.getfixturevalue(host)
    demo, tiny = known(comfy, "demo (small)"), known(comfy, "tiny.gguf")
    for plan in (demo, tiny):
        assert plan["assumed"] is False
        assert plan["fits"]
        assert (plan["width"], plan["height"], plan["frames"]) == (64, 48, 9)
        assert 0 < plan["predicted_gb"] < plan["target_gb"]
    assert demo["predicted_gb"] > tiny["predicted_gb"] == known(comfy, "tiny.safetensors")["predicted_gb"]
    other = ask(comfy, "model=not_a_vae.safetensors&width=64&height=64&frames=1")[1]
    assert (other["unknown"], other["host"]) == (True, True)


def test_the_plan_shown_is_the_plan_that_runs(comfy):
    z = torch.randn(1, 16, 3, 8, 12, generator=torch.Generator().manual_seed(1))
    content = {"latent_tensor": z, "latent_format_version_0": torch.tensor([])}
    save_file(content, comfy.base / "input" / "route.latent")
    wishes = {"vram_gb": 1, "chunk": 1, "tiling": "blended"}
    prompt = {
        "z": {"class_type": "LoadLatent", "inputs": {"latent": "route.latent"}},
        "vae": {"class_type": "ZeroWasteVAELoader", "inputs": {"vae_name": "tiny.gguf"}},
        "decode": {"class_type": "ZeroWasteVAEDecode", "inputs": {"samples": ["z", 0], "vae": ["vae", 0], **wishes}},
        "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "route"}},
    }
    prompt["decode"]["inputs"] |= {"tiling.tile": 48, "tiling.overlap": 16}
    run = comfy.run(prompt)
    assert run.status == "success", run.error
    ran = run.outputs["decode"]["zerowaste"][0]["plan_facts"]
    assert ran.pop("compare_off")  # only a run knows whether the host has a network for it; not for these sizes
    query = {**wishes, "model": "tiny.gguf", "width": 96, "height": 64, "frames": 9, "tile": 48, "overlap": 16}
    status, shown = ask(comfy, urllib.parse.urlencode(query))
    assert status == 200
    assert {key: shown[key] for key in ran} == ran


@pytest.mark.parametrize(
    "query",
    [
        "width=0", "width=1e9",
        "frames=9999999999999999999999999", "vram_gb=nan", "tiling=..%2F..", "width=64&width=65",
        "unknown=1", "model=%00", "tile=8&tiling=blended&width=64&height=64&model=demo+(small)", "off=everything",
        "vram_gb=-1", "vram_gb=1e309", "frames=%D9%A3", "width=%F0%9F%98%80", "off=%2Fetc%2Fpasswd", "%00=1",
        "width=64&%77idth=64", "output=../../x", "tile=-8", "width=%ff%fe", "ram_gb=1e400",
        "model=" + 3000 * "a", "precision=int4", "chunk=-1", "overlap=x", "frames=", "batch=10000",
    ],
    ids=lambda q: q[:24],
)  # fmt: skip
def test_malformed_and_oversized_questions_get_400(comfy, query):
    status, body = ask(comfy, query)
    assert status == 400
    assert body["error"]
    assert "\n" not in body["error"]


def test_an_overlong_request_line_is_refused(comfy):
    status, _ = ask(comfy, "model=" + 20_000 * "a")
    assert status == 400


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_it_is_read_only(comfy, method):
    assert ask(comfy, "width=64", method)[0] == 405


def test_a_name_is_never_a_path(comfy):
    """A file that exists, given by its path: it is not opened, and nothing is known of it."""
    path = comfy.base / "models" / "vae" / "tiny.safetensors"
    for name in (str(path), "../vae/tiny.safetensors"):
        status, plan = ask(comfy, urllib.parse.urlencode({"model": name, "width": 64, "height": 64, "frames": 1}))
        assert status == 200
        assert plan == {"unknown": True, "host": False, "model": name}
