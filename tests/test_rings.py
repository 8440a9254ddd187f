"""The rings of the engine: extras import families and the core, families the core, and the core neither. What still
leads outward is listed here, and the list only gets shorter."""

import ast
import io
import re
import subprocess
import sys
import tokenize

import pytest

from .test_structure import FILES, ROOT, module_at

#: What is no ring's: the index of public names, and the documented doors to two folders of the extras.
OUTERMOST = ("__init__.py", "compat", "extras", "files")
#: The registry lists families; the core asks it.
REGISTRY = {ROOT / "engine/families" / name for name in ("__init__.py", "registry.py")}
OUTER = re.compile(r"[\w.]*\b(?:families|extras)\.[\w.]+")
CORE = ("execution", "planning", "network", "runtime", "kernels", "precision", "system", "checkpoints")
#: File -> what it takes from a ring outside its own. Nothing is added here: what the core needs it has, or asks for
#: through a registry.
OUTWARD = {
    "engine/planning/besides.py": "extras.plain_memory.allocator.Allocator",
    "engine/planning/dryrun.py": """
        extras.plain_memory.allocator.Allocator extras.plain_memory.allocator.Block
        extras.plain_memory.layouts.IN_PLACE extras.plain_memory.layouts.result
    """,
    "engine/planning/fused_walk.py": "extras.plain_memory.layouts.ByRules",
    "engine/planning/meta.py": "extras.plain_memory.layouts.ByRules",
}
#: Lines of code and files of the core when the rings were drawn; they only go down, to 12,500 lines in 110 files.
MOST_LINES, MOST_FILES = 16061, 185
DOCUMENTED = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
SPACE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def ring(path):
    """0: the core and the public face; 1: families; 2: extras, what lists the public names, and nodes."""
    top, inner = path.relative_to(ROOT).parts[:2]
    return 2 if top != "engine" or inner in OUTERMOST else int(inner == "families")


def outward():
    """{file: names that it takes from a ring outside its own}: imports, in functions and for types too, and modules
    that its strings name."""
    found = {}
    for path in FILES:
        names, package = set(), path.parent.relative_to(ROOT).parts
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) - node.level + 1] + tuple(filter(None, (node.module or "").split(".")))
                for alias in node.names:
                    target = module_at((*base, alias.name)) or module_at(base)
                    if target and ring(target) > ring(path) and target not in REGISTRY:
                        names.add(".".join((*base[1:], alias.name)))
            elif isinstance(node, ast.Constant) and OUTER.fullmatch(str(node.value)):
                names |= {node.value.strip(".")} if ring(path) < 1 + (".extras." in f".{node.value}") else set()
        if names:
            found[path.relative_to(ROOT).as_posix()] = sorted(names)
    return found


def pairs(found):
    return {(file, name) for file, names in found.items() for name in names}


def test_imports_lead_inward():
    """A name that no longer leads outward leaves the list."""
    found, listed = pairs(outward()), pairs({file: names.split() for file, names in OUTWARD.items()})
    assert sorted(found - listed) == []
    assert sorted(listed - found) == []


@pytest.mark.parametrize(("place", "line", "names"), [
    ("engine/network/chain.py", "from ..families import wan", ["families.wan"]),
    ("engine/network/chain.py", "from ..families import by_name", []),
    ("engine/network/chain.py", "def f():\n    from ..families.wan import Config", ["families.wan.Config"]),
    ("engine/vae.py", "import_module('.extras.media.mp4', __package__)", ["extras.media.mp4"]),
    ("engine/families/kl.py", "from ..extras.tuning import kept", ["extras.tuning.kept"]),
    ("engine/families/kl.py", "from ..network.program import Step", []),
    ("engine/extras/cli/plan.py", "from ...families.wan import Config", []),
    ("nodes/host.py", "from ..engine.extras.media import mp4", []),
])  # fmt: skip
def test_an_import_outward_is_found(monkeypatch, place, line, names):
    monkeypatch.setitem(globals(), "FILES", [ROOT / place])
    monkeypatch.setattr("pathlib.Path.read_text", lambda *_, **__: line)
    assert outward() == ({place: names} if names else {})


def code_lines(text):
    """Lines with code: neither empty, nor of comments or docstrings alone."""
    words = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            words |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SPACE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - words)


def test_the_core_only_shrinks(capsys):
    files = [path for room in CORE for path in (ROOT / "engine" / room).rglob("*.py")]
    lines = sum(code_lines(path.read_text(encoding="utf-8")) for path in files)
    with capsys.disabled():
        print(f"\nthe core: {len(files)} files, {lines} lines of code (aim: 110, 12500)")
    assert lines <= MOST_LINES and len(files) <= MOST_FILES


def test_lines_of_code():
    assert code_lines('"""Words\n\nand more."""\n\n# a comment\nx = 1  # one\ny = """\n2"""\n') == 3


#: Prints the extras that are loaded after an import, a decode and an encode, a line each, and a digest of the results.
RUN = """
import hashlib, sys, types
from pathlib import Path
import zerowaste_vae

if sys.argv[1] == "alone":  # a package whose extras fill nothing
    for name in [name for name in sys.modules if name.startswith("zerowaste_vae")]:
        del sys.modules[name]
    extras = sys.modules["zerowaste_vae.engine.extras"] = types.ModuleType("zerowaste_vae.engine.extras")
    extras.POINTS, extras.__path__ = {}, [str(Path(zerowaste_vae.__file__).parent / "engine/extras")]

def loaded():
    print(*sorted(name.split(".extras.")[1] for name in sys.modules if ".engine.extras." in name))

import torch
from zerowaste_vae import InputError, VideoVAE, demo_vae_path, load
loaded()
vae = load(demo_vae_path(), device="cpu")
for devices in (None, "auto", "all"):
    frames = vae.decode(torch.linspace(-1, 1, 16).view(1, 16, 1, 1, 1), devices=devices)
next(vae.stream(torch.zeros(1, 16, 1, 1, 1)))
loaded()
latent = vae.encode(frames)
loaded()
print(hashlib.sha256(frames.numpy().tobytes() + latent.numpy().tobytes()).hexdigest())
calls = lambda: load(demo_vae_path(), device="cpu", precision="int8"), lambda: vae.decode(latent, devices="cpu,cpu")
for refused in calls if sys.argv[1] == "alone" else ():
    try:
        refused()
    except InputError as error:
        print(error)
"""
#: What the core still takes.
TAKEN = {name.split(".")[1] for names in OUTWARD.values() for name in names.split() if name.startswith("extras.")}


def run(how):
    command = [sys.executable, "-c", RUN, how]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_run_of_one_vae_on_one_device_loads_no_extras():
    """An encode sets a note on its latents. Nor does the core need them: its frames are the same without."""
    *loaded, whole = run("whole")
    used = [[name for name in line.split() if name.split(".")[0] not in TAKEN] for line in loaded]
    assert used == [[], [], ["media", "media.latent_note"]]
    *loaded, alone, eight_bit, several = run("alone")
    assert not {name.split(".")[0] for line in loaded for name in line.split()} - TAKEN
    assert alone == whole
    assert "point operands" in eight_bit and "point devices" in several
