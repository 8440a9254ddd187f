"""What the system refuses (to map, to read) is not taken for the file's fault."""

from __future__ import annotations

import builtins
import errno
import io
import os

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine.checkpoints import read_checkpoint
from zerowaste_vae.engine.errors import ZeroWasteError
from zerowaste_vae.engine.extras.cli import compare
from zerowaste_vae.engine.extras.eight_bit import prepared
from zerowaste_vae.engine.extras.media.latents import read_latent
from zerowaste_vae.engine.loader import demo_vae_path, load


@pytest.mark.parametrize("error", [
    OSError(errno.ENODEV, os.strerror(errno.ENODEV)), MemoryError("Cannot allocate memory (os error 12)"),
    RuntimeError("unable to mmap 84 bytes from file <a>: No such device (19)"),
])  # fmt: skip
def test_files_that_cannot_be_mapped(tmp_path, monkeypatch, error):
    """Some network shares cannot map files, and address space may be short for the file of a whole model."""

    def refuse(*_, **__):
        raise error

    save_file({"latent": torch.ones(1, 16, 1, 2, 2)}, tmp_path / "l.safetensors")
    save_file({"frames": torch.ones(1, 2, 4, 4, 3)}, tmp_path / "f.safetensors")
    prepared.save([torch.arange(4.0)], tmp_path / "p.safetensors", "mine")
    monkeypatch.setattr("safetensors.safe_open", refuse)
    assert load(demo_vae_path(), device="cpu").arch == "seedvr2"
    assert read_latent(tmp_path / "l.safetensors").shape == (1, 16, 1, 2, 2)
    assert len(list(compare.read(tmp_path / "f.safetensors"))) == 2
    (found,) = prepared.load([torch.zeros(4)], tmp_path / "p.safetensors", "mine", torch.device("cpu"))
    assert found.tolist() == [0, 1, 2, 3]
    assert prepared.load([torch.zeros(4)], tmp_path / "p.safetensors", "another", torch.device("cpu")) is None


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOMEM, errno.ESTALE])
def test_files_that_cannot_be_read(tmp_path, monkeypatch, code):
    """Their tensors are not damaged, and less memory for frames does not help."""
    path = tmp_path / "a.safetensors"
    save_file({"latent": torch.ones(1, 16, 1, 2, 2)}, path)
    opened = builtins.open

    class Failing(io.FileIO):
        def readinto(self, target):
            if len(target) > 64:
                raise OSError(code, os.strerror(code))
            return super().readinto(target)

    monkeypatch.setattr(builtins, "open", lambda name, *a: Failing(name) if name == path else opened(name, *a))
    for read in (read_checkpoint, read_latent):
        with pytest.raises(ZeroWasteError, match=rf"a.safetensors: .*cannot read .*: {os.strerror(code)}") as raised:
            read(path)
        assert "damaged" not in str(raised.value)
