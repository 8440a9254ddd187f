"""The real pictures: their list and terms, and one small file of them for the machine that trains.

All come with the scikit-image wheel; only those its documentation states to be CC0 or in the public domain are used.

    python -m zerowaste_vae.tools.train_demo.pictures pictures.npz
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image

#: file in skimage/data -> terms as scikit-image's documentation of that picture states them
PICTURES = {
    "astronaut.png": "NASA; public domain",
    "brick.png": "CC0Textures; CC0",
    "camera.png": "Lav Varshney; CC0",
    "cell.png": "Paul Müller et al.; CC0",
    "clock_motion.png": "Stefan van der Walt; public domain",
    "coffee.png": "Rachel Michetti; CC0",
    "grass.png": "linolafett; CC0",
    "gravel.png": "CC0Textures; CC0",
    "hubble_deep_field.jpg": "NASA; public domain",
    "retina.jpg": "Mikael Häggström; CC0",
    "rocket.jpg": "SpaceX; public domain",
}
#: never trained on: the held-back clip is made of it
HELD_BACK = {"chelsea.png": "Stefan van der Walt; CC0"}
MAX_SIDE = 1000


def read(name: str) -> np.ndarray:
    """Read one picture as uint8 [H, W, 3], grey ones repeated, shrunk so that no side exceeds MAX_SIDE."""
    import skimage

    picture = Image.open(Path(skimage.__file__).parent / "data" / name).convert("RGB")
    picture.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    return np.asarray(picture)


def pack(path: Path) -> None:
    """Write the training pictures as one .npz of uint8 arrays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **{name: read(name) for name in PICTURES})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: pictures.py FILE.npz")
    pack(Path(sys.argv[1]))
