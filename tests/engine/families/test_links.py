"""The table of files in docs/models.md: each is known by its name, and its link is one of the templates'."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from zerowaste_vae.engine.families import ARCHITECTURES, by_file, by_words

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "models.md").read_text("utf-8")
#: (family, file, folder, last cell) of each row.
ROWS = re.findall(r"^\| `([\w.-]+)` \| `([\w.-]+)` \| `(vae|checkpoints)` \| (.+) \|$", TEXT, re.M)
LINKS = {file: re.search(r"\((https://.+)\)", cell)[1] for _, file, _, cell in ROWS if "https" in cell}


def models(path: Path) -> set[tuple[str, str, str]]:
    """(folder, file, link) of all downloads that a workflow names."""
    found, waiting = set(), [json.loads(path.read_text("utf-8"))]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if {"name", "url", "directory"} <= one.keys():
                found.add((one["directory"], one["name"], one["url"].partition("?")[0]))
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return found


def test_every_family_has_a_file_that_its_name_tells():
    assert {family for family, *_ in ROWS} == {a.name for a in ARCHITECTURES}
    assert len({file for _, file, *_ in ROWS}) == len(ROWS)
    for family, file, _, cell in ROWS:
        assert by_file(file).name == family == by_words(family).name, file
        assert (file in LINKS) != cell.startswith("not in ComfyUI's templates"), file
        assert file not in LINKS or LINKS[file].endswith(f"/{file}")


def test_links_are_those_of_our_workflows():
    """Each VAE that one of them downloads is in the table, with that link and folder."""
    folders = {file: folder for _, file, folder, _ in ROWS}
    ours = {each for path in (ROOT / "workflows").glob("*.json") for each in models(path)}
    vaes = [each for each in ours if each[0] == "vae" and by_file(each[1])]
    assert len(vaes) >= 5
    for folder, file, link in vaes:
        assert (folders.get(file), LINKS.get(file)) == (folder, link), file


def test_links_are_those_of_comfyuis_templates():
    venv = Path(os.environ.get("COMFY_VENV") or Path.home() / ".cache" / "zerowaste-vae" / "venv")
    roots = [*map(Path, sys.path), *venv.glob("lib/*/site-packages"), venv / "Lib" / "site-packages"]
    folders = [folder for root in roots for folder in root.glob("comfyui_workflow_templates*")]
    theirs = {each for folder in folders for path in folder.rglob("*.json") for each in models(path)}
    if not theirs:
        pytest.skip("ComfyUI's templates are not installed")
    folders = {file: folder for _, file, folder, _ in ROWS}
    assert [file for file, link in LINKS.items() if (folders[file], file, link) not in theirs] == []
