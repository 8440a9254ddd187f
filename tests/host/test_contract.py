"""The names of ComfyUI that this pack uses are the listed ones, and the hosts have them."""

from __future__ import annotations

import json

import pytest
import running
from contract import FRONTEND, PYTHON, names, used_in_frontend, used_in_python

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
@pytest.mark.parametrize("host", ["newest", "oldest"])
def test_the_hosts_have_the_names_that_were_seen_in_them(host):
    """The oldest lacks the later ones: else they would be listed as older."""
    listed = names(PYTHON)
    printed = running.printed(getattr(running, host)(), LOOK, given=json.dumps(list(listed)))
    missing = json.loads(printed.rsplit("missing ", 1)[1])
    later = [name for name, version in listed.items() if version != "0.3.64"]
    assert missing == ([] if host == "newest" else later)
