"""Zero-Waste VAE Save: what it offers, where it may write, what it reports."""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
from datetime import datetime
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine import Checkpoint, InputError, load, read_checkpoint
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.extras.convert import save_checkpoint
from zerowaste_vae.engine.families import seedvr2

# ComfyUI's, which these tests need nothing of.
sys.modules.setdefault("folder_paths", ModuleType("folder_paths"))
from zerowaste_vae.nodes import files  # noqa: E402
from zerowaste_vae.nodes.files import (  # noqa: E402
    DEFAULT_TYPE,
    MOST_CHARACTERS,
    SAVE_TYPES,
    check_prefix,
    dated,
    without_suffix,
)


def test_every_choice_writes_a_file_that_loads(tmp_path, vae_file, vae):
    assert DEFAULT_TYPE in SAVE_TYPES
    source = read_checkpoint(vae_file)
    for choice, (suffix, kind) in SAVE_TYPES.items():
        path = tmp_path / f"{choice}{suffix}"
        save_checkpoint(Checkpoint(source.tensors, {"norm_num_groups": 4}), path, kind)
        copy = load(path, device="cpu")
        assert copy.model.config == vae.model.config
        same = all(map(torch.equal, copy.model.parameters(), vae.model.parameters()))
        assert same == (kind == "f32")


@pytest.mark.parametrize(
    "prefix", ["vae", "vae/name", "a/b/c", "./x", "a//b", "%year%-name", "vae/", "ü ñ", "a.b/.c", "common"]
)
def test_names_inside_the_output_folder(tmp_path, prefix):
    (tmp_path / "output").mkdir()
    check_prefix(tmp_path / "output", prefix)


@pytest.mark.parametrize(
    "prefix", ["", ".", "a/..", "..", "../x", "a/../../x", "/etc/x", "../output2/x", "a\nb", "a\0b", "a\x1b[0m"]
)
def test_other_names_are_refused_in_one_line(tmp_path, prefix):
    (tmp_path / "output").mkdir()
    with pytest.raises(InputError) as error:
        check_prefix(tmp_path / "output", prefix)
    assert repr(prefix) in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(("prefix", "why"), [
    *((prefix, "leads out of the output folder") for prefix in (
        r"\\server\share\x", "//server/share/x", r"\\?\C:\x", r"\\.\pipe\x", r"\x", "/x", "../output/name",
        r"a\..\..\x", r"..\x",
    )),
    *((prefix, f"Windows takes no {mark} in a file's name") for prefix, mark in (
        ("C:x", ":"), (r"C:\x", ":"), ("vae/my:vae", ":"), ("what?", "?"), ('a"b', '"'), ("a*b/c", "*"), ("a|b", "|"),
        ("a<b", "<"), ("a>b", ">"), (dated("%date:hh:mm:ss%", datetime(2026, 1, 1)), ":"),
    )),
    *((prefix, "is a device on Windows") for prefix in ("CON/x", "aux.d/x", "a/nul.txt", "com1", "LPT¹ .x")),
    *((prefix, "cannot end with a dot or a space") for prefix in ("a./x", "a /x", ".. /x", ".../x")),
])  # fmt: skip
def test_names_are_refused_by_their_text(tmp_path, monkeypatch, prefix, why):
    """On every system, and before anything is resolved: for a UNC path Windows would call its server."""
    monkeypatch.setattr(type(tmp_path), "resolve", lambda path, strict=False: pytest.fail(f"{path} is resolved"))
    with pytest.raises(InputError, match=re.escape(why)) as error:
        check_prefix(tmp_path, prefix)
    assert repr(prefix) in str(error.value) and str(error.value).isprintable()


def test_links_lead_nowhere_else(tmp_path):
    (tmp_path / "output").mkdir()
    try:
        os.symlink(tmp_path, tmp_path / "output" / "link", target_is_directory=True)
    except OSError:
        pytest.skip("links cannot be made here")
    with pytest.raises(InputError, match="out of the output folder"):
        check_prefix(tmp_path / "output", "link/name")
    check_prefix(tmp_path / "output", "link/output/name")


def test_days_and_times_are_filled_in():
    """As the frontend does for ComfyUI's own nodes; what is no %date:...% is the host's, or stands for itself."""
    now = datetime(2026, 3, 7, 4, 5, 9)
    assert dated("vae/%date:yyyy-MM-dd%/x_%date:hhmmss%", now) == "vae/2026-03-07/x_040509"
    assert dated("%date:yy.M.d h_m_s%", now) == "26.3.7 4_5_9"
    assert dated("%year%/plain date:yyyy", now) == "%year%/plain date:yyyy"


def test_names_of_files(tmp_path):
    assert without_suffix("a/b.Safetensors") == "a/b" and without_suffix("a.b/c") == "a.b/c"
    check_prefix(tmp_path, "x" * MOST_CHARACTERS)
    for name in ("x" * (MOST_CHARACTERS + 1), "folder/" + "名" * 51, "x" * 300 + "/y"):
        with pytest.raises(InputError, match="is too long"):
            check_prefix(tmp_path, name)


