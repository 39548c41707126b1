"""FtConfig: every setting of ours, once.

The fields below are the only place where a default, a unit, a range or a help text is written. The command
line flags (`--ft-*`), the environment variables (`SGLANG_FT_*`), `--help` and docs/cli.md are generated from
them. A flag wins over the environment, the environment over the default. SGLang's own flags pass through.

The launcher parses once, in the first process; every child process reads the result from `SGLANG_FT_CONFIG`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin, get_type_hints

from sglang_ft.errors import ConfigError

Isa = Literal["auto", "scalar", "avx2", "avx512", "avx512_bf16", "amx"]
Platform = Literal["auto", "cpu", "gpu"]
MoeMode = Literal["auto", "resident", "cache", "hybrid", "cpu"]

FLAG_PREFIX = "--ft-"
ENV_PREFIX = "SGLANG_FT_"
CONFIG_ENV = "SGLANG_FT_CONFIG"  # the parsed settings as JSON, for child processes
HELP_GROUP = "sglang_ft"

_CORE_LIST = r"(\d+(-\d+)?)(,\d+(-\d+)?)*|"
_SIZE = r"\d+(\.\d+)?\s*[kmgtKMGT]?[iI]?[bB]?|"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def setting(
    default: Any,
    help: str,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    pattern: str | None = None,
    like: str = "",
) -> Any:
    """A dataclass field with its help text, unit and what it allows.

    Numbers may have an inclusive range `low` .. `high`; a text may have a regular expression `pattern`, which
    `like` explains to the user.
    """
    limits = {"low": low, "high": high, "pattern": pattern, "like": like}
    return field(default=default, metadata={"help": help, "unit": unit, **limits})


@dataclass(frozen=True)
class FtConfig:
    """Settings of sglang_ft, beside SGLang's own `ServerArgs`."""

    platform: Platform = setting("auto", "where attention and dense layers run; auto: GPU if there is one")
    moe_mode: MoeMode = setting(
        "auto",
        "experts that are not in GPU memory are copied into slots (cache), run by the cpu_worker (cpu), or either so "
        "that the step ends soonest (hybrid); resident: there are none; auto: resident if all fit, else hybrid",
    )
    slots: int = setting(
        0, "expert slots in GPU memory; 0: what the KV cache leaves", "slots", low=0, high=1_000_000
    )
    vram_budget: str = setting(
        "",
        "GPU memory that the server uses at most, like 8GiB; empty: what is free when it starts",
        like="a size like 8GiB",
        pattern=_SIZE,
    )
    decode_gap_ms: int = setting(
        500,
        "while a long prompt is read, running requests get a token between two of its chunks when the last one is this "
        "long ago; 0: between any two",
        "ms",
        low=0,
        high=3_600_000,
    )
    recalibrate: bool = setting(
        False, "measure link and CPU anew instead of using what an earlier start measured"
    )
    route_trace: str = setting(
        "",
        "file of routes that decode steps take instead of the router's, for benchmarks",
        like="a file",
        pattern=".*",
    )
    record_routes: str = setting(
        "", "file that the routes of decode steps are written to", like="a file", pattern=".*"
    )
    stamps: bool = setting(
        False,
        "decode steps can note when their parts began and ended: POST /ft/experts switches it on, GET shows it",
    )
    anchors: str = setting(
        "auto",
        "where states of recurrent layers are kept for the next turn; auto: at the borders of turns, thinking, tool "
        "calls and tool results that the chat template writes; more markers to add, with a leading - to remove, "
        "with commas between them; off: only where SGLang keeps them",
        like="auto, off, or markers with commas between them",
        pattern=".*",
    )
    anchor_states: int = setting(
        0,
        "states of recurrent layers beside those of running requests; 0: what memory is given to them",
        "states",
        low=0,
        high=100_000,
    )
    dummy_locality: float = setting(
        0.0,
        "with --load-format dummy: how uneven routers are; 0.5: about 15 % misses with slots for a third of 256",
        low=0,
        high=10,
    )
    worker_threads: int = setting(
        0,
        "threads of the cpu_worker; 0: physical cores, less one or two for the server",
        "threads",
        low=0,
        high=1024,
    )
    worker_cores: str = setting(
        "",
        "cores to pin the worker's threads to, like 0-5,8; empty: chosen by topology",
        pattern=_CORE_LIST,
        like="core numbers and ranges like 0-5,8",
    )
    worker_isa: Isa = setting("auto", "instruction set of the expert kernels; auto: the best this CPU has")
    worker_spin_us: int = setting(
        -1,
        "how long idle worker threads poll before they sleep; -1: 50 without a GPU, 2000 with one",
        "us",
        low=-1,
        high=10_000_000,
    )
    worker_stall_s: float = setting(
        2.0,
        "a job without progress for this long means that the worker hangs; it is then restarted",
        "s",
        low=0.1,
        high=3600,
    )
    worker_blocks: int = setting(2, "job blocks in the ring", "blocks", low=1, high=64)
    worker_max_rows: int = setting(
        0,
        "token rows of one job; longer inputs become several jobs; 0: the prefill chunk, at most 4096",
        "rows",
        low=0,
        high=65536,
    )
    ram_reserve_gib: float = setting(
        2.0, "host memory that the expert pool must leave free", "GiB", low=0, high=65536
    )
    heat_list: bool = setting(
        False,
        "write down which experts are in GPU memory and start with those the next time, instead of with none",
    )
    keep_pool: float = setting(
        0.0,
        "after the server has ended, keep the loaded experts in host memory for so long, for the next start of the "
        "same model; `sglang-ft pool` lists and drops them",
        "minutes",
        low=0,
        high=100_000,
    )
    force_version: bool = setting(
        False, "start with an SGLang version other than the one this release was made for"
    )

    def __post_init__(self) -> None:
        for option in self.options():
            option.check(getattr(self, option.name), option.flag)

    @classmethod
    def options(cls) -> list[Option]:
        """One `Option` for each field, in order."""
        hints = get_type_hints(cls)
        return [Option.of(f, hints[f.name]) for f in dataclasses.fields(cls)]

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str]) -> tuple[FtConfig, list[str]]:
        """Settings from `--ft-*` flags and `SGLANG_FT_*` variables, and the arguments that are not ours.

        Raises ConfigError for an unknown `--ft-` flag, a misspelt variable or a value that is not allowed.
        """
        options = cls.options()
        from_flags, rest = _take_flags(argv, {o.flag: o for o in options})
        values = _take_environment(environ, options) | from_flags
        return cls(**values), rest

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FtConfig:
        """Inverse of `to_json`. Raises ConfigError if the text comes from another version of sglang_ft."""
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as e:
            raise ConfigError(f"{CONFIG_ENV} holds settings of another sglang_ft version: {e}") from e

    def publish(self, environ: MutableMapping[str, str]) -> None:
        """Leave the settings in the environment, for child processes."""
        environ[CONFIG_ENV] = self.to_json()

    @classmethod
    def inherited(cls, environ: Mapping[str, str]) -> FtConfig:
        """The settings that the launcher published. Raises ConfigError in a process that it did not start."""
        if CONFIG_ENV not in environ:
            raise ConfigError(
                f"{CONFIG_ENV} is not set: start the server with python -m sglang_ft.launch_server"
            )
        return cls.from_json(environ[CONFIG_ENV])


