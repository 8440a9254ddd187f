"""Zero-Waste VAE Save: what it offers, where it may write, what it reports."""

from __future__ import annotations

import os
import shutil
import sys
from datetime import datetime
from pathlib import Path
from types import ModuleType

import pytest
import torch
from zerowaste_vae.engine import Checkpoint, InputError, load, read_checkpoint
from zerowaste_vae.engine.checkpoints import save_checkpoint

# ComfyUI's, which these tests need nothing of.
sys.modules.setdefault("folder_paths", ModuleType("folder_paths"))
from zerowaste_vae.nodes import files  # noqa: E402
from zerowaste_vae.nodes.files import (  # noqa: E402
    DEFAULT_TYPE,
    MOST_CHARACTERS,
    SAVE_TYPES,
    check_prefix,
    dated,
    describe,
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


@pytest.mark.parametrize("prefix", ["vae", "vae/name", "a/b/c", "../output/name", "%year%-name", "vae/", "ü ñ"])
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


def test_links_lead_nowhere_else(tmp_path):
    (tmp_path / "output").mkdir()
    try:
        os.symlink(tmp_path, tmp_path / "output" / "link", target_is_directory=True)
    except OSError:
        pytest.skip("links cannot be made here")
    with pytest.raises(InputError, match="out of the output folder"):
        check_prefix(tmp_path / "output", "link/name")
    check_prefix(tmp_path / "output", "link/output/name")


def test_report_gives_size_and_share_of_f16(tmp_path):
    """2^20 values in q8_0: 34 bytes per 32 of them instead of 64."""
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).half()
    checkpoint = Checkpoint({"layer.weight": weight})
    result = save_checkpoint(checkpoint, tmp_path / "x.gguf", "q8_0")
    line = describe(result, checkpoint, 1.234)
    assert line == f"{Path(tmp_path, 'x.gguf')}: q8_0, 1.1 MiB, 53.1% of f16, written and read back in 1.23 s"


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


def test_headers_say_which_files_have_int8_codes(tmp_path, shared, monkeypatch):
    """An overwritten file is read anew."""
    learnt = {}
    monkeypatch.setattr(files.KNOWN, "learn", lambda name, network, _: learnt.update(network=network.name))
    monkeypatch.setattr(files.KNOWN, "learn_quantised", lambda name, quantised: learnt.update({name: quantised}))
    path, golden = tmp_path / "vae.safetensors", shared / "golden"
    for number, (source, expected) in enumerate([
        ("minimax_h3_int8/narrow", True), ("minimax_h3/minimax_h3", False),
    ]):  # fmt: skip
        shutil.copyfile(golden / f"{source}.weights.safetensors", path)
        os.utime(path, ns=(number, number))
        files._learn("vae", path)
        assert learnt == {"network": "minimaxh3", "vae": expected}
