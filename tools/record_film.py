"""Record docs/figures/compare.webp: a right click on VAE Decode, a run and a comparison, in a real ComfyUI on a CPU:

    python tools/record_film.py

It needs the programs of `pytest tests/browser` (tests/browser/conftest.py). Frames are screenshots of a headless
Chromium. The strip below them shows the time that has really passed, and where the film runs faster than that. Look at
the film before it is committed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "browser"), str(ROOT / "tests" / "host")]

import conftest  # noqa: E402
import pages  # noqa: E402
import running  # noqa: E402
from PIL import Image, ImageChops, ImageDraw, ImageFont  # noqa: E402

FILM = ROOT / "docs" / "figures" / "compare.webp"
#: Pixels of the page, of the film and of the strip below it.
PAGE, WIDTH, STRIP = (1200, 900), 960, 30
MOST_BYTES = 2 << 20
#: How many times as fast waits are shown.
FAST = 6
#: ComfyUI has no code of its own for the demo VAE's sizes, but takes a Wan 2.1 of any width.
VAE = "small_wan_random_weights.safetensors"
SETTINGS = {
    "Comfy.VueNodes.Enabled": False, "Comfy.ColorPalette": "dark", "Comfy.Locale": "en", "Comfy.Minimap.Visible": False,
    "Comfy.Canvas.SelectionToolbox": False, "Comfy.Graph.CanvasInfo": False,
    "Comfy.NodeBadge.NodeSourceBadgeMode": "None",
}  # fmt: skip
#: Where nodes are put: [x, y], [width, height].
PLACES = {
    "VAELoader": ([100, 110], [280, 60]),
    "ZeroWasteVAEDemoClip": ([100, 220], [280, 110]),
    "VAEEncode": ([100, 380], [280, 60]),
    "VAEDecode": ([430, 110], [320, 60]),
    "SaveImage": ([810, 110], [340, 400]),
}
# A screenshot has no pointer: this one follows the mouse.
POINTER = """(() => {
  const pointer = document.createElement("div");
  pointer.innerHTML = `<svg width="22" height="30" viewBox="0 0 11 15"><path d="M0 0v12l3-3 2 5 2-1-2-5h5z"
    fill="#fff" stroke="#000"/></svg>`;
  pointer.style.cssText = "position:fixed;left:-40px;top:0;z-index:2147483647;pointer-events:none";
  document.body.append(pointer);
  window.addEventListener("mousemove", (e) => {
    [pointer.style.left, pointer.style.top] = [`${e.clientX}px`, `${e.clientY}px`];
  }, true);
})()"""
#: The middle of the first element of a selector that holds a text, in pixels of the page; null without one.
MIDDLE = """(([selector, text]) => {{
  const found = [...document.querySelectorAll(selector)].find((e) => e.innerText.includes(text) && e.offsetParent);
  const box = found?.getBoundingClientRect();
  return box ? [box.left + box.width / 2, box.top + box.height / 2] : null;
}})({})"""
TITLE = """(() => {
  const [{ canvas }, node] = [window.app, window.app.graph.nodes.find((n) => n.type === "VAEDecode")];
  const box = canvas.canvas.getBoundingClientRect();
  return [box.left + (node.pos[0] + 110 + canvas.ds.offset[0]) * canvas.ds.scale,
    box.top + (node.pos[1] - 14 + canvas.ds.offset[1]) * canvas.ds.scale];
})()"""
COMPARED = "[...document.querySelectorAll('.zerowaste-compare img')].filter((e) => e.naturalWidth).length === 2"


@dataclass
class Film:
    """Frames with the milliseconds that each is shown."""

    browser: conftest.Browser
    folder: Path
    frames: list[Image.Image] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    text: str = ""
    speed: int = 1
    _at: tuple[float, float] = (600.0, 500.0)
    _start: float = field(default_factory=time.monotonic)
    _last: float = 0.0

    def frame(self) -> None:
        """Take one; the one before it was on show until now."""
        self.browser("view", file=str(self.folder / "frame.png"))
        now = time.monotonic() - self._start
        if self.frames:
            self.shown[-1] += round(1e3 * (now - self._last) / self.speed)
        self._last = now
        with Image.open(self.folder / "frame.png") as page:
            small = page.convert("RGB").resize((WIDTH, WIDTH * PAGE[1] // PAGE[0]), Image.Resampling.LANCZOS)
        self.frames.append(self._with_strip(small, now))
        self.shown.append(0)

    def _with_strip(self, page: Image.Image, now: float) -> Image.Image:
        whole = Image.new("RGB", (WIDTH, page.height + STRIP), "#101418")
        whole.paste(page)
        pen, font = ImageDraw.Draw(whole), ImageFont.load_default(15)
        middle = page.height + STRIP // 2
        pen.text((12, middle), self.text, "#ffffff", font, "lm")
        fast = f"  ·  shown {self.speed} times as fast" if self.speed > 1 else ""
        pen.text((WIDTH - 12, middle), f"on a CPU, random weights  ·  {now:.0f} s{fast}", "#9fd8c2", font, "rm")
        return whole

    def wait(self, seconds: float) -> None:
        """Go on filming for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.frame()

    def until(self, script: str) -> None:
        """Go on filming until an expression in the page holds; fails after five minutes."""
        end = time.monotonic() + 300
        while not self.browser("js", source=script):
            if time.monotonic() > end:
                raise TimeoutError(script)
            self.frame()
            time.sleep(0.2 * (self.speed - 1))  # four to five frames a second are shown

    def click(self, place: list[float], button: str = "left") -> None:
        """Move the pointer to a place in the page, and press a button of the mouse there."""
        (left, top), (right, bottom) = self._at, place
        for step in (0.3, 0.7, 1):
            self.browser("mouse", x=left + step * (right - left), y=top + step * (bottom - top))
            self.frame()
        self._at = right, bottom
        self.browser("mouse", x=right, y=bottom, button=button)

    def middle(self, selector: str, text: str = "") -> list[float]:
        """Return the middle of an element. Raises LookupError if the page shows none."""
        place = self.browser("js", source=MIDDLE.format(json.dumps([selector, text])))
        if place is None:
            raise LookupError(f"the page shows no {selector} {text}".rstrip())
        return place


