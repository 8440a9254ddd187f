"""Run in a process of its own: decodes that are killed again and again at random moments and go on; prints as JSON what
each left behind.

killed.py VAE LATENT OUT KILLS: OUT ends in .mp4, or is a folder's name. Each run is a fork, so that it need not import
anything.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from zerowaste_vae.engine import loader  # noqa: F401 - what a run imports, and what it computes with
from zerowaste_vae.engine.extras.cli import (
    decode,  # noqa: F401
    main,
)
from zerowaste_vae.engine.extras.media import mp4, pngs  # noqa: F401
from zerowaste_vae.engine.extras.media.fragments import scan


def begun(arguments: list[str]) -> int:
    child = os.fork()
    if child == 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        os._exit(main(arguments))
    return child


def left(out: Path) -> int:
    """Frames that an unfinished output holds."""
    part = mp4.part_of(out)
    if part.is_file():
        return scan(part).samples
    return sum(1 for _ in part.glob("frame_*.png"))


def run(vae: str, latent: str, out: str, kills: int) -> dict[str, object]:
    common = [latent, "--vae", vae, "--device", "cpu", "--chunk", "1"]
    common += ["--fps", "8"] if out.endswith(".mp4") else []
    start = time.monotonic()
    whole = str(Path(out).with_name(f"whole{Path(out).suffix}"))
    os.waitpid(begun(["decode", common[0], whole, *common[1:]]), 0)
    spent, draw, found = time.monotonic() - start, random.Random(1), []
    for number in range(kills):
        child = begun(["decode", common[0], out, *common[1:], "--resume"])
        ended = 0
        if number % 2:
            time.sleep(draw.uniform(0, spent))
        else:  # once it has written something, if it is still seen to
            before = left(Path(out))
            while left(Path(out)) == before and not ended:
                time.sleep(0.002)
                ended, _ = os.waitpid(child, os.WNOHANG)
            time.sleep(draw.uniform(0, 0.05 * spent))
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        found.append((left(Path(out)), Path(out).exists()))
        if Path(out).exists():  # start over
            Path(out).rename(f"done{len(found)}")
    again = os.waitstatus_to_exitcode(os.waitpid(begun(["decode", common[0], out, *common[1:], "--resume"]), 0)[1])
    return {"left": found, "again": again}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(*sys.argv[1:4], int(sys.argv[4]))))
