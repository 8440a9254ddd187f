"""The names of ComfyUI that this pack uses are the listed ones, and the hosts have them."""

from __future__ import annotations

import ast
import json
import re

import pytest
import running
from contract import ASKED, FRONTEND, HOSTS, PYTHON, ROOT, later, names, used_in_frontend, used_in_python

LOOK = """
import importlib, json, sys
wanted, sys.argv = json.loads(sys.stdin.read()), ["main.py", "--cpu"]
import comfy.options
comfy.options.enable_args_parsing()
def there(name):
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False
print("missing", json.dumps([name for name in wanted if not there(name)]))
"""


def test_every_name_of_comfyui_is_listed():
    assert used_in_python() == names(PYTHON).keys()


def test_every_name_of_the_frontend_is_listed():
    assert used_in_frontend() == names(FRONTEND).keys()


@pytest.mark.host
@pytest.mark.parametrize("host", HOSTS)
def test_the_hosts_have_the_names_that_were_seen_in_them(host, request):
    """An older one lacks the later ones: else they would be listed as older."""
    places = request.getfixturevalue("newer_places") if host == "newer" else getattr(running, host)()
    printed = running.printed(places, LOOK, given=json.dumps(list(names(PYTHON))))
    assert json.loads(printed.rsplit("missing ", 1)[1]) == later(host)


def test_what_hosts_ask_of_our_vae_is_there():
    """Methods with the arguments named, or attributes of the class; those set in __init__ count."""
    sources = {name: ast.parse((ROOT / "nodes" / f"{file}.py").read_text()) for name, file in (
        ("EngineVAE", "host"), ("_Patcher", "host"), ("Direct", "networks"))}  # fmt: skip
    for asked in re.findall(r"\S+", " ".join(text for *_, text in ASKED)):
        kind, name, argument = re.fullmatch(r"(\w+)\.(\w+)(?:\(\*{0,2}(\w+)\))?", asked).groups()
        (made,) = [n for n in sources[kind].body if isinstance(n, ast.ClassDef) and n.name == kind]
        calls = [n for n in made.body if isinstance(n, ast.FunctionDef) and n.name == name]
        if not calls:
            assert re.search(rf"\b(self\.)?{name}\b.* = ", ast.unparse(made)), asked
        elif argument:
            given = calls[0].args
            assert argument in {one.arg for one in (*given.args, *([given.kwarg] if given.kwarg else []))}, asked
