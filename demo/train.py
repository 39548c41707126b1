"""Trains the demo model on one GPU (or, for a test of the script, a few steps on a CPU).

    python -m demo.train --minutes 6                     as many steps as fit, found by measuring the first ones
    python -m demo.train --steps 9000                    the same run again, with the step count of the log
    python -m demo.train --device cpu --steps 3 --tokens 2048 --workers 1 --out /tmp/demo

Writes config.json, generation_config.json and model.safetensors (bf16) beside the tokenizer files into --out, and
the loss curve into training_log.json.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from demo.batches import Batch, stream
from demo.delta_rule import chunk_order, largest_error, reference_rule
from demo.network import CONFIG, Layer, Network, Packed, kernels_for

HERE = Path(__file__).parent
GENERATION = {
    "do_sample": True,
    "temperature": 0.1,
    "top_p": 0.9,
    "top_k": 20,
    "eos_token_id": [2, 0],
    "pad_token_id": 0,
}
WARMUP = 300
BALANCE = 0.01
TIMED = (60, 160)
# A GPU step that hangs ends the run with a stack trace; go on from the last checkpoint with --init.
HANG_S = 30


def arguments() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "model", help="where the checkpoint goes")
    parser.add_argument("--init", type=Path, help="a checkpoint to go on from (its log is kept as `earlier`)")
    parser.add_argument(
        "--log", type=Path, help="where the log goes (default: training_log.json beside --out)"
    )
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--seed", type=int, default=1, help="seed of data and weights")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of a batch")
    parser.add_argument("--workers", type=int, default=14, help="processes that make data")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--steps", type=int, default=0, help="steps; 0: from --minutes")
    parser.add_argument(
        "--minutes", type=float, default=6, help="time that sets the steps, when --steps is 0"
    )
    return parser.parse_args()


def packed(batch: Batch, device: str) -> tuple[Packed, torch.Tensor]:
    """A batch on the device, and the weight of predicting each next token [N]."""
    ids, weights, starts = (torch.from_numpy(a).to(device, non_blocking=True) for a in batch)
    lengths = torch.diff(starts)
    position = torch.arange(len(ids), device=device) - torch.repeat_interleave(
        starts[:-1], lengths, output_size=len(ids)
    )
    longest = int((batch.starts[1:] - batch.starts[:-1]).max())
    return Packed(ids, position, starts, longest, chunk_order(batch.starts, device)), torch.roll(weights, -1)


def loss_sums(
    hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Weighted loss, its weight, and the loss and number of the tokens that the model writes: [4]."""
    losses = F.cross_entropy(F.linear(hidden, head).float(), torch.roll(ids, -1), reduction="none")
    written = (weights == 1).float()
    return torch.stack([(losses * weights).sum(), weights.sum(), (losses * written).sum(), written.sum()])


def optimizer_of(net: Network, rate: float, fused: bool) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    matrices = [p for p in net.parameters() if p.dim() >= 2]
    others = [p for p in net.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-10, fused=fused)