def test_headers_say_which_files_have_codes(tmp_path, shared, monkeypatch):
    """Int8 that products multiply; those that the host's loader does not follow. An overwritten file is read anew."""
    learnt = {}
    monkeypatch.setattr(files.KNOWN, "learn", lambda name, network, _: learnt.update(network=network.name))
    monkeypatch.setattr(files.KNOWN, "learn_quantised", lambda name, *holds: learnt.update({name: holds}))
    path, golden = tmp_path / "vae.safetensors", shared / "golden"
    layer = "decoder.mid_block.attentions.0.to_q"
    tensors = random_checkpoint(seedvr2.Config(None, (16, 16, 16, 16), norm_groups=4)).tensors
    for number, forgetful, columns in ((7, False, 16), (8, True, 16), (9, False, 8)):  # the last one in 4 bit
        codes = {f"{layer}.weight": torch.zeros(16, columns, dtype=torch.int8), f"{layer}.weight_scale": torch.ones(16)}
        save_file(tensors | codes, path, {"norm_num_groups": "4"})
        os.utime(path, ns=(number, number))
        monkeypatch.setattr(files.KNOWN, "forgetful", forgetful)
        files._learn("vae", path)
        assert learnt == {"network": "seedvr2", "vae": (False, forgetful or columns == 8)}
    for number, (source, expected) in enumerate([
        ("minimax_h3_int8/narrow", (True, False)), ("minimax_h3/minimax_h3", (False, False)),
    ]):  # fmt: skip
        shutil.copyfile(golden / f"{source}.weights.safetensors", path)
        os.utime(path, ns=(number, number))
        files._learn("vae", path)
        assert learnt == {"network": "minimaxh3", "vae": expected}


@pytest.mark.parametrize("make, said", [
    (lambda at: InputError(f"{at / 'a.mp4'}: exists"), "output/a.mp4: exists"),
    (lambda at: OSError(errno.ENOSPC, f"is full, remove {at / 'b'}", str(at / "a.mp4")),
     f"[Errno {errno.ENOSPC}] is full, remove output/b: 'output/a.mp4'"),
    (lambda at: FileNotFoundError(errno.ENOENT, "no", at / "a", None, at / "b"), "no: 'output/a' -> 'output/b'"),
    (lambda at: OSError(errno.ENOSPC, "is full"), f"[Errno {errno.ENOSPC}] is full"),
    (lambda at: KeyError(str(at / "a"), 3), "('output/a', 3)"),
    (lambda at: UnicodeDecodeError("utf-8", b"x", 0, 1, "no"), "can't decode byte 0x78 in position 0: no"),
])  # fmt: skip
def test_errors_name_no_folders(tmp_path, monkeypatch, make, said):
    """Also those of the system, which hold the names of files apart from their message."""
    monkeypatch.setattr(files.folder_paths, "get_folder_paths", lambda kind: [], raising=False)
    for kind in ("output", "input", "temp"):
        where = str(tmp_path / kind)
        monkeypatch.setattr(files.folder_paths, f"get_{kind}_directory", lambda at=where: at, raising=False)
    error = make(tmp_path / "output")
    files.forget_folders(error)
    assert str(error).endswith(said) and str(tmp_path) not in f"{error!r} {error}"


def test_tiny_vaes_of_the_other_folder(tmp_path, monkeypatch):
    """models/vae_approx holds previews of other kinds, too: files whose names tell a family are listed."""
    tiny = "taew2_1.safetensors", "taesd_decoder.safetensors", "taesd_decoder.pth", "other.safetensors"
    names = {"vae": ("mine.safetensors", "both.safetensors", "ae.ckpt"), "vae_approx": (*tiny, "both.safetensors")}
    for kind, found in names.items():
        (tmp_path / kind).mkdir()
        for name in found:
            (tmp_path / kind / name).touch()

    def full(kind: str, name: str) -> str:
        if not (tmp_path / kind / name).exists():
            raise FileNotFoundError(f"no {name} in {kind}")
        return str(tmp_path / kind / name)

    paths = files.folder_paths
    monkeypatch.setattr(paths, "get_folder_paths", lambda kind: [str(tmp_path / kind)], raising=False)
    monkeypatch.setattr(paths, "get_full_path_or_raise", full, raising=False)
    monkeypatch.setattr(paths, "recursive_search", lambda at, excluded_dir_names: (os.listdir(at), {}), raising=False)
    assert files.vae_files() == [
        "both.safetensors", "mine.safetensors", "taesd_decoder.safetensors", "taew2_1.safetensors"
    ]  # fmt: skip
    places = {name: files.path_of(name).parent.name for name in files.vae_files()}
    assert places == {"both.safetensors": "vae", "mine.safetensors": "vae", "taesd_decoder.safetensors": "vae_approx",
                      "taew2_1.safetensors": "vae_approx"}  # fmt: skip
    with pytest.raises(FileNotFoundError, match=r"no gone\.safetensors in vae$"):
        files.path_of("gone.safetensors")
