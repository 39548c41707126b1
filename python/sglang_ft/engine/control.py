"""GET and POST /ft/experts: what the expert cache does, and changes to it at a safe point. GET /ft/startup.

A request for the cache goes from the HTTP process to the scheduler, which answers between two batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from sglang.srt.entrypoints import http_server
from sglang.srt.managers import io_struct
from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.utils.auth import AuthLevel, auth_level
from sglang.utils import TypeBasedDispatcher

from sglang_ft import runtime, startup
from sglang_ft.engine.hook import Hook
from sglang_ft.errors import FtError


class ExpertsReqInput(io_struct.BaseReq, kw_only=True):  # type: ignore[call-arg]
    """`change`: JSON object of what to change; empty: only ask."""

    change: str = "{}"


class ExpertsReqOutput(io_struct.BaseReq, kw_only=True):  # type: ignore[call-arg]
    """`state`: JSON object; `error`: why nothing was changed."""

    state: str = "{}"
    error: str = ""


io_struct.hook_custom_types(ExpertsReqInput, ExpertsReqOutput)

Handler = Callable[[dict[str, Any]], dict[str, Any]]
"""Applies a change and returns the state. Raises FtError for a change that is not possible."""

router = APIRouter()


@router.get("/ft/experts")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_experts() -> Response:
    """Mode, slots and counters of the expert cache."""
    return await _ask({})


@router.get("/ft/startup")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def get_startup() -> Response:
    """What the start took: seconds in all and of each phase."""
    return _answer(200, runtime.read("startup"))


@router.post("/ft/experts")
@auth_level(AuthLevel.ADMIN_OPTIONAL)
async def post_experts(request: Request) -> Response:
    """Changes `moe_mode` (cache, hybrid or cpu) or, with `reset`, empties the slots and zeroes the counters."""
    try:
        change = orjson.loads(await request.body())
    except orjson.JSONDecodeError as e:
        return _answer(400, {"error": {"message": f"the body is not JSON: {e}"}})
    if not isinstance(change, dict):
        return _answer(400, {"error": {"message": "the body must be a JSON object"}})
    return await _ask(change)


async def _ask(change: dict[str, Any]) -> Response:
    manager = http_server.get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    request = ExpertsReqInput(change=orjson.dumps(change).decode())
    (output,) = await manager.ft_experts_communicator(request)
    if output.error:
        return _answer(400, {"error": {"message": output.error}})
    return Response(output.state, media_type="application/json")


def _answer(status: int, body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def main_hooks() -> list[Hook]:
    """For the HTTP process."""

    def communicators(result: Any, manager: Any, server_args: Any) -> None:
        communicator = FanOutCommunicator(manager._dispatch_to_scheduler, server_args.dp_size)
        manager.ft_experts_communicator = communicator
        manager._result_dispatcher += TypeBasedDispatcher([(ExpertsReqOutput, communicator.handle_recv)])

    http_server.app.include_router(router)
    return [
        Hook(
            "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators",
            HookType.AFTER,
            communicators,
            "(self, server_args)",
        )
    ]


def scheduler_hooks(handler: Handler) -> list[Hook]:
    """For the scheduler process; `handler` runs between two batches."""

    def handle(request: ExpertsReqInput) -> ExpertsReqOutput:
        try:
            return ExpertsReqOutput(state=orjson.dumps(handler(orjson.loads(request.change))).decode())
        except FtError as e:
            return ExpertsReqOutput(error=str(e))

    def dispatcher(result: Any, scheduler: Any) -> None:
        startup.mark("scheduler", in_scheduler=True)
        scheduler._request_dispatcher += TypeBasedDispatcher([(ExpertsReqInput, handle)])

    return [
        Hook(
            "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher",
            HookType.AFTER,
            dispatcher,
            "(self)",
        )
    ]
