"""Opening the frontend in one of its looks."""

from __future__ import annotations


def opened(browser, comfy, renderer: str = "canvas", palette: str = "dark", language: str = "en") -> None:
    settings = {"Comfy.VueNodes.Enabled": renderer == "vue", "Comfy.ColorPalette": palette, "Comfy.Locale": language}
    browser("open", url=f"http://127.0.0.1:{comfy.port}", settings=settings, width=1900, height=1250)
