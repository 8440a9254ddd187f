"""What fills a point of the core has all that the core asks for there, and a point asks for little."""

import inspect

import pytest
from zerowaste_vae.engine.encoding import Notes, Several
from zerowaste_vae.engine.errors import InputError
from zerowaste_vae.engine.execution.reuse import Recorder, Replay
from zerowaste_vae.engine.extras import POINTS
from zerowaste_vae.engine.planning.cost import Tuned
from zerowaste_vae.engine.precision.policies import Fixed, Policies
from zerowaste_vae.engine.system.extension import fill, needed, provider

#: Point -> what its module has, and the Protocol of that ("": of the module itself).
ASKED = {
    "devices": {"": Several}, "notes": {"": Notes}, "operands": {"Mixed": Policies}, "replay": {"Recorder": Recorder},
    "schedules": {"": Tuned},
}  # fmt: skip


def methods(protocol):
    return {name: value for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"}


@pytest.mark.parametrize(("point", "name"), [(point, name) for point, has in ASKED.items() for name in has])
def test_what_fills_a_point(point, name):
    protocol, module = ASKED[point][name], provider(point)
    has = getattr(module, name) if name else module
    assert 1 <= len(methods(protocol)) <= 4
    for method, asked in methods(protocol).items():
        given = set(inspect.signature(getattr(has, method)).parameters)
        assert set(inspect.signature(asked).parameters) - {"self"} <= given, method


def test_other_names_that_the_core_asks_for():
    assert callable(provider("replay").why_not_on) and callable(provider("operands").Store)
    assert set(ASKED) == set(POINTS) and len(methods(Replay)) <= 4
    assert set(methods(Policies)) <= set(dir(Fixed))


def test_a_point_that_nothing_fills():
    assert provider("weather") is None
    with pytest.raises(InputError, match="point weather"):
        needed("weather")


def test_a_module_is_imported_when_it_is_asked_for():
    fill({"climate": "zerowaste_vae.engine.extras.missing"})
    with pytest.raises(ModuleNotFoundError):
        provider("climate")
    fill({"climate": "json"})
    assert provider("climate").loads("1") == 1
