"""Files of every family with one tensor renamed, dropped, doubled or transposed: refused in one line, or loaded as the
very network that the whole file gives, to the bit; an encoder may be lost, if that is said.

ZEROWASTE_LOAD_FUZZ sets the number of files (default 200; 2,000 for a longer run by hand).
"""

from __future__ import annotations

import json
import os
import random
import re
from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import save_file
from zerowaste_vae.engine import log
from zerowaste_vae.engine.errors import CheckpointError
from zerowaste_vae.engine.extras.bench.subject import random_checkpoint
from zerowaste_vae.engine.families import ARCHITECTURES
from zerowaste_vae.engine.loader import load

from ..checkpoints.test_shapes import wan_to_diffusers
from . import test_kl_attention, test_ltx_names, test_registry
from .small import SMALL

COUNT = int(os.environ.get("ZEROWASTE_LOAD_FUZZ", "200"))
#: Sizes of both halves where those of the decoder do not serve as the encoder's.
WHOLE = {
    "ltx": test_ltx_names.NEW, "wan2.2": replace(SMALL["wan2.2"], encoder_widths=(16, 32, 64, 64)),
    "minimaxh3": replace(SMALL["minimaxh3"], encoder_widths=(16,) * 6),
}  # fmt: skip
#: Other names of whole files: (family, original name -> another one).
DIALECTS = {
    "wan2.1-diffusers": ("wan2.1", wan_to_diffusers),
    "hunyuanvideo-diffusers": ("hunyuanvideo", test_registry.to_diffusers),
    "sd-diffusers": ("sd", test_kl_attention.to_diffusers),
    "ltx-diffusers": ("ltx", lambda n: test_ltx_names.to_diffusers(n, (test_ltx_names.UP, test_ltx_names.DOWN), False)),
}  # fmt: skip
FILES = [*SMALL, *DIALECTS]


def sizes(family):
    if family == "sd":
        return test_kl_attention.config(((2,), (2,)))
    config = WHOLE.get(family, SMALL[family])
    if "encoder_widths" in {f.name for f in fields(config)} and config.encoder_widths is None:
        return replace(config, encoder_widths=config.decoder_widths)
    return config


class Whole:
    """A file, and what it loads as."""

    def __init__(self, name, folder):
        family, rename = DIALECTS.get(name, (name, lambda n: n))
        architecture = next(a for a in ARCHITECTURES if a.name == family)
        made = random_checkpoint(sizes(family), architecture=architecture)
        self.path, self.tensors = folder / "a.safetensors", {rename(n): t for n, t in made.tensors.items()}
        self.metadata = {n: str(t) for n, t in made.metadata.items()}
        if family == "ltx":
            said = {"decoder_blocks": [], "upsample_residual": [False] * 4, "spatial_padding_mode": "zeros"}
            self.metadata["config"] = json.dumps({"vae": said})
        self.vae = self.loaded(self.tensors)
        assert self.vae.arch == family

    def loaded(self, tensors):
        save_file(tensors, self.path, self.metadata)
        return load(self.path, "fp32", "cpu")

    def is_same(self, vae):
        """Return whether a VAE decodes as this one, and encodes as it or not at all."""
        mine, other = self.vae.model.state_dict(), vae.model.state_dict()
        if not vae.can_encode and self.vae.can_encode:
            mine = {n: t for n, t in mine.items() if n in set(self.vae.model.names("decoder"))}
        same = mine.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in mine.items())
        programs = vae.arch == self.vae.arch and vae.model.decoder.program == self.vae.model.decoder.program
        return same and programs and (not vae.can_encode or vae.model.encoder.program == self.vae.model.encoder.program)


def other_name(rng, name):
    """Another name: of the next layer, of another part, in a container, or one that nobody has."""
    numbers = [m.span() for m in re.finditer(r"(?<=\.)\d+(?=\.)", name)]
    kind = rng.choice(["next", "leaf", "part", "prefix", "strange"])
    if kind == "next" and numbers:
        a, b = rng.choice(numbers)
        return f"{name[:a]}{int(name[a:b]) + rng.choice((1, 2, 7))}{name[b:]}"
    if kind == "leaf":
        stem, _, leaf = name.rpartition(".")
        new = rng.choice([f"{leaf}_old", "scale", "gamma", "weight_scale_inv", "weight", "bias"])
        return f"{stem}.{new}".lstrip(".")
    if kind == "part" and name.count(".") > 1:
        parts = name.split(".")
        at = rng.randrange(1, len(parts) - 1) if len(parts) > 2 else 0
        parts[at] += rng.choice(("2", "_new", ".inner"))
        return ".".join(parts)
    if kind == "prefix":
        return rng.choice(("vae.", "model.", "old.", "decoder.")) + name
    return f"{name.partition('.')[0]}.additional.{rng.randrange(9)}.weight"


def changed(rng, tensors):
    """Return (what was done, the tensors of the changed file)."""
    kind = rng.choice(["renamed", "dropped", "doubled", "transposed"])
    name = rng.choice(list(tensors))
    tensor, rest = tensors[name], {n: t for n, t in tensors.items() if n != name}
    if kind == "dropped":
        return f"{kind} {name}", rest
    if kind == "transposed":
        movable = [n for n, t in tensors.items() if len(set(t.shape)) > 1]
        name = rng.choice(movable)
        shape = tensors[name].shape
        pairs = [(i, j) for i in range(len(shape)) for j in range(i) if shape[i] != shape[j]]
        axes = rng.choice(pairs)
        return f"{kind} {name} {axes}", tensors | {name: tensors[name].transpose(*axes).contiguous()}
    new = other_name(rng, name)
    if kind == "renamed":
        return f"{kind} {name} to {new}", rest | {new: tensor}
    if new in tensors:
        new = f"{name}.{rng.randrange(9)}"
    return f"{kind} {name} as {new}", tensors | {new: tensor + 1}


@pytest.mark.parametrize("name", FILES)
def test_one_change(name, tmp_path, caplog):
    whole, bad, refused = Whole(name, tmp_path), [], 0
    shuffled = list(whole.tensors)
    random.Random(name).shuffle(shuffled)
    assert whole.is_same(whole.loaded({n: whole.tensors[n] for n in shuffled}))
    assert whole.is_same(whole.loaded({f"first_stage_model.{n}": t for n, t in whole.tensors.items()}))
    for seed in range(-(-COUNT // len(FILES))):
        rng = random.Random(f"{name} {seed}")
        done, tensors = changed(rng, whole.tensors)
        log._said.clear()
        caplog.clear()
        try:
            vae = whole.loaded(tensors)
        except CheckpointError as error:
            refused += 1
            if len(str(error).splitlines()) != 1:
                bad.append(f"{seed}: {done}: {error}")
            continue
        said = vae.can_encode or not whole.vae.can_encode or "encoder incomplete" in caplog.text
        if not said or not whole.is_same(vae):
            bad.append(f"{seed}: {done}: loaded as another network" if said else f"{seed}: {done}: nothing is said")
    assert not bad, "\n".join(bad)
    assert refused
