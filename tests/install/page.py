"""Commands of docs/install.md, which the tests of this folder run: as the page has them, in its order."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "install.md"
TEXT = PAGE.read_text(encoding="utf-8")
TITLES = re.findall(r"^## (.+)$", TEXT, re.M)
BLOCK = r"^```\n(.*?)^```$"
#: A program and what it is given.
PROGRAM = re.compile(r"(?:python3?|py|git|comfy|cd|env[/\\]\S+|\.[.\\/]\S+) .+")


def stated(words: str) -> float:
    """Return the MB that the page says after some words, in bytes."""
    return 1e6 * int(re.search(rf"{words}\D*(\d+) MB", " ".join(TEXT.split()))[1])


class Section:
    """What a heading of the page has below it; its commands are taken one after the other, none is passed over."""

    def __init__(self, title: str) -> None:
        self.text = TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        found = re.findall(rf"{BLOCK}|`([^`]+)`", self.text, re.M | re.S)
        lines = [line for block, inline in found for line in block.splitlines() or [inline.replace("\n", " ")]]
        self.left = [line for line in lines if PROGRAM.fullmatch(line)]

    def take(self, count: int = 1) -> str:
        """Return the next commands, a line each; those of Windows with the names of Linux."""
        taken, self.left = self.left[:count], self.left[count:]
        assert len(taken) == count, f"{PAGE.name} has no more commands here"
        text = "\n".join(taken).replace("\\", "/")
        return text.replace("/Scripts/zerowaste-vae.exe", "/bin/zerowaste-vae").replace("/Scripts/", "/bin/")

    def says(self, words: str) -> bool:
        """Return whether the section has these words, wherever its lines end."""
        return words in " ".join(self.text.split())
