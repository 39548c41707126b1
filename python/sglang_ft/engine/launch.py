"""The launcher's middle part: from a command line to a running server.

What can be refused is refused before a process starts or a weight is read, most of it before SGLang is imported,
which takes many seconds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from sglang_ft import checkpoint, gpu, plan, preflight, runtime, startup
from sglang_ft.api.early import EarlyServer
from sglang_ft.checkpoint import ModelSummary
from sglang_ft.config import FtConfig, add_help_group
from sglang_ft.errors import CheckpointError, FtError
from sglang_ft.weights import kept
from sglang_ft.worker import native, topology

# What SGLang leaves off and our users expect; a flag of the user's comes later on the line and wins.
_DEFAULTS = (
    "--enable-metrics",
    "--sleep-on-idle",  # its scheduler would poll a core hot
    "--enable-cache-report",
    "--reasoning-parser",
    "auto",
    "--tool-call-parser",
    "auto",
    # Where any blank is allowed, small models fill their answer with blanks.
    "--constrained-json-disable-any-whitespace",
)
# For MoE models on a GPU: routes as plain tensors, one expert pool, and prefill steps that the host leads.
_MOE_ON_GPU = (
    "--moe-runner-backend",
    "triton",
    "--disable-shared-experts-fusion",
    "--disable-prefill-cuda-graph",
    "--cuda-graph-max-bs-decode",  # a user may raise it to ExpertCache.max_rows
    "32",
)
_PARALLEL = ("tp_size", "pp_size", "dp_size", "ep_size")


def launch(argv: Sequence[str]) -> None:
    """Serves until stopped. Raises FtError for what the user can mend."""
    config, rest = FtConfig.parse(argv, os.environ)
    config.publish(os.environ)
    on_gpu = _choose_platform(config)
    if {"-h", "--help"}.intersection(rest):
        _print_help()
        return
    preflight.check_sglang_version(config.force_version)
    known = _known_flags(rest)
    folder = runtime.create()
    startup.mark("launcher")
    try:
        # A configuration file may name model and port; then both are known only once SGLang has read it.
        checked = None if known.config else _check(config, on_gpu, known)
        moe = checked is None or checked[1].is_moe
        startup.mark("checks")
        if not on_gpu:
            _start_forking()
        ours = [*_MOE_ON_GPU] if on_gpu and moe else []
        if ours and checked is not None:
            ours += _plan_gpu(config, known, checked[1])
        server_args = _server_args([*ours, *rest], on_gpu)
        early, summary = checked or _check(config, on_gpu, server_args)
        if on_gpu and summary.is_moe:
            _check_parallelism(server_args)
            _check_graphs(server_args)
        startup.mark("flags and imports of SGLang")
        _serve(
            config, server_args, early, on_gpu, summary.context_length if on_gpu and summary.is_moe else None
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _choose_platform(config: FtConfig) -> bool:
    """Whether a GPU is used; without one, sets the environment for this process and its children."""
    from sglang_ft.engine import cpu_platform

    missing = gpu.what_is_missing() if config.platform != "cpu" else "not wanted"
    if not missing:
        return True
    if config.platform == "gpu":
        raise FtError(f"--ft-platform gpu: {missing}")
    if config.platform == "auto" and gpu.found():
        print(f"sglang_ft: the GPU stays unused, {missing}", file=sys.stderr)
    os.environ.update(cpu_platform.required_environment())
    for name, value in cpu_platform.environment().items():
        os.environ.setdefault(name, value)
    return False


def _plan_gpu(config: FtConfig, known: argparse.Namespace, summary: ModelSummary) -> list[str]:
    """Plans the GPU's memory and prints the plan; SGLang's flags that follow from it."""
    from sglang_ft.engine import allocation

    made, flags = allocation.plan(config, known, summary)
    print(allocation.render(made), file=sys.stderr, flush=True)
    return flags


def _check_parallelism(args: Any) -> None:
    for name in _PARALLEL:
        if getattr(args, name) != 1:
            raise FtError(
                f"--{name.replace('_', '-')} {getattr(args, name)}: MoE models run on one GPU; leave the flag out"
            )


def _check_graphs(args: Any) -> None:
    """What the steps of the expert cache and their CUDA graphs can hold."""
    from sglang_ft.experts.decode import MAX_ROWS

    if args.speculative_algorithm not in (None, "NGRAM"):
        raise FtError(
            f"--speculative-algorithm {args.speculative_algorithm}: a draft model beside the expert cache is not "
            "supported; NGRAM is, or leave the flag out"
        )
    if args.moe_runner_backend != "triton":
        raise FtError(
            f"--moe-runner-backend {args.moe_runner_backend}: the expert cache needs triton; leave it out"
        )
    drafts = (args.speculative_num_draft_tokens or 1) if args.speculative_algorithm else 1
    rows = (args.cuda_graph_max_bs_decode or 0) * drafts
    if rows > MAX_ROWS:
        raise FtError(
            f"--cuda-graph-max-bs {args.cuda_graph_max_bs_decode}: {rows} rows a step; graphs of the expert cache hold "
            f"{MAX_ROWS}, so use --cuda-graph-max-bs {max(1, MAX_ROWS // drafts)} or less"
        )


def _known_flags(argv: Sequence[str]) -> argparse.Namespace:
    """The few of SGLang's flags that the checks need, read without importing SGLang."""
    from sglang_ft.engine import allocation

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-path", "--model")
    parser.add_argument("--revision")
    parser.add_argument("--tokenizer-path")
    parser.add_argument("--skip-tokenizer-init", action="store_true")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--ssl-certfile")
    parser.add_argument("--config")
    allocation.add_arguments(parser)
    return parser.parse_known_args(argv)[0]


