"""Headers of files: their contents for the loader's list, and for plans before anything is loaded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from ..engine import demo_vae_path, log, read_checkpoint
from ..engine.archs import by_file, detect
from ..engine.loader import stored_groups
from . import folders
from .planning import KNOWN

DEMO = "demo (small)"
#: The longest time that the list of files waits for the headers of new ones.
SECONDS = 0.5
#: Rank of files that the engine cannot run; video VAEs have 0, image VAEs 1.
_FOREIGN = 2

# Headers are read in a thread of their own: a folder of many large files must not hold up the server.
_reader = ThreadPoolExecutor(1, "zerowaste-headers")
_read: set[tuple[str, int, int]] = set()


def path_of(name: str) -> Path:
    """Return the path of a file of models/vae, or of the demo VAE."""
    return demo_vae_path() if name == DEMO else folders.vae_file(name)


def listed() -> list[str]:
    """Return the files of models/vae, video VAEs first, then image VAEs, then files the engine cannot run; tell the
    planner about them.

    The demo VAE stands before files that cannot run: the first entry is the default of a new node.
    """
    files = folders.vae_files()
    read = _reader.submit(_learn_all, [*files, DEMO])
    # Headers are read within milliseconds; a slow disk's come with the next list.
    wait([read], SECONDS)
    ranks = {name: _rank(name) for name in files}
    runs = sorted((name for name in files if ranks[name] < _FOREIGN), key=ranks.__getitem__)
    return [*runs, DEMO, *(name for name in files if name not in runs)]


def learn_checkpoint(name: str) -> None:
    """Tell the planner about the VAE in a file of models/checkpoints, if `name` is one that it does not know yet."""
    if KNOWN.find(name) is None and not KNOWN.is_foreign(name) and (path := folders.checkpoint_file(name)):
        _learn(name, path)


def _rank(name: str) -> int:
    """Return the rank by the file's header, or before that was read by its name."""
    found = KNOWN.find(name)
    architecture = found[0] if found else None if KNOWN.is_foreign(name) else by_file(name)
    return _FOREIGN if architecture is None else int(architecture.still)


def _learn_all(names: list[str]) -> None:
    for name in names:
        try:
            _learn(name, path_of(name))
        except OSError as error:  # removed since it was listed
            log.debug(f"{name}: {error}")


def _learn(name: str, path: Path) -> None:
    try:
        stat = path.stat()
        stamp = (str(path), stat.st_mtime_ns, stat.st_size)
        if stamp in _read:
            return
        _read.add(stamp)
        header = read_checkpoint(path, shapes_only=True)
        architecture = detect(header.tensors)
        if architecture is None:
            KNOWN.learn(name, None, None)
        else:
            shapes = {key: tuple(t.shape) for key, t in header.tensors.items()}
            config = architecture.config_of(shapes, header.metadata, stored_groups(header))
            KNOWN.learn(name, architecture.of(config), config)
    except Exception as error:  # one strange file must not keep the others from being read
        log.debug(f"{name}: no plans before it is loaded ({error})")
