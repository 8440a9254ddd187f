"""Old import paths of `read_video` and `write_mp4`: `engine.files.media` and `engine.files.mp4`."""

import sys
import warnings

from ..extras.media import clips as media
from ..extras.media import mp4

warnings.warn(
    "engine.files is gone: import read_video and write_mp4 from the package itself", DeprecationWarning, stacklevel=2
)
# An import looks here before it looks for a file.
sys.modules |= {f"{__name__}.media": media, f"{__name__}.mp4": mp4}
