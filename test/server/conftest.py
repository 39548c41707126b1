"""One server with the demo model, shared by all tests that only talk to it, and clients for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from serving import DEMO, Server, serving

CONTEXT_LENGTH = 4096


@pytest.fixture(scope="session")
def demo_server() -> Iterator[Server]:
    """Every test must leave it as it found it: running, idle, healthy."""
    with serving(DEMO, "--context-length", str(CONTEXT_LENGTH)) as server:
        yield server


@pytest.fixture(scope="session")
def openai_client(demo_server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=demo_server.url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def anthropic_client(demo_server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=demo_server.url, api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def weather() -> dict[str, Any]:
    """A tool, as a JSON schema of its arguments and what goes with it."""
    return {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The city"}},
            "required": ["city"],
        },
    }