@dataclass(frozen=True)
class Option:
    """How one field of FtConfig looks to a user."""

    name: str
    flag: str
    env: str
    kind: type
    choices: tuple[str, ...] | None
    default: Any
    help: str
    unit: str
    low: float | None
    high: float | None
    pattern: str | None
    like: str

    @classmethod
    def of(cls, f: dataclasses.Field[Any], hint: Any) -> Option:
        literal = get_origin(hint) is Literal
        return cls(
            name=f.name,
            flag=FLAG_PREFIX + f.name.replace("_", "-"),
            env=ENV_PREFIX + f.name.upper(),
            kind=str if literal else hint,
            choices=get_args(hint) if literal else None,
            default=f.default,
            **f.metadata,
        )

    @property
    def allowed(self) -> str:
        """What values may be, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return self.like
        noun = "a whole number" if self.kind is int else "a number"
        unit = f" {self.unit}" if self.unit else ""
        return f"{noun} from {self.low:,.12g} to {self.high:,.12g}{unit}"

    @property
    def default_text(self) -> str:
        if self.kind is bool:
            return str(self.default).lower()
        return str(self.default) if self.default != "" else "empty"

    def read(self, text: str, source: str) -> Any:
        """The value that `text` means. `source` is the flag or variable to name in an error."""
        try:
            value = _read_bool(text) if self.kind is bool else self.kind(text)
        except ValueError:
            raise self._refusal(text, source) from None
        self.check(value, source)
        return value

    def check(self, value: Any, source: str) -> None:
        """Raises ConfigError unless `value` is allowed."""
        if not self._allows(value):
            raise self._refusal(value, source)

    def _allows(self, value: Any) -> bool:
        if self.kind is bool or isinstance(value, bool):
            return self.kind is bool and isinstance(value, bool)
        if self.kind is str:
            if not isinstance(value, str):
                return False
            return (
                value in self.choices
                if self.choices
                else re.fullmatch(self.pattern or ".*", value) is not None
            )
        if not isinstance(value, int if self.kind is int else (int, float)):
            return False
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return low <= value <= high

    def _refusal(self, value: Any, source: str) -> ConfigError:
        return ConfigError(
            f"{source}: {value!r} is not allowed; it takes {self.allowed} (default: {self.default_text})"
        )


def add_help_group(parser: argparse.ArgumentParser) -> None:
    """Append our flags to a parser's `--help` as a group of their own; `parse` is what reads them."""
    group = parser.add_argument_group(
        HELP_GROUP,
        "Each can also be set by the environment variable in brackets; the flag wins.",
    )
    for o in FtConfig.options():
        unit = f" {o.unit}" if o.unit else ""
        text = f"{o.help} (default: {o.default_text}{unit}) [{o.env}]".replace("%", "%%")
        if o.kind is bool:
            group.add_argument(o.flag, action="store_true", help=text)
        else:
            metavar = "{" + ",".join(o.choices) + "}" if o.choices else o.name.rsplit("_", 1)[-1].upper()
            group.add_argument(o.flag, metavar=metavar, help=text)


