"""One copy of the package in ComfyUI's process: ComfyUI loads the pack's folder under a name of its own, and `import
zerowaste_vae`, by another pack or by a script in the same process, finds that one and no second."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

NAME = "zerowaste_vae"


class Alias(MetaPathFinder, Loader):
    """Finds NAME and what is below it among the modules of a package that is loaded under another name."""

    def __init__(self, real: str) -> None:
        """real: the name under which the package is loaded."""
        self.real = real
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec of this loader for NAME and its modules; None for others."""
        return ModuleSpec(name, self) if name == NAME or name.startswith(f"{NAME}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of the real name, imported first where it is not yet."""
        try:
            module = import_module(self.real + spec.name[len(NAME) :])
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(self.real):
                raise
            raise ModuleNotFoundError(f"No module named {spec.name!r}", name=spec.name) from None
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Put the module's own spec back, which the import has replaced; the module has run already."""
        module.__spec__ = self._specs.pop(module.__spec__.name)


def share(real: str) -> None:
    """Let `import zerowaste_vae` find the package that is loaded as `real`, unless it is or has a copy already."""
    if real != NAME and NAME not in sys.modules and not any(isinstance(one, Alias) for one in sys.meta_path):
        sys.meta_path.insert(0, Alias(real))
