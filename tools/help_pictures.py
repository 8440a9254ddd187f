"""Make the pictures of the help pages (web/docs/pictures) with a real ComfyUI in a headless Chromium:

    python tools/help_pictures.py

It needs the programs of `pytest tests/browser` (tests/browser/conftest.py). Look at the pictures before they are
committed.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "browser"), str(ROOT / "tests" / "host")]

import conftest  # noqa: E402
import pages  # noqa: E402
import running  # noqa: E402
from PIL import Image  # noqa: E402

PICTURES = ROOT / "web" / "docs" / "pictures"
FIND = "app.graph.nodes.find((n) => n.type === '{}')"
FIT = "void ((n) => n.setSize([{}, n.computeSize()[1]]))({})"
# As on a machine where every optimisation has an effect: the limits of this one do not concern a reader.
PLAIN = """void {}.widgets.filter((w) => w.label?.endsWith(' (no effect here)')).forEach((w) => {{
  [w.label, w.disabled] = [w.label.slice(0, w.label.lastIndexOf(' (')), false];
}})"""
EXPERT = "void {}.widgets.find((w) => w.name === 'expert').callback()"
ALONE = "void [...app.graph.nodes].filter((n) => n.type !== '{}').forEach((n) => app.graph.remove(n))"


def take(browser: conftest.Browser, folder: Path) -> None:
    loader, optimize, decode = (f"ZeroWasteVAE{name}" for name in ("Loader", "Optimize", "Decode"))
    for kind, name, width, workflow in ((loader, "loader", 320, "Try it - demo clip"), (optimize, "optimize", 340, "")):
        graph = pages.workflow(workflow) if workflow else {"nodes": [], "links": [], "version": 0.4}
        browser("load", workflow=graph)
        if workflow:
            browser("js", source=ALONE.format(kind))
        else:
            browser("js", source=f"void app.graph.add(LiteGraph.createNode('{kind}'))")
            browser("js", source=PLAIN.format(FIND.format(kind)))
            browser("js", source=EXPERT.format(FIND.format(kind)))
        browser("js", source=FIT.format(width, FIND.format(kind)))
        time.sleep(1)
        browser("shot", file=str(folder / f"{name}.png"), nodes=[pages.node(browser("nodes"), kind)["id"]])
    browser("load", workflow=pages.workflow("Wan 2.1 - text to video"))
    browser("js", source=FIT.format(380, FIND.format(decode)))
    browser("line", until="Fits")
    shown = pages.node(browser("nodes"), decode)["id"]
    box = browser("shot", file=str(folder / "plan.png"), nodes=[shown])
    sheet = browser("details", until="Fits")["box"]
    browser("view", file=str(folder / "plan.png"))
    left, top = min(box["x"], sheet[0] - 12), box["y"]
    right, bottom = max(box["x"] + box["width"], sheet[2] + 12), sheet[3] + 12
    part = tuple(map(round, (left, top, right, bottom)))
    Image.open(folder / "plan.png").crop(part).save(folder / "plan.png")


def main() -> None:
    with tempfile.TemporaryDirectory() as base, running.serving(Path(base), running.newest()) as comfy:
        packages = Path(os.environ.get("PLAYWRIGHT_DIR") or ROOT / "tests" / "browser")
        chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = conftest.Browser(packages, chromium, Path(base) / "browser.log")
        try:
            pages.opened(browser, comfy)
            take(browser, Path(base))
        finally:
            browser.close()
        for picture in sorted(Path(base).glob("*.png")):
            Image.open(picture).convert("RGB").save(PICTURES / picture.name, optimize=True)
            print(PICTURES / picture.name)


if __name__ == "__main__":
    main()