def _take_flags(argv: Sequence[str], options: Mapping[str, Option]) -> tuple[dict[str, Any], list[str]]:
    """Split `argv` into values of our flags and everything else, in order."""
    values: dict[str, Any] = {}
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if not argument.startswith(FLAG_PREFIX):
            rest.append(argument)
            continue
        flag, equals, text = argument.partition("=")
        if flag not in options:
            raise ConfigError(f"{flag}: no such flag{suggestion(flag, options)}; --help lists all")
        option = options[flag]
        if not equals:
            text = "true" if option.kind is bool else _next_value(option, arguments)
        values[option.name] = option.read(text, flag)
    return values, rest


def _next_value(option: Option, arguments: Iterable[str]) -> str:
    value = next(iter(arguments), None)
    if value is None or value.startswith("--"):
        raise ConfigError(f"{option.flag}: the value is missing; it takes {option.allowed}")
    return value


def _take_environment(environ: Mapping[str, str], options: Sequence[Option]) -> dict[str, Any]:
    """Values of our variables. A variable that is nearly one of ours is taken as a typing error."""
    by_env = {o.env: o for o in options}
    for name in environ:
        ours = name.startswith(ENV_PREFIX) and name != CONFIG_ENV
        if ours and name not in by_env and (near := suggestion(name, by_env, cutoff=0.85)):
            raise ConfigError(f"{name}: no such environment variable{near}")
    return {o.name: o.read(environ[o.env], o.env) for o in options if o.env in environ}


def suggestion(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """' (did you mean ...?)' where a known name is near, else an empty text."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" (did you mean {near[0]}?)" if near else ""


def _read_bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(text)
    return word in _TRUE
