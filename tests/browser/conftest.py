"""The real frontend of a real ComfyUI in a headless Chromium, driven through drive.mjs.

Needs node, Chromium (CHROMIUM, default /usr/bin/chromium) and the npm package playwright-core, in node_modules of this
folder (`npm install --prefix tests/browser playwright-core`) or of PLAYWRIGHT_DIR. ComfyUI is found as by tests/host.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# `import running` and `import graphs` from the host tests, `import pages` from here.
for folder in (Path(__file__).resolve().parents[1] / "host", Path(__file__).parent):
    sys.path.insert(0, str(folder))

import running  # noqa: E402

HERE = Path(__file__).resolve().parent


class Browser:
    """One page of a headless Chromium; every call is a task of drive.mjs."""

    def __init__(self, packages: Path, chromium: str, log: Path) -> None:
        environment = {**os.environ, "PLAYWRIGHT_DIR": str(packages), "CHROMIUM": chromium}
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                ["node", HERE / "drive.mjs"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=environment,
            )  # fmt: skip

    def __call__(self, task: str, **options: object) -> object:
        self._process.stdin.write(json.dumps({"task": task, **options}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            pytest.fail(f"the browser ended: {self._log.read_text()[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            pytest.fail(f"{task}: {answer['error']}")
        return answer["ok"]

    def close(self) -> None:
        self._process.stdin.write('{"task": "quit"}\n')
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    packages = Path(os.environ.get("PLAYWRIGHT_DIR") or HERE)
    program = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    for missing, what in (
        (not shutil.which("node"), "node"),
        (not Path(program).exists(), f"Chromium at {program} (set CHROMIUM)"),
        (not (packages / "node_modules" / "playwright-core").is_dir(), f"playwright-core in {packages}"),
    ):
        if missing:
            pytest.skip(f"browser tests need {what}")
    page = Browser(packages, program, tmp_path_factory.mktemp("browser") / "errors.log")
    yield page
    page.close()


@pytest.fixture
def browser(chromium):
    """The page, in which no error may have come up by the end of a test."""
    yield chromium
    assert chromium("problems") == []


@pytest.fixture(scope="session")
def host_places() -> tuple[Path, Path]:
    """(checkout, virtual environment) of the newest host."""
    return running.newest()


@pytest.fixture(scope="session")
def comfy(tmp_path_factory):
    with running.serving(tmp_path_factory.mktemp("comfy"), running.newest(), device=running.page()) as server:
        yield server


@pytest.fixture(scope="session")
def new_comfy(tmp_path_factory):
    """The newest host with the newest frontend."""
    device = ("--cpu", "--front-end-root", str(running.frontend()))
    with running.serving(tmp_path_factory.mktemp("new_comfy"), running.newest(), device=device) as server:
        yield server


@pytest.fixture(scope="session")
def old_comfy(tmp_path_factory):
    with running.serving(tmp_path_factory.mktemp("old_comfy"), running.oldest()) as server:
        yield server


@pytest.fixture(scope="session")
def shots(tmp_path_factory) -> Path:
    """Return the folder of screenshots: SCREENSHOTS, else a temporary folder."""
    return Path(os.environ.get("SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
