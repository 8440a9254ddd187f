"""Kernels compiled beside GPU tests begin in the order in which tests ask for them."""

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
