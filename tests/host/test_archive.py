"""The archive for the registry, unpacked into a host as its manager does, works without the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from urllib.parse import quote

import pytest
import running
from graphs import to_prompt

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def installed(tmp_path_factory, host_places):
    base = tmp_path_factory.mktemp("registry")
    if subprocess.run(["git", "-C", running.REPOSITORY, "rev-parse"], capture_output=True).returncode:
        pytest.skip("the archive holds what git tracks, and this copy of the repository is not under git")
    command = [sys.executable, running.REPOSITORY / "tools" / "build_archive.py", "--out", base / "dist"]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(base / "dist" / "zerowaste-vae.zip") as archive:
        archive.extractall(base / "unpacked")
    with running.serving(base / "comfy", host_places, base / "unpacked") as server:
        yield server


def test_it_has_the_nodes_the_frontend_and_the_texts(installed):
    nodes = {name for name in installed.get("/object_info") if name.startswith("ZeroWaste")}
    assert len(nodes) == 11
    assert any(path.endswith("/js/zerowaste.js") for path in installed.get("/extensions"))
    assert "zerowaste" in installed.get("/i18n")["zh"]
    # Of the host's own nodes some need packages that not every host has.
    failed = [line for line in installed.log().splitlines() if "IMPORT FAILED" in line]
    assert [line for line in failed if running.PACK in line] == []


def test_its_templates_are_offered_once_and_run(installed):
    offered = installed.get("/workflow_templates")[running.PACK]
    assert sorted(offered) == sorted(path.stem for path in (running.REPOSITORY / "workflows").glob("*.json"))
    graph = installed.get(f"/api/workflow_templates/{running.PACK}/{quote('Try it - demo clip')}.json")
    prompt = to_prompt(json.loads(json.dumps(graph)), installed.get("/object_info"))
    for node in prompt.values():
        if node["class_type"] == "ZeroWasteVAEDemoClip":
            node["inputs"]["frames"] = 1
    run = installed.run(prompt)
    assert run.status == "success", run.error
