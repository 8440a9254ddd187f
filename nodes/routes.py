"""GET /zerowaste_vae/plan: the plan of a decode. Runs nothing on a GPU, and reads at most a listed file's header."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import torch
from aiohttp import web

from ..engine import InputError, log
from . import headers, host, server
from .planning import Question, answer

PATH = "/zerowaste_vae/plan"
#: Characters of a query, and questions that may wait; both far above what the panel needs.
MAX_QUERY, MAX_WAITING = 2048, 8

# Plans take up to seconds of one CPU core and must not hold up the server's loop; one at a time is enough.
_worker = ThreadPoolExecutor(1, "zerowaste-plan")
_waiting = 0


async def plan(request: web.Request) -> web.Response:
    """200 with the plan, also of a decode that does not fit; 400 on a malformed question; 429 if too many wait."""
    global _waiting
    if len(request.query_string) > MAX_QUERY or len(set(request.query)) != len(request.query):
        return _refused(400, f"a question has at most {MAX_QUERY} characters and each value once")
    try:
        question = Question.parse(request.query)
    except InputError as error:
        return _refused(400, str(error))
    if _waiting >= MAX_WAITING:
        return _refused(429, "the planner is busy: ask again later")
    _waiting += 1
    try:
        return web.json_response(await asyncio.wrap_future(_worker.submit(_answer, question)))
    except InputError as error:
        return _refused(400, str(error))
    finally:
        _waiting -= 1


# As the host runs nodes: a dry run sees other operators otherwise, and another peak.
@torch.inference_mode()
def _answer(question: Question) -> dict[str, object]:
    with log.silent():
        headers.learn_checkpoint(question.model)
        return answer(question, host.machine())


def register() -> None:
    """Offer the routes; the state they answer from is read now, not when they are asked."""
    host.machine()
    server.add_route(PATH, plan)


def _refused(status: int, reason: str) -> web.Response:
    return web.json_response({"error": reason}, status=status)
