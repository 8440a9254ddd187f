"""Files in ComfyUI's folders: the VAEs that are there, and names and formats of new files."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import folder_paths
import torch

from ..engine import Checkpoint, InputError, demo_vae_path, log, read_checkpoint
from ..engine.checkpoints import quantised
from ..engine.errors import one_line
from ..engine.extras.convert.quantize import PLAIN, TYPES
from ..engine.families import by_file, detect
from ..engine.loader import sizes
from ..engine.network.architecture import Architecture
from ..engine.planning.meta import meta_model
from .panel import KNOWN

#: Kinds of folders of the host's models that hold VAEs. The second one is for tiny VAEs and previews.
FOLDERS = "vae", "vae_approx"
#: Formats the engine reads; the host's own list leaves .gguf out and has pickled files, which are never opened.
SUFFIXES = (".safetensors", ".sft", ".gguf")
#: Name of the VAE that comes with the pack, in the loader's list.
DEMO = "demo (small)"
#: The longest time that the list of files waits for the headers of new ones.
SECONDS = 0.5
#: Rank of files that the engine cannot run; video VAEs have 0, image VAEs 1.
_FOREIGN = 2
#: Characters of a file's name before the counter; file systems take 255 bytes, counter and suffix among them.
MOST_CHARACTERS = 150
DEFAULT_TYPE = "safetensors f16"
#: Widget value of Save -> (file suffix, type of the weights). Only GGUF can hold block types.
SAVE_TYPES = {
    **{f"safetensors {t}": (".safetensors", t) for t in PLAIN},
    **{f"gguf {t}": (".gguf", t) for t in TYPES},
}

# Headers are read in a thread of their own: a folder of many large files must not hold up the server.
_reader = ThreadPoolExecutor(1, "zerowaste-headers")
_read: set[tuple[str, int, int]] = set()


def vae_files() -> list[str]:
    """Return the files of models/vae (all its configured folders) that the engine can read, as the host names them, and
    those of models/vae_approx whose names tell a family."""
    found = {name for kind, name in _in_folders(SUFFIXES) if kind == FOLDERS[0] or by_file(name) is not None}
    return sorted(found)


def all_files(suffixes: tuple[str, ...] = SUFFIXES) -> list[str]:
    """Return all files of models/vae and models/vae_approx with one of these endings, as the host names them."""
    return sorted({name for _, name in _in_folders(suffixes)})


def _in_folders(suffixes: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield (kind of folder, name) of the files with one of these endings."""
    for kind in FOLDERS:
        for folder in folder_paths.get_folder_paths(kind):
            names, _ = folder_paths.recursive_search(folder, excluded_dir_names=[".git"])
            yield from ((kind, name) for name in names if os.path.splitext(name)[1].lower() in suffixes)


def without_folders(text: str) -> str:
    """Return a message without the host's folders: files are named as the host lists them."""
    named = {folder: "" for kind in (*FOLDERS, "checkpoints") for folder in folder_paths.get_folder_paths(kind)}
    named |= {folder_paths.get_output_directory(): "output/", folder_paths.get_temp_directory(): "temp/"}
    named |= {folder_paths.get_input_directory(): "input/", str(Path(__file__).resolve().parents[1]): ""}
    for folder in sorted(named, key=len, reverse=True):
        for written in {folder, os.path.realpath(folder)}:
            text = text.replace(written + os.sep, named[folder])
    return text


def forget_folders(error: Exception) -> None:
    """Write an error's message anew, without the host's folders; the system's errors name their files apart from it."""
    error.args = tuple(without_folders(part) if isinstance(part, str) else part for part in error.args)
    for name in ("strerror", "filename", "filename2") if isinstance(error, OSError) else ():
        if isinstance(part := getattr(error, name), (str, os.PathLike)):
            setattr(error, name, without_folders(str(part)))


def temporary_file(suffix: str) -> Path:
    """Return the path of a new file in the folder that the host empties when it starts and ends."""
    folder = Path(folder_paths.get_temp_directory())
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"zerowaste_{secrets.token_hex(6)}{suffix}"


def output_file(prefix: str, suffix: str) -> Path:
    """Return the path of a new file in the output folder, named and counted as the host's own saving nodes do."""
    output = folder_paths.get_output_directory()
    prefix = dated(without_suffix(prefix), datetime.now())
    check_prefix(Path(output), prefix)
    try:
        folder, name, counter, _, _ = folder_paths.get_save_image_path(prefix, output)
    except OSError as error:
        raise InputError(f"filename_prefix={prefix!r}: no folder for it can be made ({error.strerror})") from error
    return Path(folder, f"{name}_{counter:05}_{suffix}")


def path_of(name: str) -> Path:
    """Return the path of a file of `listed`."""
    if name == DEMO:
        return demo_vae_path()
    first, second = FOLDERS
    try:
        return Path(folder_paths.get_full_path_or_raise(first, name))
    except FileNotFoundError:
        with suppress(FileNotFoundError):
            return Path(folder_paths.get_full_path_or_raise(second, name))
        raise


