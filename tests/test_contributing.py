"""CONTRIBUTING.md and docs/architecture.md say what is so of the code."""

import ast
import re
import traceback
from itertools import pairwise
from pathlib import Path

from zerowaste_vae import load
from zerowaste_vae.engine.runtime import context as run

from .test_structure import ORDER, room

ROOT = Path(__file__).resolve().parent.parent
TEXT = "".join((ROOT / page).read_text("utf-8") for page in ("CONTRIBUTING.md", "docs/architecture.md"))
#: File and functions of a numbered line of the way from a decode to the kernel.
LINE = re.compile(r"^\d+\. `(engine/[\w/]+\.py)`((?:,? `\w+`)+):", re.M)


def way() -> list[tuple[str, str]]:
    return [(file, name) for file, names in LINE.findall(TEXT) for name in re.findall(r"\w+", names)]


def test_files_that_are_named_are_there():
    named = set(re.findall(r"`((?:engine|nodes|tests|tools|locales|web|\.ci)/[\w./*-]+)", TEXT))
    assert len(named) > 20
    assert [n for n in sorted(named) if "NAME" not in n and not any(ROOT.glob(n.rstrip("/")))] == []


def test_the_way_from_a_decode_to_the_kernel(vae_file, noise, monkeypatch):
    """Its files and their order are those of a stack, up to the call of the kernels, and from there those of their
    sources; it never enters a room above one that it has left."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    stacks, conv3d = [], run.conv3d

    def observed(*args, **options):
        stacks.append([(Path(f.filename).resolve(), f.name) for f in traceback.extract_stack()])
        return conv3d(*args, **options)

    monkeypatch.setattr(run, "conv3d", observed)
    load(vae_file, device="cpu").decode(noise(1, 16, 1, 2, 2))
    residual = next(s for s in stacks if any(f.match("ops/resnet.py") for f, _ in s))
    frames = [(f.relative_to(ROOT).as_posix(), name) for f, name in residual if f.is_relative_to(ROOT / "engine")]
    called = [p for p in way() if not p[0].startswith("engine/kernels")]
    assert list(dict.fromkeys(f for f, _ in frames)) == list(dict.fromkeys(f for f, _ in called))
    assert len({file for file, _ in way()}) <= 12 and len(called) >= 15
    assert [p for p in called if p not in frames] == []
    places = [ORDER.index(room(ROOT / file)) for file, _ in [*frames, *way()[len(called) :]]]
    assert places == sorted(places)
    kernels = [p for p in way() if p not in called]
    for (file, name), (_, later) in pairwise([next(p for p in called if p[1] == "product"), *kernels]):
        body = next(n for n in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))) if getattr(n, "name", "") == name)
        named = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(body)}
        # A kernel is launched by its name: "conv3d.conv_kernel".
        texts = {str(n.value).rpartition(".")[2] for n in ast.walk(body) if isinstance(n, ast.Constant)}
        assert later in named | texts, name
    assert f"def {kernels[-1][1]}(" in (ROOT / kernels[-1][0]).read_text("utf-8")
