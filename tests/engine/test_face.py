"""A VAE object in a terminal, and where it cannot go."""

import copy
import pickle
import re
import rlcompleter

import pytest
from zerowaste_vae.engine.face import SHOWN


def test_repr_says_what_it_is(vae):
    assert repr(vae).startswith("<VideoVAE seedvr2, fp32 on cpu")


def test_dir_shows_documented_names_that_exist(vae):
    assert dir(vae) == sorted(SHOWN)
    assert all(hasattr(vae, name) for name in SHOWN)
    assert all(getattr(type(vae), name).__doc__ for name in SHOWN if callable(getattr(vae, name)))


def test_completion_shows_documented_names(vae):
    """As the Python shell completes, by the names of the object, its class and that class's bases."""
    completer, names = rlcompleter.Completer({"vae": vae}), []
    while (found := completer.complete("vae.", len(names))) is not None:
        names.append(found)
    assert [re.match(r"vae\.(\w+)", name)[1] for name in names] == sorted(SHOWN)
    assert {name for name in dir(type(vae)) if not name.startswith("_")} == set(SHOWN)


def test_pickling_is_refused_in_one_sentence(vae):
    with pytest.raises(TypeError, match="cannot be pickled: give other processes the file's path"):
        pickle.dumps(vae)


def test_copies_share_weights_or_have_their_own(vae):
    view, own = copy.copy(vae), copy.deepcopy(vae)
    assert view.model is vae.model and type(view) is type(vae)
    assert own.model is not vae.model