def listed() -> list[str]:
    """Return the files of models/vae, video VAEs first, then image VAEs, then files the engine cannot run; tell the
    planner about them.

    The demo VAE stands before files that cannot run: the first entry is the default of a new node.
    """
    files = vae_files()
    read = _reader.submit(_learn_all, [*files, DEMO])
    # Headers are read within milliseconds; a slow disk's come with the next list.
    wait([read], SECONDS)
    ranks = {name: _rank(name) for name in files}
    runs = sorted((name for name in files if ranks[name] < _FOREIGN), key=ranks.__getitem__)
    return [*runs, DEMO, *(name for name in files if name not in runs)]


def learn_checkpoint(name: str) -> None:
    """Tell the planner about the VAE in a file of models/checkpoints, if `name` is one that it does not know yet."""
    if name not in KNOWN and name in folder_paths.get_filename_list("checkpoints"):
        _learn(name, Path(folder_paths.get_full_path_or_raise("checkpoints", name)))


def learnt(name: str) -> tuple[Architecture, object] | None:
    """Return architecture and sizes of the VAE in a file of these folders, by its header; None for other files."""
    with suppress(OSError):  # removed since it was listed
        _learn(name, path_of(name))
    return KNOWN.find(name)


def _rank(name: str) -> int:
    """Return the rank by the file's header, or before that was read by its name."""
    architecture = (KNOWN.find(name) or [None])[0] if name in KNOWN else by_file(name)
    return _FOREIGN if architecture is None else int(architecture.still)


def _learn_all(names: list[str]) -> None:
    for name in names:
        learnt(name)


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
            config = sizes(architecture, shapes, header)
            KNOWN.learn(name, architecture.of(config), config)
            KNOWN.learn_quantised(name, *_quantised(header, architecture, config))
    except Exception as error:  # one strange file must not keep the others from being read
        log.debug(f"{name}: no plans before it is loaded ({error})")


def _quantised(header: Checkpoint, architecture: Architecture, config: object) -> tuple[bool, bool]:
    """Return (the file has int8 codes to multiply, only this pack's loader reads its codes)."""
    if architecture.coded or not quantised(header.tensors):
        codes = any(t.dtype == torch.int8 for t in header.tensors.values())
        return codes and architecture.coded, False
    values = {key: t.numel() for key, t in meta_model(architecture, config).state_dict().items()}
    return False, KNOWN.forgetful or any(values.get(key, t.numel()) != t.numel() for key, t in header.tensors.items())


def without_suffix(prefix: str) -> str:
    """Return a prefix without the suffix of a file, which is added anyway."""
    added = next((len(suffix) for suffix in SUFFIXES if prefix.lower().endswith(suffix)), 0)
    return prefix[: len(prefix) - added]


def dated(prefix: str, now: datetime) -> str:
    """Return a prefix with its %date:FORMAT% filled in as ComfyUI's frontend does for its own nodes: d, dd, M, MM, yy,
    yyyy, h, hh, m, mm, s and ss stand for numbers, everything else for itself."""

    def filled(found: re.Match[str]) -> str:
        part = found.group()
        if part[0] == "y":
            return f"{now.year:04}"[-len(part) :]
        number = {"d": now.day, "M": now.month, "h": now.hour, "m": now.minute, "s": now.second}[part[0]]
        return f"{number:0{len(part)}}"

    return re.sub(r"%date:([^%]*)%", lambda date: re.sub(r"yyyy|yy|dd?|MM?|hh?|mm?|ss?", filled, date[1]), prefix)


def check_prefix(output: Path, prefix: str) -> None:
    """Refuse a prefix that names no file, or one outside `output` (through links as well). Raises InputError.

    What any system takes for something else than a name is refused by its text, on every system: to resolve
    `\\\\server\\share` is to call that server."""
    if not prefix.isprintable():
        raise InputError(f"filename_prefix={prefix!r}: line breaks and control characters cannot be in a file's name")
    parts = re.split(r"[/\\]", prefix)
    if prefix[:1] in ("/", "\\") or ".." in parts:
        raise InputError(f"filename_prefix={prefix!r} leads out of the output folder: write a name, or folder/name")
    if found := re.search(r'[:*?"<>|]', prefix):
        raise InputError(f"filename_prefix={prefix!r}: Windows takes no {found[0]} in a file's name; leave it out")
    # Windows drops dots and spaces at the end; the file's name goes on with a counter.
    if any(part != "." and part.endswith((".", " ")) for part in parts[:-1]):
        raise InputError(f"filename_prefix={prefix!r}: a folder's name cannot end with a dot or a space on Windows")
    for part in parts:
        name = part.partition(".")[0].rstrip(" ").lower()
        if re.fullmatch(r"con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]", name):
            raise InputError(f"filename_prefix={prefix!r}: {part} is a device on Windows; choose another name")
    longest = max(len(part.encode()) for part in parts)
    if longest > MOST_CHARACTERS:
        raise InputError(
            f"filename_prefix={prefix[:40]!r}... is too long: a name of {longest} bytes, and at most {MOST_CHARACTERS} "
            "leave room for the counter and the suffix"
        )
    try:
        folder, target = output.resolve(), (output / prefix).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"filename_prefix={prefix!r} is not a path on this system: {one_line(str(error))}") from error
    if target == folder:
        raise InputError(f"filename_prefix={prefix!r} names no file: write a name, or folder/name")
    if folder not in target.parents:
        raise InputError(f"filename_prefix={prefix!r} leads out of the output folder: write a name, or folder/name")
