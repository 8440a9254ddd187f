"""The registry: every operator declares kernels that are there, and what it calls takes the same arguments."""

import ast
import inspect
from contextlib import nullcontext
from functools import cache
from importlib import util

import pytest
import torch
from zerowaste_vae.engine import families  # noqa: F401  their operators are known once they are imported
from zerowaste_vae.engine.kernels import launching, observe, operators, probe  # noqa: F401
from zerowaste_vae.engine.kernels.conv3d.arguments import NUMBERS, Arguments
from zerowaste_vae.engine.kernels.operators import OPERATORS, Takes, operator
from zerowaste_vae.engine.kernels.targets import FP8, capabilities

HALF = torch.float16
HERE = capabilities("a GPU", 80, (3, 6))


@cache
def tree(module):
    with open(util.find_spec(module).origin, encoding="utf-8") as file:
        return ast.parse(file.read())


def source(kernel):
    """The function's syntax tree. Its module is not imported, which would need Triton."""
    name = kernel.rpartition(".")[2]
    nodes = ast.walk(tree(launching.SOURCES[kernel]))
    return next((n for n in nodes if isinstance(n, ast.FunctionDef) and n.name == name), None)


def launched(module):
    """Kernels that a module launches, by name or by what makes the name."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "launcher":
            name = node.args[0]
            yield name.value if isinstance(name, ast.Constant) else ast.unparse(name)


def test_kernels_are_where_they_are_declared():
    assert len(launching.SOURCES) > 35
    for kernel in launching.SOURCES:
        assert source(kernel) is not None, kernel


def test_what_is_launched_is_declared():
    found = {name for one in OPERATORS.values() for name in launched(one.launch.__module__)}
    plain = {name for name in found if name.replace(".", "").isidentifier() and "." in name}
    assert len(plain) > 25 and plain <= launching.SOURCES.keys()


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_what_it_calls_takes_its_arguments(name):
    """The operator, its check and its reference name arguments alike, with the same defaults."""
    one = OPERATORS[name]
    own = dict(inspect.signature(one.launch).parameters)
    assert next(iter(own)) == "here" and one.__doc__
    places = [p.name for p in own.values() if p.kind == p.POSITIONAL_OR_KEYWORD][1:]
    for other in filter(None, (one.check, one.reference)):
        for i, p in enumerate(inspect.signature(other).parameters.values()):
            if p.kind == p.POSITIONAL_OR_KEYWORD and i < len(places):
                assert p.default == own[places[i]].default
            elif p.kind == p.KEYWORD_ONLY and p.name in own:
                assert p.default == own[p.name].default, p.name


@pytest.mark.parametrize("kernel", ["conv_kernel", "mma_kernel", "taps_kernel"])
def test_kernels_of_conv3d_have_one_order(kernel):
    """Behind their operands come the fields of `Arguments`, then constants."""
    names = [arg.arg for arg in source(f"conv3d.{kernel}").args.args]
    first = names.index("out")
    rest = first + len(Arguments._fields)
    assert tuple(names[first:rest]) == Arguments._fields and all(name.isupper() for name in names[rest:])
    assert names[names.index("slots") : rest] == NUMBERS


@pytest.mark.parametrize(
    ("dtype", "sizes", "word"),
    [
        (torch.float32, {}, "not torch.float32"), (HALF, {"head": 24}, "head is 24, and its kernels take 16 to 64 in"),
        (FP8, {"head": 32}, "no fp8 matrix instruction"), (HALF, {"head": 32}, "no tma here"),
    ],
)  # fmt: skip
def test_reasons(dtype, sizes, word):
    takes = Takes(HALF, FP8, has="tma", on={90: "a table"}, head=range(16, 65, 16))
    assert word in takes.why_not(dtype, HERE, **sizes)
    assert takes.why_not(HALF, capabilities("another", 90, (3, 6)), head=32) is None
    assert takes.why_not(HALF, head=32) is None
    assert "sm_100 has no kernel of its own" in takes.why_not(HALF, capabilities("a third", 100, (3, 6)), head=32)


@pytest.fixture
def twice(monkeypatch):
    """An operator whose kernels a GPU has."""
    monkeypatch.setattr(operators, "OPERATORS", {})
    monkeypatch.setattr(launching, "SOURCES", {})
    monkeypatch.setattr(operators, "kernels_for", lambda device, backend: None if backend == "reference" else HERE)

    def check(x, **_):
        if x.dim() != 1:
            raise ValueError("twice takes one dimension")

    @operator("twice_kernel", reference=lambda x, **_: "reference", check=check, takes=Takes(HALF, size=(4,)),
              sizes=lambda x, **_: {"size": len(x)})
    def twice(here, x, *, count=1):
        return here, count

    return twice


def test_a_call_finds_its_way(twice):
    x = torch.zeros(4, dtype=HALF)
    assert twice(x, count=2) == (HERE, 2) and twice(x, backend="reference") == "reference"
    assert twice(x.float()) == "reference" and twice(torch.zeros(5, dtype=HALF)) == "reference"
    with pytest.raises(RuntimeError, match="no kernel of twice: size is 5, and its kernels take 4"):
        twice(torch.zeros(5, dtype=HALF), backend="triton")
    with pytest.raises(ValueError, match="one dimension"):
        twice(x[None])
    with pytest.raises(TypeError, match="takes no counts"):
        twice(x, counts=2, backend="reference")
    assert twice.runs(x.device, HALF, size=4) and not twice.runs(x.device, HALF, size=8)
    assert list(launching.SOURCES) == [f"{__name__.rpartition('.')[0].rpartition('.')[2]}.twice_kernel"]


class OnSecond:
    """Stands for four numbers on the second GPU."""

    is_cuda, dtype, device, data = True, HALF, "cuda:1", property(lambda self: self)

    def __len__(self):
        return 4

    def dim(self):
        return 1

    def get_device(self):
        return 1


@pytest.mark.parametrize(("current", "entered"), [(0, [1]), (1, [])])
def test_kernels_run_on_the_device_of_their_tensors(twice, monkeypatch, current, entered):
    """It is made the current one where it is not: Triton launches on that."""
    seen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: seen.append(x.get_device()) or nullcontext())
    assert twice(OnSecond(), count=3) == (HERE, 3) and seen == entered


def test_a_profiler_sees_calls_by_name(twice):
    seen = []
    with observe.watching(lambda name, args, kwargs, call: seen.append((name, len(args), kwargs)) or call()):
        assert twice(torch.zeros(4, dtype=HALF), count=3) == (HERE, 3)
    assert seen == [("twice", 1, {"count": 3})]
