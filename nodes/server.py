"""ComfyUI's web server, where there is one: routes of the pack, and lines shown on the node that runs."""

from __future__ import annotations

import sys
from collections.abc import Callable

#: Name of the message that carries a line.
PROGRESS = "zerowaste_vae.progress"


def add_route(path: str, handler: Callable[..., object], method: str = "get") -> None:
    """Serve `path`; do nothing where no server runs (tests, scripts)."""
    if (server := _server()) is not None:
        getattr(server.routes, method)(path)(handler)


def busy() -> bool:
    """Return True if a workflow runs or waits to."""
    server = _server()
    return server is not None and server.prompt_queue.get_tasks_remaining() > 0


def say(text: str, node: str) -> None:
    """Show a line on a node (its status line, which web/js/runs.js fills); "" shows nothing."""
    if text and (server := _server()) is not None:
        server.send_sync(PROGRESS, {"node": node, "text": text}, server.client_id)


def _server() -> object | None:
    # Not imported here: importing it without running it would start half of ComfyUI.
    return getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