def _check(config: FtConfig, on_gpu: bool, args: Any) -> tuple[EarlyServer, ModelSummary]:
    """Checks the model, the memory and the port; prints the plan; returns the server that holds the port."""
    if not args.model_path:
        raise CheckpointError("no model: name one with --model-path FOLDER (the demo model is demo/model)")
    own_tokenizer = (
        bool(args.tokenizer_path and args.tokenizer_path != args.model_path) or args.skip_tokenizer_init
    )
    folder = checkpoint.locate(args.model_path, args.revision)
    if args.load_format == "dummy":
        summary = checkpoint.summarize_config(folder)
    else:
        summary = checkpoint.summarize(folder, needs_tokenizer=not own_tokenizer)
    available = preflight.available_memory() + kept.usable_bytes(str(folder) if config.keep_pool else None)
    dtype = summary.experts_dtype(args.dtype)
    preflight.run(
        lambda: preflight.check_memory(
            summary, config.ram_reserve_gib, available, dense_on_host=not on_gpu, dtype=dtype
        ),
        lambda: preflight.check_port(args.host, args.port),
        lambda: native.find(native.WORKER),
    )
    cores = topology.choose_cores(config.worker_threads, config.worker_cores)
    decisions = plan.StartPlan(
        model=summary,
        platform="gpu" if on_gpu else "cpu",
        dtype=dtype,
        worker_threads=len(cores),
        isa=config.worker_isa,
        context_length=args.context_length or summary.context_length,
        available_bytes=available,
        reserve_gib=config.ram_reserve_gib,
    )
    print(plan.render(decisions), file=sys.stderr, flush=True)
    os.environ["SGLANG_FT_CHECKPOINT_BYTES"] = str(summary.total_bytes - summary.unused_bytes)
    return EarlyServer(args.host, args.port, answer=not args.ssl_certfile), summary


def _server_args(argv: Sequence[str], on_gpu: bool) -> Any:
    from sglang.srt.server_args import prepare_server_args

    from sglang_ft.engine import cpu_platform, install

    if not on_gpu:
        install.install(h for h in cpu_platform.hooks() if h.target.startswith("sglang.srt.server_args."))
    return prepare_server_args([*_DEFAULTS, *argv])


def _print_help() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(prog="sglang-ft serve")
    ServerArgs.add_cli_args(parser)
    add_help_group(parser)
    parser.print_help()


def _start_forking() -> None:
    from sglang_ft.engine import prefork

    prefork.start()


def _serve(config: FtConfig, server_args: Any, early: EarlyServer, on_gpu: bool, longest: int | None) -> None:
    """`longest`: context length of a model that runs its longest pass once at the start."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.utils import kill_process_tree

    from sglang_ft.anchors import find
    from sglang_ft.engine import control, entry, install, prefork, requests, responses, routes, warmup
    from sglang_ft.engine.anchors import turns

    try:
        found = [*routes.hooks(early), *requests.hooks(), *responses.hooks(), *control.main_hooks()]
        found += turns.hooks() if config.anchors != find.OFF and not server_args.skip_tokenizer_init else []
        if longest is not None:
            found += warmup.hooks(longest)
        if not on_gpu:
            found += prefork.hooks()
        install.install(found)
        startup.mark("imports of the HTTP server")
        http_server.launch_server(
            server_args,
            run_scheduler_process_func=entry.run_scheduler_process,
            run_detokenizer_process_func=entry.run_detokenizer_process,
            launch_callback=_ready,
        )
    except Exception as e:
        refusal = runtime.read("error").get("text")
        if refusal is None:
            raise
        raise FtError(refusal) from e
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def _ready() -> None:
    phases = startup.finish("first answer")
    print(f"sglang_ft: ready\n{startup.render(phases)}", file=sys.stderr, flush=True)
