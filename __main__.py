"""The console command, run as `python -m zerowaste_vae`, or as `python FOLDER` by the folder's path: a ComfyUI in whose
custom_nodes the folder lies needs no installation for it."""

import importlib.util
import sys
from pathlib import Path


def _as_package() -> None:
    """Import the folder of this file as the package `zerowaste_vae`: `python FOLDER` runs it as no package, with the
    folder among the places where modules are looked for, where `engine` would be one."""
    folder = Path(__file__).resolve().parent
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != folder]
    where = {"submodule_search_locations": [str(folder)]}
    spec = importlib.util.spec_from_file_location("zerowaste_vae", folder / "__init__.py", **where)
    module = sys.modules["zerowaste_vae"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


if __name__ == "__main__":
    if __package__:
        from .engine.extras.cli import main
    else:
        _as_package()
        from zerowaste_vae.engine.extras.cli import main
    sys.exit(main())