def stock() -> dict:
    """Return the workflow of the demo clip, with ComfyUI's own nodes in the place of ours and a VAE that they take."""
    graph = pages.workflow("Try it - demo clip", frames=5)
    own = {"ZeroWasteVAELoader": "VAELoader", "ZeroWasteVAEEncode": "VAEEncode", "ZeroWasteVAEDecode": "VAEDecode"}
    for node in graph["nodes"]:
        if node["type"] in own:
            node |= {"type": own[node["type"]], "properties": {}, "outputs": node["outputs"][:1]}
            node["inputs"] = [given for given in node.get("inputs", []) if given["link"] is not None]
            node["widgets_values"] = [VAE] if node["type"] == "VAELoader" else []
    graph["nodes"] = [node for node in graph["nodes"] if node["type"] in PLACES]
    for node in graph["nodes"]:
        node["pos"], node["size"] = PLACES[node["type"]]
    here = {node["id"] for node in graph["nodes"]}
    graph["links"] = [link for link in graph["links"] if {link[1], link[3]} <= here]
    return graph


def play(film: Film) -> None:
    """Do what is filmed."""
    browser = film.browser
    film.text = "A workflow with ComfyUI's VAE Decode"
    film.wait(1.5)
    film.text = "Right-click it, choose Use Zero-Waste VAE"
    film.click(browser("js", source=TITLE), "right")
    film.wait(1)
    film.click(film.middle(".litemenu-entry", "Use Zero-Waste VAE"))
    film.until("!!document.querySelector('[data-zerowaste=status][data-state=planned]')")
    film.text = "The status line says before the run whether it fits"
    film.wait(2)
    film.text = "Run"
    film.click(film.middle("button", "Run"))
    film.speed = FAST
    film.until("document.querySelectorAll('[data-zerowaste=status][data-state=ran]').length === 1")
    film.speed = 1
    film.text = "Afterwards it has the time and the memory"
    film.wait(2)
    film.text = "Click it for details"
    film.click(film.middle("[data-zerowaste=status]", "whole frames"))
    film.wait(2)
    film.text = "Compare with ComfyUI's own"
    film.click(film.middle("[data-zerowaste=compare]:enabled"))
    film.speed = FAST
    film.until(COMPARED)
    film.speed = 1
    film.text = "Both decodes of the same latent, and how far their frames differ"
    film.wait(3)


def save(film: Film) -> None:
    """Write the film; frames that are equal to the one before only lengthen it."""
    kept, shown = [], []
    for frame, duration in zip(film.frames, film.shown, strict=True):
        if kept and ImageChops.difference(frame, kept[-1]).getbbox() is None:
            shown[-1] += duration
        else:
            kept.append(frame)
            shown.append(duration)
    shown[-1] += 1000  # before it begins again
    kept[0].save(FILM, save_all=True, append_images=kept[1:], duration=shown, loop=0, quality=80, method=4)
    size = FILM.stat().st_size
    print(f"{FILM}: {len(kept)} frames, {sum(shown) / 1e3:.1f} s, {size / 1e6:.2f} MB")
    if size > MOST_BYTES:
        raise SystemExit(f"more than {MOST_BYTES} bytes: lower the quality")


def main() -> None:
    with tempfile.TemporaryDirectory() as base, running.serving(Path(base), running.newest()) as comfy:
        running.write_tiny_wan(running.newest(), Path(base) / "models" / "vae" / VAE)
        packages = Path(os.environ.get("PLAYWRIGHT_DIR") or ROOT / "tests" / "browser")
        chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
        browser = conftest.Browser(packages, chromium, Path(base) / "browser.log")
        try:
            address = f"http://127.0.0.1:{comfy.port}"
            browser("open", url=address, settings=SETTINGS, width=PAGE[0], height=PAGE[1])
            browser("load", workflow=stock())
            browser("js", source="void ((d) => { d.scale = 1; d.offset[0] = 0; d.offset[1] = 50; })(app.canvas.ds)")
            browser("js", source=POINTER)
            film = Film(browser, Path(base))
            play(film)
        finally:
            browser.close()
    save(film)


if __name__ == "__main__":
    main()
