"""Answers to requests that cannot be read, in the words and the shape that each client library expects.

SGLang's own texts for these show file paths of the server and run to pages; ours name the field and what is
wrong with it.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

MAX_PROBLEMS = 5
_READING = "solve_dependencies"  # the function of FastAPI in which a request is read and validated


def install(app: FastAPI) -> None:
    """Puts our handlers in place of the ones that `app` has; it must not have served yet."""

    async def unreadable(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return answer(request.url.path, 400, describe(error.errors()))

    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        if not raised_while_reading(error):
            raise error
        return answer(request.url.path, 400, f"the request does not have the expected shape: {error}")

    app.add_exception_handler(RequestValidationError, unreadable)
    for kind in (AttributeError, KeyError, TypeError, RecursionError):
        app.add_exception_handler(kind, unexpected)


def answer(path: str, status: int, message: str) -> JSONResponse:
    """An error of a client's request to `path`."""
    return JSONResponse(body(path, status, message), status)


def body(path: str, status: int, message: str) -> dict[str, Any]:
    """The error object of the API that `path` belongs to: Anthropic's, OpenAI's newer, or SGLang's own."""
    if path.startswith("/v1/messages"):
        kind = {503: "overloaded_error"}.get(
            status, "api_error" if status >= 500 else "invalid_request_error"
        )
        return {"type": "error", "error": {"type": kind, "message": message}}
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": status}
    if path.startswith("/v1/responses"):
        return {"error": error}
    return {"object": "error", **error}


def describe(problems: Iterable[Mapping[str, Any]]) -> str:
    """One line from FastAPI's list of problems, without the alternatives of one field that say the same."""
    lines = list(dict.fromkeys(_line(problem) for problem in problems))
    more = f"; and {len(lines) - MAX_PROBLEMS} more" if len(lines) > MAX_PROBLEMS else ""
    return "invalid request: " + "; ".join(lines[:MAX_PROBLEMS]) + more


def raised_while_reading(error: BaseException) -> bool:
    """Whether a request's content tripped a validator, as against an error while it was worked on."""
    return any(frame.name == _READING for frame in traceback.extract_tb(error.__traceback__))


def _line(problem: Mapping[str, Any]) -> str:
    where = ".".join(str(part) for part in problem.get("loc", ()) if part != "body")
    if problem.get("type") == "json_invalid":
        reason = problem.get("ctx", {}).get("error", "")
        return f"the body is not JSON: {reason} at character {where}"
    text = str(problem.get("msg", "not valid"))
    return f"{where}: {text}" if where else text
