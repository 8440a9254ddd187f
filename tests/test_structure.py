"""The rules of the house that a reader cannot check at a glance: who imports whom, where architectures are named."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(p for folder in ("engine", "nodes") for p in (ROOT / folder).rglob("*.py"))


def module_at(parts: tuple[str, ...]) -> Path | None:
    place = ROOT.joinpath(*parts)
    return next((p for p in (place.with_suffix(".py"), place / "__init__.py") if parts and p.is_file()), None)


@cache
def imports(path: Path) -> set[Path]:
    """Files of this package that a file imports, also inside functions and for types only."""
    found = set()
    package = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - node.level + 1] + tuple(filter(None, (node.module or "").split(".")))
        for alias in node.names:
            found.add(module_at((*base, alias.name)) or module_at(base))
    return found - {None, path}


def circles(arrows: dict) -> list[list]:
    """Groups of nodes that reach each other (Tarjan's strongly connected components, from each node)."""
    reach = {}
    for start in arrows:
        seen, waiting = set(), [start]
        while waiting:
            for target in arrows.get(waiting.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        reach[start] = seen
    groups = {frozenset(b for b in reach[a] if a in reach.get(b, ())) for a in arrows if a in reach[a]}
    return sorted(sorted(map(str, group)) for group in groups)


def room(path: Path) -> str:
    """The folder under engine/, engine/extras/ or nodes/ that a file is in, or the file itself where it is in none.
    What runs families' own components is a room of its own, which only the registry finds, by name."""
    parts = path.relative_to(ROOT).parts
    if parts[1] == "families" and "running" in parts:
        return "engine/families/*/running"
    return "/".join(parts[: 3 if parts[1] == "extras" else 2])


def test_no_files_import_each_other_in_a_circle():
    arrows = {path: imports(path) for path in FILES}
    assert sum(map(len, arrows.values())) > 100
    assert circles({str(a.relative_to(ROOT)): {str(b.relative_to(ROOT)) for b in bs} for a, bs in arrows.items()}) == []


def test_no_folders_import_each_other_in_a_circle():
    arrows: dict[str, set[str]] = {}
    for path in FILES:
        arrows.setdefault(room(path), set()).update({room(p) for p in imports(path)} - {room(path)})
    assert circles(arrows) == []


#: The rooms of the package, from the top down: a file imports from its own room and from those below it, no others.
ORDER = (
    "nodes", "engine/extras/cli", "engine/files", "engine/compat", "engine/extras/compat", "engine/extras/adapters",
    "engine/extras/bench", "engine/__init__.py", "engine/loader.py", "engine/vae.py", "engine/face.py",
    "engine/encoding.py", "engine/extras/distributed", "engine/extras/graphs", "engine/families/*/running",
    "engine/execution",
    "engine/extras/tuning", "engine/extras/residents", "engine/planning", "engine/extras/eight_bit",
    "engine/extras/media", "engine/extras/convert", "engine/extras/output", "engine/checkpoints", "engine/request.py",
    "engine/families", "engine/network", "engine/precision", "engine/options.py", "engine/runtime", "engine/report.py",
    "engine/extras/plain_memory", "engine/system", "engine/kernels", "engine/extras/__init__.py", "engine/log.py",
    "engine/errors.py",
)  # fmt: skip


def upward(arrows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The arrows between rooms that do not lead down."""
    return sorted((a, b) for a, b in arrows if a != b and ORDER.index(a) >= ORDER.index(b))


def test_imports_lead_down():
    """Within functions and for types, too."""
    place = {path: "nodes" if path.is_relative_to(ROOT / "nodes") else room(path) for path in FILES}
    assert set(place.values()) == set(ORDER)
    assert upward({(place[path], place[other]) for path in FILES for other in imports(path) if other in place}) == []


def test_an_arrow_up_is_found():
    up = ("engine/runtime", "engine/execution")
    assert upward([up, up[::-1], ("engine/kernels", "engine/kernels")]) == [up]


def test_few_files_lie_loose():
    assert len(list((ROOT / "engine").glob("*.py"))) <= 10


@pytest.mark.parametrize("arrows", [{"a": {"b"}, "b": {"c"}, "c": {"a"}}, {"a": {"a"}}])
def test_a_circle_is_found(arrows):
    assert circles(arrows) == [sorted(arrows)]


def test_comfy_imports():
    """A new release of ComfyUI is followed there; the others use its public node API, or nothing of it."""
    found = set()
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "comfy" in source else ():
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            modules += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            found |= {room(path) for module in modules if module.split(".")[0] == "comfy"}
    assert found == {"nodes/fit.py", "nodes/host.py", "nodes/residents.py", "nodes/services.py"}


# -- where architectures are named ------------------------------------------------------------------------------------

# Those with a file of their own, what Wan is called elsewhere, and one that is not run.
FAMILIES = {re.match("[a-z]+", p.stem)[0] for p in (ROOT / "engine/families").glob("[a-z]*")} - {"registry"}
FAMILY = re.compile(rf"({'|'.join(sorted(FAMILIES | {'taehv', 'qwen'}))})(video)?\d*")
#: A string of more words than this is a sentence for people.
NAME_WORDS = 3


def names_in(tree: ast.AST) -> Iterator[str]:
    """Identifiers, imported modules, and strings that are no sentences: names of things rather than words on them."""
    alone = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in alone and len(node.value.split()) <= NAME_WORDS:
                yield node.value
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (alias.name for alias in node.names)
        else:
            found = (getattr(node, a, None) for a in ("id", "attr", "arg", "name"))
            yield from (name for name in found if isinstance(name, str))


def families_in(source: str) -> set[str]:
    words = (w for name in names_in(ast.parse(source)) for w in re.findall(r"[a-z]+\d*", name.lower()))
    return {word for word in words if FAMILY.fullmatch(word)}


def test_architecture_names():
    """Everything else asks the registry, so that a new family costs one file. Packs of others bear a family's name."""
    rooms = {"engine/families", "engine/families/*/running", "engine/extras/compat", "engine/extras/adapters",
             "nodes/foreign.py"}  # fmt: skip
    found = {str(p.relative_to(ROOT)): families_in(p.read_text("utf-8")) for p in FILES if room(p) not in rooms}
    assert {path: families for path, families in found.items() if families} == {}
    assert families_in((ROOT / "engine/families/registry.py").read_text("utf-8")) >= {"seedvr2", "wan21", "mochi"}


@pytest.mark.parametrize(
    "source",
    [
        "from ..families import wan", "from ..families.seedvr2 import Config", "import seedvr2", "WAN21 = 1",
        "x.hunyuanvideo", "if vae.arch == 'wan2.1': pass", "def load_ltx(): pass", "f(qwen=1)", "title = 'Wan 2.1'",
    ],
)  # fmt: skip
def test_a_name_of_an_architecture_is_found(source):
    assert families_in(source)


@pytest.mark.parametrize("source", ["'As SeedVR2.'", "wanted = 1", "help('Loads VAEs of Wan and SeedVR2')", "# wan"])
def test_architecture_words(source):
    """Words about architectures may be anywhere."""
    assert not families_in(source)


def test_loop_values():
    """Triton compiles `b = a` in front of a loop that assigns both to one value, and `a = b` inside it to nothing; its
    interpreter does not."""
    kernels = 0
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(source)) if "triton.jit" in source else ():
            if not isinstance(function, ast.FunctionDef) or "triton.jit" not in map(decorator, function.decorator_list):
                continue
            kernels += 1
            for loop in ast.walk(function):
                if not isinstance(loop, ast.For) or not ast.unparse(loop.iter).startswith("range("):
                    continue
                carried = {target for target, _ in assigned(loop)}
                twice = [f"{path.name}: {a} = {b}" for a, b in assigned(function, loop.lineno) if {a, b} <= carried]
                assert twice == []
    assert kernels > 10


def decorator(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node)


def assigned(node: ast.AST, before: int = 1 << 30) -> Iterator[tuple[str, str]]:
    """Names, of tuples too, and what they are assigned, above a line."""
    for each in ast.walk(node):
        if isinstance(each, ast.Assign) and each.lineno < before:
            for target in ast.walk(each.targets[0]):
                if isinstance(target, ast.Name):
                    yield target.id, ast.unparse(each.value)
