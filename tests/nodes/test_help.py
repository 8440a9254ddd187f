"""Every node has a help page that names each of its widgets."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [p for p in (ROOT / "nodes").glob("*.py") if "node_id=" in p.read_text(encoding="utf-8")]
#: what the shared widget functions of nodes/widgets.py add
SHARED = {
    "precision_input": ["precision"],
    "vram_input": ["vram_gb"],
    "chunk_input": ["chunk"],
    "tiling_inputs": ["tiling"],
}


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_help_page_names_every_widget(source):
    text = source.read_text(encoding="utf-8")
    (node,), (title,) = re.findall(r'node_id="(\w+)"', text), re.findall(r'display_name="([^"]+)",\n +category', text)
    page = (ROOT / "web" / "docs" / f"{node}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {title}\n")
    widgets = re.findall(r'io\.(?:Combo|Int|Float|String|Boolean)\.Input\(\s*"(\w+)"', text)
    widgets += [name for function, names in SHARED.items() if f"{function}(" in text for name in names]
    assert widgets
    missing = [name for name in widgets if f"**{name}**" not in page]
    assert not missing


def test_every_page_has_its_node():
    nodes = {re.search(r'node_id="(\w+)"', p.read_text(encoding="utf-8"))[1] for p in SOURCES}
    assert {p.stem for p in (ROOT / "web" / "docs").glob("*.md")} == nodes
