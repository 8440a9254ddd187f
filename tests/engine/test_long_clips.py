"""A clip of any length in the same host memory: measured from outside, in a process of its own.

Short by default; ZEROWASTE_LONG=1 runs 3,000 frames of 854x480 and 600 of 64x64.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

LONG = bool(os.environ.get("ZEROWASTE_LONG"))
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
#: What is freed goes back at once: else one process keeps 200 MB more than another that does the same.
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576", "MALLOC_TRIM_THRESHOLD_": "1048576"}


#: x264 takes some 60 frames before it gives one back: memory grows until frame 100, by 4 % after frame 60.
@pytest.mark.parametrize(("kind", "frames"), [("trivial", 3000 if LONG else 200), ("demo", 600 if LONG else 200)])
def test_memory_is_flat(tmp_path, kind, frames):
    script = Path(__file__).with_name("long_clip.py")
    environment = {**os.environ, **MALLOC, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, script, kind, str(frames), tmp_path], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["made"] == found["latents"]
    chunk = 4 * found["temporal"] * found["frame"]
    for name in ("decode", "encode"):
        run = found[name]
        assert run["frames"] >= found["expected"], found
        assert run["last"] < 1.05 * run["settled"], found
        assert run["last"] < found["loaded"] + 2**30, found
        # The encoder's input and what the encoder of the video has not taken yet; frames that a replay would need.
        kept = found["reach"] * found["frame"] if name == "encode" else 0
        assert run["alive"] <= kept + 5 * chunk, found
