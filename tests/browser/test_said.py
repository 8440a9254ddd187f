"""Refusals as the panel shows them in Chinese, from the very texts that the server sends; needs node only."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from zerowaste_vae.engine.planning import refusals
from zerowaste_vae.nodes.reports import labelled

ROOT = Path(__file__).resolve().parents[2]
CHINESE = json.loads((ROOT / "locales" / "zh" / "main.json").read_text())["zerowaste"]["said"]
RUN = """
const { translatedAll } = await import(process.argv[1]);
const [texts, known] = JSON.parse(process.argv[2]);
console.log(JSON.stringify(texts.map((text) => translatedAll(text, known))));
"""
FIGURES = {
    "size": "1280x720", "needs": "9.84 GB", "target": "4.00 GB", "room": "11.50 GB", "gpu": "6.31 GB",
    "ram": "56.61 GB", "allowed": "30.00 GB", "tile_px": 96, "overlap_px": 32, "chunk": 8, "fits": 3,
    "why": refusals.NOTHING_SMALLER, "left": "0.00 GB", "held": "13.00 GB", "out": "3.10 GB",
}  # fmt: skip
#: Of people's settings and units; all else is in Chinese.
KEPT = {"vram_gb", "ram_gb", "tile", "overlap", "chunk", "tiling", "auto", "blended", "fp", "bf", "GB", "x",
        "native_tiles", "trained", "LynnReal"}

pytestmark = pytest.mark.skipif(not shutil.which("node"), reason="needs node")


def said(texts: list[str], known: dict[str, str] | None) -> list[str]:
    script = (ROOT / "web" / "js" / "said.js").as_uri()
    run = subprocess.run(
        ["node", "--input-type=module", "-e", RUN, script, json.dumps([texts, known])], capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def filled() -> list[str]:
    """Every sentence of plans with figures, those with further ways out once with each."""
    ways = [refusals.TILED, refusals.SMALLER]
    for more in (refusals.LEANER, refusals.MORE_OF_BOTH, refusals.MORE_RAM):
        ways.append(more.format(**FIGURES, ways=refusals.TILED))
    texts = [text for name, text in vars(refusals).items() if name.isupper()]
    beside = FIGURES | {"target": refusals.BESIDE.format(**FIGURES)}
    return [
        labelled(text.format(**figures, ways=way, option=option))
        for figures in (beside, FIGURES)
        for text in texts
        for way in (ways if "{ways}" in text else [""])
        for option in (("vram_gb", "ram_gb") if "{option}" in text else [""])
    ]


def test_every_refusal_is_whole_in_chinese():
    texts = filled()
    assert len(texts) > 25
    for text, chinese in zip(texts, said(texts, CHINESE), strict=True):
        assert set(re.findall(r"[A-Za-z_]+", chinese)) <= KEPT, chinese
        assert sorted(re.findall(r"\d+\.\d\d", chinese)) == sorted(re.findall(r"\d+\.\d\d", text))
        assert "{" not in chinese and "undefined" not in chinese


def test_several_sentences_and_those_of_nodes():
    run = "This decode does not fit into its memory limit. " + filled()[0]
    note = "; ".join([refusals.APPROXIMATE, refusals.CHUNK_UNUSED.format(**FIGURES)])
    shape = "The latent is empty ([1, 16, 0, 8, 8]): connect one with at least one frame"
    for text, words in ((run, ["解码", "1280x720"]), (note, ["近似", "未使用"]), (shape, ["[1, 16, 0, 8, 8]"])):
        (chinese,) = said([text], CHINESE)
        assert chinese != text and all(word in chinese for word in words)
        assert set(re.findall(r"[A-Za-z_]+", chinese)) <= KEPT


def test_what_ran():
    modes = ["plain torch (NCDHW)", "fused kernels (NDHWC), 3 of 5 chunks replayed from CUDA graphs"]
    modes += ["a transformer, its products in bf16"]
    modes += ["ComfyUI's own code, because the engine does not know this network, in its own tiles of 96 pixels"]
    assert said(modes, CHINESE) == [
        "普通 torch（NCDHW）",
        "融合内核（NDHWC），5 段中有 3 段由 CUDA 图重放",
        "Transformer，其乘积以 bf16 计算",
        "ComfyUI 自己的代码，因为引擎不认识这个网络，用它自己的 96 像素分块",
    ]


def test_what_is_not_known_stays_as_it_is():
    assert said(["tile of nothing; else {x}"], CHINESE) == ["tile of nothing; else {x}"]
    assert said(filled(), None) == filled()
