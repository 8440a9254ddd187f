"""Write locales/en/nodeDefs.json, the base of every translation, from the texts of the nodes in a running ComfyUI.

    python tools/base_locale.py http://127.0.0.1:8188
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent.parent / "locales" / "en" / "nodeDefs.json"


def base(nodes: dict[str, dict]) -> dict[str, Any]:
    """Return names and tooltips of this pack's nodes from a host's /object_info, in the form the frontend reads."""
    return {name: _texts(node) for name, node in nodes.items() if name.startswith("ZeroWaste")}


def _texts(node: dict) -> dict[str, Any]:
    tooltips = node.get("output_tooltips") or [None] * len(node["output_name"])
    outputs = zip(node["output_name"], tooltips, strict=True)
    return {
        "display_name": node["display_name"],
        "description": node["description"],
        "inputs": dict(_inputs(node["input"], "")),
        "outputs": {str(i): {"name": name, "tooltip": tip} for i, (name, tip) in enumerate(outputs)},
    }


def _inputs(spec: dict, prefix: str) -> Any:
    for name, (kind, *rest) in {**spec.get("required", {}), **spec.get("optional", {})}.items():
        options = rest[0] if rest else {}
        # The reason why a toggle is off on this machine is no text of the pack.
        tooltip = options.get("tooltip", "").partition(" Not in use here: ")[0]
        yield prefix + name, {"name": options.get("display_name", name), "tooltip": tooltip}
        if kind == "COMFY_DYNAMICCOMBO_V3":
            for option in options["options"]:
                # The frontend asks for nested ones with an underscore.
                yield from _inputs(option["inputs"], f"{name}_")


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit("usage: base_locale.py URL, such as http://127.0.0.1:8188")
    with urllib.request.urlopen(f"{sys.argv[1].rstrip('/')}/object_info", timeout=60) as answer:
        found = base(json.load(answer))
    FILE.write_text(json.dumps(found, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
