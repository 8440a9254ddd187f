"""Contents of the archive for the registry, and what stops it from being built."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool(load_tool):
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("needs the git checkout: what is tracked is what is shipped")
    return load_tool("build_archive")


@pytest.fixture
def staged(tool, tmp_path):
    tool.stage(tmp_path / "pack", "somebody")
    assert tool.problems(tmp_path / "pack") == []
    return tmp_path / "pack"


def test_it_ships_the_pack_and_nothing_else(staged):
    assert {path.name for path in staged.iterdir()} == {
        "CHANGELOG.md", "LICENSE", "NOTICE", "README.md", "__init__.py", "__main__.py", "adapters.py", "assets", "docs",
        "engine", "example_workflows", "locales", "nodes", "py.typed", "pyproject.toml", "requirements.txt",
        "subgraphs", "tools", "web",
    }  # fmt: skip
    assert [path.name for path in (staged / "tools").iterdir()] == ["comfy_peer.py"]


def test_addresses_follow_from_one(staged):
    text = (staged / "pyproject.toml").read_text()
    assert 'Repository = "https://github.com/somebody/' in text
    for name in ("Documentation", "Issues", "Icon", "Banner"):
        assert name in text
    assert "/OWNER/" not in text
    for page in ("README.md", "docs/install.md"):
        assert "https://github.com/somebody/" in (staged / page).read_text()
        assert "URL_OF_THIS_REPOSITORY" not in (staged / page).read_text()
    assert "OWNER" in (ROOT / "pyproject.toml").read_text()


def test_links_of_its_pages(staged):
    """They lead to a file of the archive, or to one that only the repository has."""
    away = set()
    for page in staged.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
            inside = target.removeprefix("https://github.com/somebody/ComfyUI-ZeroWasteVAE/blob/main/")
            if inside != target:
                away.add(inside)
            elif "://" not in target:
                assert (page.parent / target).exists(), (page, target)
    assert "CONTRIBUTING.md" in away and all((ROOT / name).is_file() and not (staged / name).exists() for name in away)
    assert not (staged / "docs" / "log").exists() and any(name.startswith("docs/log/") for name in away)


def test_the_registrys_own_tool_accepts_it(staged, tmp_path):
    """Version patterns, classifiers, and what its scan for unsafe calls finds; all it would say are warnings."""
    comfy = shutil.which("comfy")
    if not comfy:
        pytest.skip("needs comfy-cli")
    said = subprocess.run(
        [comfy, "--skip-prompt", "--no-enable-telemetry", "node", "validate"], cwd=staged, text=True,
        capture_output=True, env={**os.environ, "HOME": str(tmp_path)},
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    text = (said.stdout + said.stderr).lower()
    assert "all validation checks passed" in text and "warning" not in text, text


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nodes/extra.py", "import subprocess\n", "flags"),
        ("nodes/extra.py", "eval('1')\n", "flags"),
        ("engine/extra.py", "import os\nos.system('ls')\n", "flags"),
        ("tests/test_x.py", "", "must not be shipped"),
        ("example_workflows/new.json", "{}", "has no picture"),
        ("nodes/__pycache__/host.cpython-313.pyc", "", "compiled Python"),
        ("nodes/extra.pyo", "", "compiled Python"),
    ],
)
def test_it_refuses(tool, staged, name, content, said):
    path = staged / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    (problem,) = tool.problems(staged)
    assert said in problem and name in problem


@pytest.mark.parametrize("to", ["__init__.py", "..", "/etc/hosts"])
def test_a_link_is_refused(tool, staged, to):
    """To a file or folder, within the archive or outside."""
    (staged / "nodes" / "link").symlink_to(to)
    assert tool.problems(staged) == ["nodes/link is a link"]


def test_incomplete(tool, staged, monkeypatch):
    """It refuses what is incomplete or too large."""
    (staged / "LICENSE").unlink()
    assert tool.problems(staged) == ["LICENSE is missing"]
    monkeypatch.setattr(tool, "MOST_BYTES", 1 << 20)
    assert "more than 1" in tool.problems(staged)[-1]


def test_pictures_have_the_registrys_shapes():
    icon, banner = (Image.open(ROOT / "registry" / f"{name}.png") for name in ("icon", "banner"))
    assert icon.size == (400, 400)
    assert banner.width * 9 == banner.height * 21
