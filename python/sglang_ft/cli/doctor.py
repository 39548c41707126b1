"""sglang-ft doctor: checks this machine, and a model if one is named. Each problem comes with its cure."""

from __future__ import annotations

import argparse
import os
import platform
import resource
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from sglang_ft import gpu, kernels, preflight
from sglang_ft.checkpoint import locate, summarize
from sglang_ft.cli import environment
from sglang_ft.config import FtConfig
from sglang_ft.errors import FtError
from sglang_ft.preflight import GIB

DEFAULT_PORT = 30000  # of SGLang


class Finding(NamedTuple):
    """Result of one check: a text when all is well, or what is wrong and what to do."""

    topic: str
    ok: bool
    text: str


def main(argv: Sequence[str]) -> int:
    """Print all findings. Exit status 1 if one of them is a problem."""
    parser = argparse.ArgumentParser(
        prog="sglang-ft doctor", description="Check this machine before serving."
    )
    parser.add_argument("--model-path", help="also check this checkpoint, and that it fits into memory")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve on (default: %(default)s)")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="port to serve on (default: %(default)s)"
    )
    config, rest = FtConfig.parse(argv, os.environ)
    args = parser.parse_args(rest)
    problems = 0
    for finding in findings(config, args):
        problems += not finding.ok
        print(f"{'ok     ' if finding.ok else 'PROBLEM'}  {finding.topic:<8}  {finding.text}", flush=True)
    print("everything is in order" if not problems else f"{problems} problem{'s'[: problems != 1]}")
    return 1 if problems else 0


def findings(config: FtConfig, args: argparse.Namespace) -> Iterator[Finding]:
    """All checks in order. A check returns its text, or raises FtError with problem and cure."""
    checks: list[tuple[str, Callable[[], str]]] = [
        ("python", _python),
        ("sglang", lambda: _sglang(config)),
        ("worker", lambda: _worker(config)),
        ("memory", lambda: _memory(config)),
        ("limits", _limits),
        ("gpu", lambda: _gpu(config)),
        ("port", lambda: _port(args.host, args.port)),
    ]
    if args.model_path:
        checks.append(("model", lambda: _model(config, args.model_path)))
    for topic, check in checks:
        try:
            yield Finding(topic, True, check())
        except FtError as e:
            yield Finding(topic, False, str(e))


def _python() -> str:
    if platform.python_version_tuple()[:2] not in (("3", "11"), ("3", "12")):
        raise FtError(f"Python {platform.python_version()}: install sglang-ft with Python 3.11 or 3.12")
    return platform.python_version()


def _sglang(config: FtConfig) -> str:
    preflight.check_sglang_version(config.force_version)
    return preflight.supported_sglang()


def _worker(config: FtConfig) -> str:
    from sglang_ft.cli.worker_trial import try_worker

    threads, isa = try_worker(config)
    return f"starts: {threads} threads, {isa}"


def _memory(config: FtConfig) -> str:
    available, reserve = preflight.available_memory(), int(config.ram_reserve_gib * GIB)
    if available <= reserve:
        raise FtError(
            f"{available / GIB:.1f} GiB available, {config.ram_reserve_gib:g} GiB to be kept free: "
            "nothing is left for a model; close other programs or lower --ft-ram-reserve-gib"
        )
    return f"{available / GIB:.1f} GiB available, of which {(available - reserve) / GIB:.1f} GiB for a model"


def _limits() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    locked = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / GIB:.2f} GiB"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1024:
        raise FtError(f"only {soft} open files allowed: raise the limit with ulimit -n {min(65536, hard)}")
    return f"locked memory {locked}, {soft} open files"


def _gpu(config: FtConfig) -> str:
    if config.platform == "cpu":
        return "not wanted (--ft-platform cpu): attention and experts run on the CPU"
    if not gpu.found():
        if seen := environment.gpus():
            raise FtError(
                f"{', '.join(seen)}: the driver gives it to no program here; look at nvidia-smi and at "
                "CUDA_VISIBLE_DEVICES. Until then everything is served on the CPU"
            )
        return "none: attention and experts run on the CPU"
    names = ", ".join(one.name for one in gpu.found())
    if missing := gpu.what_is_missing():
        raise FtError(f"{names}: {missing}. Until then everything is served on the CPU")
    _check_torch(names)
    kernels.library()
    return f"{names}, driver for CUDA {'.'.join(map(str, gpu.driver_cuda()))}, kernels installed"


def _check_torch(names: str) -> None:
    import torch

    if not torch.cuda.is_available():
        raise FtError(
            f"{names}: torch {torch.__version__} cannot use it: it was made for CUDA {torch.version.cuda}, the driver "
            f"knows {'.'.join(map(str, gpu.driver_cuda()))}. A newer driver mends that; --ft-platform cpu does without"
        )


def _port(host: str, port: int) -> str:
    preflight.check_port(host, port)
    return f"{host}:{port} is free"


def _model(config: FtConfig, model_path: str) -> str:
    model = summarize(locate(model_path))
    on_host = config.platform == "cpu" or bool(gpu.what_is_missing())
    preflight.check_memory(model, config.ram_reserve_gib, preflight.available_memory(), dense_on_host=on_host)
    kind = f"{model.num_moe_layers} x {model.num_experts} experts" if model.is_moe else "dense"
    return f"{model.architecture}, {kind}, {model.total_bytes / GIB:.2f} GiB"
