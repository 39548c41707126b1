"""SGLang's HTTP server on the socket that we hold since before loading, behind our /health."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import uvicorn
from sglang.srt.plugins.hook_registry import HookType

from sglang_ft import startup
from sglang_ft.api import errors
from sglang_ft.api.early import EarlyServer
from sglang_ft.api.health import HealthMiddleware
from sglang_ft.api.stream_refusals import StreamRefusals
from sglang_ft.engine.hook import Hook


def hooks(early: EarlyServer) -> list[Hook]:
    """Lets SGLang's uvicorn serve on the socket that `early` holds."""

    def run(original: Callable, app: Any, **options: Any) -> None:
        del original  # it would open a socket of its own
        startup.mark("tokenizer and HTTP server")
        app.add_middleware(HealthMiddleware)
        app.add_middleware(StreamRefusals)
        errors.install(app)
        server = uvicorn.Server(uvicorn.Config(app, **options))
        server.run(sockets=[early.hand_over()])

    return [Hook("uvicorn.run", HookType.AROUND, run, None)]