def rate_at(step: int, steps: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to 1 % of the peak."""
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def save(net: Network, out: Path) -> None:
    """The checkpoint, as transformers and SGLang read it."""
    out.mkdir(parents=True, exist_ok=True)
    state = {name: p.detach().to(torch.bfloat16).cpu().contiguous() for name, p in net.state_dict().items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    (out / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if not (out / name).exists():
            shutil.copy(HERE / "model" / name, out / name)


class Trainer:
    """One training run: its network, optimizer, data and log."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.batches: Iterator[Batch] = stream(args.workers, args.tokens, args.seed, HERE / "model")
        torch.manual_seed(args.seed)
        torch.set_float32_matmul_precision("high")
        self.net = Network()
        if args.init:
            self.net.load_state_dict(load_file(args.init / "model.safetensors"))
        self.net.to(args.device)
        self.gpu = args.device != "cpu"
        self.kernels = kernels_for(args.device)
        self.optimizer = optimizer_of(self.net, args.rate, self.gpu)
        self.loss_sums = loss_sums
        if self.gpu:
            error = largest_error(self.kernels.delta_rule, reference_rule, args.device)
            print(f"delta rule against its reference: largest relative error {error:.4f}", flush=True)
            if not error < 0.02:
                raise RuntimeError(f"the GPU's delta rule is off by {error:.3f} (allowed: 0.02)")
            self.compile()
        self.log: dict[str, Any] = {
            "seed": args.seed,
            "tokens_per_step": args.tokens,
            "peak_rate": args.rate,
            "curve": [],
        }
        earlier = args.init and args.init.parent / "training_log.json"
        if earlier and earlier.exists():
            self.log["earlier"] = json.loads(earlier.read_text())

    def compile(self) -> None:
        """Compile what surrounds the two kernels; the four shapes of layer code are shared by all layers."""
        torch._dynamo.config.cache_size_limit = 64
        torch._dynamo.config.inline_inbuilt_nn_modules = True
        Layer.before = torch.compile(Layer.before)  # type: ignore[method-assign]
        Layer.after = torch.compile(Layer.after)  # type: ignore[method-assign]
        self.loss_sums = torch.compile(loss_sums)

    def step(self, batch: Batch, rate: float) -> torch.Tensor:
        """One update; returns loss sums, balance and the least used expert's share of its fair share [6]."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        inputs, weights = packed(batch, self.args.device)
        with torch.autocast(self.args.device, torch.bfloat16, enabled=self.gpu):
            hidden, balance, share = self.net(inputs, self.kernels)
            sums = self.loss_sums(hidden, self.net.model.embed_tokens.weight, inputs.ids, weights)
        (sums[0] / sums[1] + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return torch.cat([sums.detach(), torch.stack([balance.detach(), share.min() * share.shape[1]])])

    def run(self) -> None:
        """All steps."""
        args = self.args
        begin = time.time()
        timed, steps, step = 0.0, args.steps, 0
        while not steps or step < steps:
            if not args.steps and step in TIMED:
                torch.cuda.synchronize()
                timed, steps = self._plan(step, timed, begin)
            stats = self.step(next(self.batches), rate_at(step, steps or 10**6, args.rate))
            step += 1
            if step % 50 == 0 or step == steps:
                self._report(step, steps, stats, begin)
            if step % 250 == 0:
                save(self.net, args.out)
        faulthandler.cancel_dump_traceback_later()
        self.log |= {"steps": step, "tokens": step * args.tokens, "seconds": round(time.time() - begin, 1)}
        self.log["parameters"] = sum(p.numel() for p in self.net.parameters())
        self.log["device"] = torch.cuda.get_device_name() if self.gpu else "cpu"
        save(self.net, args.out)
        log = args.log or args.out.parent / "training_log.json"
        log.write_text(json.dumps(self.log, indent=1) + "\n")

    def _plan(self, step: int, timed: float, begin: float) -> tuple[float, int]:
        """Steps that fit, from the time of the steps between the two marks of TIMED."""
        if step == TIMED[0]:
            return time.time(), 0
        seconds = (time.time() - timed) / (TIMED[1] - TIMED[0])
        left = self.args.minutes * 60 - (time.time() - begin)
        return timed, step + int(left / seconds)

    def _report(self, step: int, steps: int, stats: torch.Tensor, begin: float) -> None:
        weighted, weight, written, count, balance, least = stats.tolist()
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        point = {"step": step, "loss": round(weighted / weight, 4), "written_loss": round(written / count, 4)}
        self.log["curve"].append(point | {"balance": round(balance, 3), "least_used": round(least, 3)})
        rate = step * self.args.tokens / (time.time() - begin)
        print(
            f"{step}/{steps} {point} balance {balance:.3f} least {least:.2f} {rate / 1e6:.2f} Mtok/s {time.time() - begin:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    Trainer(arguments()).run()
