"""ComfyUI's web server, where there is one: routes of the pack, and lines shown on the node that runs."""

from __future__ import annotations

import sys
from collections.abc import Callable

#: Name of the message that carries a line.
PROGRESS = "zerowaste_vae.progress"


def add_route(path: str, handler: Callable[..., object]) -> None:
    """Serve GET `path`; nothing where no server runs (tests, scripts)."""
    if (server := _server()) is not None:
        server.routes.get(path)(handler)


def say(text: str, node: str) -> None:
    """Show a line on a node (its status line, which web/js/runs.js fills); "" says nothing."""
    if text and (server := _server()) is not None:
        server.send_sync(PROGRESS, {"node": node, "text": text}, server.client_id)


def _server() -> object | None:
    # Never imported here: importing it without running it would start half of ComfyUI.
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
