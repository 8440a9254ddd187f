"""Looks at what commands leave behind."""

import re
from pathlib import Path

import numpy as np
from PIL import Image


def one_error(result, *words):
    """Exit code 2 and exactly one line on stderr that holds the words."""
    code, out, err = result
    assert code == 2 and not out, (code, out, err)
    assert re.fullmatch(r"zerowaste-vae: error: [^\n]+\n", err), err
    for word in words:
        assert word in err, err


def pngs(folder):
    return {f.name: np.asarray(Image.open(f)) for f in Path(folder).glob("frame_*.png")}
