"""The host's folders: the files of models/vae, and the places where results may be written."""

from __future__ import annotations

import os
import secrets
from datetime import datetime
from pathlib import Path

import folder_paths

from ..engine import InputError
from .saving import check_prefix, dated, without_suffix

#: Formats the engine reads; the host's own list leaves .gguf out and has pickled files, which are never opened.
SUFFIXES = (".safetensors", ".sft", ".gguf")


def vae_files() -> list[str]:
    """Return the files of models/vae (all its configured folders) that the engine can read, as the host names them."""
    found: set[str] = set()
    for folder in folder_paths.get_folder_paths("vae"):
        files, _ = folder_paths.recursive_search(folder, excluded_dir_names=[".git"])
        found.update(name for name in files if os.path.splitext(name)[1].lower() in SUFFIXES)
    return sorted(found)


def vae_file(name: str) -> Path:
    """Return the path of one of `vae_files`."""
    return Path(folder_paths.get_full_path_or_raise("vae", name))


def checkpoint_file(name: str) -> Path | None:
    """Return the path of a file of models/checkpoints, by the name the host lists it under; None where there is
    none."""
    listed = name in folder_paths.get_filename_list("checkpoints")
    return Path(folder_paths.get_full_path_or_raise("checkpoints", name)) if listed else None


def without_folders(text: str) -> str:
    """Return a message without the host's folders: files are named as the host lists them."""
    named = {folder: "" for kind in ("vae", "checkpoints") for folder in folder_paths.get_folder_paths(kind)}
    named |= {folder_paths.get_output_directory(): "output/", folder_paths.get_temp_directory(): "temp/"}
    named |= {folder_paths.get_input_directory(): "input/", str(Path(__file__).resolve().parents[1]): ""}
    for folder in sorted(named, key=len, reverse=True):
        for written in {folder, os.path.realpath(folder)}:
            text = text.replace(written + os.sep, named[folder])
    return text


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
