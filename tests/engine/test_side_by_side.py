"""Kernels compiled beside GPU tests begin in the order in which tests ask for them."""

import re
from ast import literal_eval
from pathlib import Path
from types import SimpleNamespace

from .conftest import CHECKS, compile_one, jobs, run_own
from .execution.own_processes import PROCESSES
from .kernels.checks import PARTS
from .warm_kernels import CELLS


def item(name, file, *warm):
    module = SimpleNamespace(__name__=file[:-3], WARM=warm)
    return SimpleNamespace(name=name, path=Path(file), module=module, get_closest_marker=lambda _: None)


def test_what_tests_ask_for_first_begins_first():
    own = next(iter(PROCESSES))
    items = [item("a", "test_a_gpu.py", "mochi"), item("b", CHECKS), item(own, "test_c_gpu.py", "flux", "ltx")]
    first, *rest = jobs(items)
    assert first == (run_own, own)
    order = [argument if isinstance(argument, str) else argument[0] for _, argument in rest]
    assert order[:1] == ["mochi"] and order[1 : 1 + len(PARTS)] == list(PARTS)
    assert set(order[1 + len(PARTS) :][: order.count("flux") + order.count("ltx")]) == {"flux", "ltx"}
    assert {argument for work, argument in rest if work is compile_one} == set(CELLS)


def test_every_model_of_gpu_tests_is_compiled_beside_them():
    """A name that CELLS lacks ends the whole run before its first test."""
    wanted = {}
    for path in Path(__file__).parent.rglob("test_*.py"):
        if found := re.search(r"^WARM = (\(\"[^)]*\))$", path.read_text(encoding="utf-8"), re.M):
            wanted |= dict.fromkeys(literal_eval(found[1]), path.name)
    assert len(wanted) > 8 and not {name: file for name, file in wanted.items() if name not in {m for m, *_ in CELLS}}
