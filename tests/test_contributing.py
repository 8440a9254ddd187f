"""CONTRIBUTING.md and docs/architecture.md say what is so of the code."""

import ast
import re
import traceback
from itertools import pairwise
from pathlib import Path

from zerowaste_vae import load
from zerowaste_vae.engine.runtime import run

ROOT = Path(__file__).resolve().parent.parent
TEXT = "".join((ROOT / page).read_text("utf-8") for page in ("CONTRIBUTING.md", "docs/architecture.md"))
#: File and functions of a numbered line of the way from a decode to the kernel.
LINE = re.compile(r"^\d\. `(engine/[\w/]+\.py)`((?:,? `\w+`)+):", re.M)


def way() -> list[tuple[str, str]]:
    return [(file, name) for file, names in LINE.findall(TEXT) for name in re.findall(r"\w+", names)]


def test_files_that_are_named_are_there():
    named = set(re.findall(r"`((?:engine|nodes|tests|tools|locales|web|\.ci)/[\w./*-]+)", TEXT))
    assert len(named) > 20
    assert [n for n in sorted(named) if "NAME" not in n and not any(ROOT.glob(n.rstrip("/")))] == []


def test_the_way_from_a_decode_to_the_kernel(vae_file, noise, monkeypatch):
    """As a stack has it up to the call of the kernels, and from there as their sources have it."""
    monkeypatch.setattr("zerowaste_vae.engine.execution.core.why_off", lambda *_: None)
    stacks, conv3d = [], run.conv3d

    def observed(*args, **options):
        stacks.append([(Path(f.filename).as_posix(), f.name) for f in traceback.extract_stack()])
        return conv3d(*args, **options)

    monkeypatch.setattr(run, "conv3d", observed)
    load(vae_file, device="cpu").decode(noise(1, 16, 1, 2, 2))
    called = [p for p in way() if not p[0].startswith("engine/kernels")]
    assert len({file for file, _ in way()}) == 8 and len(called) >= 10
    residual = next(s for s in stacks if any("ops/resnet" in f for f, _ in s))
    frames = iter(residual)
    missing = [p for p in called if not any(f.endswith(p[0]) and name == p[1] for f, name in frames)]
    assert missing == []
    kernels = [p for p in way() if p not in called]
    for (file, name), (_, later) in pairwise([*called[-1:], *kernels]):
        body = next(n for n in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))) if getattr(n, "name", "") == name)
        named = {getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(body)}
        # A kernel is launched by its name: "conv3d.conv_kernel".
        texts = {str(n.value).rpartition(".")[2] for n in ast.walk(body) if isinstance(n, ast.Constant)}
        assert later in named | texts, name
    assert f"def {kernels[-1][1]}(" in (ROOT / kernels[-1][0]).read_text("utf-8")
