"""Measures the demo model on held-out requests by greedy generation, with transformers or on a running server.

Twice: with values and made-up tools that no training sample has, in wordings that some have (`held_out_values`);
and in wordings that none has either (`held_out_wordings`). An item is right when all of it is right: every call's
tool and arguments, the whole answer, or, where a tool's result may be told in several ways, every value of the
expected sentence.

    python -m demo.evaluate --items 1500 --device cuda --log demo/training_log.json
    python -m demo.evaluate --items 600 --server http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from demo.data import Sample, make_sample
from demo.tooluse import REFUSALS

HERE = Path(__file__).parent
KINDS = {"single": 6, "parallel": 1.5, "sequence": 1.5, "unanswerable": 0.7, "no_call": 1, "talk": 5}
CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.S)
THINK = re.compile(r"^<think>\n(?!\n)(.+?)\n</think>\n\n", re.S)


@dataclass(frozen=True)
class Item:
    """A prompt and the assistant turn expected next."""

    part: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    thinking: bool
    target: dict[str, Any]


def items_of(sample: Sample, turn_kind: str) -> Iterator[Item]:
    """The last assistant turn of a sample, and its first call if that is another one."""
    last_user = max(i for i, m in enumerate(sample.messages) if m["role"] == "user")
    turns = [i for i, m in enumerate(sample.messages) if m["role"] == "assistant" and i > last_user]
    for i in {turns[0], turns[-1]}:
        target = sample.messages[i]
        part = f"{turn_kind}/call" if target.get("tool_calls") else f"{turn_kind}/answer"
        if part == "sequence/call" and i != turns[0]:
            part = "sequence/second_call"
        yield Item(part, sample.messages[:i], sample.tools, sample.thinking, target)


def held_out_items(count: int, new_wordings: bool, first: int = 0) -> list[Item]:
    """About `count` items over all kinds, by the weights of KINDS."""
    items: list[Item] = []
    total = sum(KINDS.values())
    for kind, weight in KINDS.items():
        wanted, found, seed = max(1, int(count * weight / total)), 0, first
        while found < wanted:
            for item in items_of(make_sample(seed, True, kind, new_wordings), kind):
                items.append(item)
                found += 1
            seed += 1
    return items


def calls_in(text: str) -> list[dict[str, Any]] | None:
    """The calls of a generated turn; None where one is not JSON."""
    try:
        return [json.loads(body) for body in CALL.findall(text)]
    except json.JSONDecodeError:
        return None


def split_thinking(text: str) -> tuple[str, str]:
    """Thinking and the rest of a generated turn."""
    head, mark, tail = text.partition("</think>")
    return (head.replace("<think>", "").strip(), tail.strip()) if mark else ("", text.strip())


def result_values(item: Item) -> list[str]:
    """Values of the tool results that the expected answer tells."""
    told = item.target["content"]
    values: list[str] = []
    for message in item.messages:
        if message["role"] != "tool":
            continue
        try:
            content = json.loads(message["content"])
        except json.JSONDecodeError:
            content = dict(enumerate(re.split(r", \w+: |^\w+: ", message["content"])))
        values += [str(v) for v in content.values()] if isinstance(content, dict) else [str(content)]
    return [v for v in values if v and v in told]


def is_right(item: Item, answer: str) -> bool:
    """Whether a generated turn, without its thinking, is what the item expects."""
    calls = calls_in(answer)
    expected = [c["function"] for c in item.target.get("tool_calls", [])]
    if expected or calls is None or calls:
        return calls == expected and not CALL.sub("", answer).strip()
    if item.part.startswith("unanswerable"):
        return answer in REFUSALS
    if item.part.startswith(("talk", "no_call")):
        return answer == item.target["content"]
    values = result_values(item)
    return answer == item.target["content"] or bool(values and all(v in answer for v in values))


class Model:
    """Renders prompts with the checkpoint's own chat template; heirs generate."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")

    def prompt(self, item: Item) -> str:
        """The rendered prompt of an item."""
        return self.tokenizer.apply_chat_template(
            item.messages, tools=item.tools or None, tokenize=False, add_generation_prompt=True,
            enable_thinking=item.thinking,
        )  # fmt: skip

    def greedy(self, prompts: list[str], limit: int) -> list[str]:
        """Greedy continuations of at most `limit` tokens, up to the end of the turn."""
        raise NotImplementedError


class LocalModel(Model):
    """The checkpoint under transformers."""

    def __init__(self, path: Path, device: str) -> None:
        from transformers import AutoModelForCausalLM

        super().__init__(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()
        self.device = device

    @torch.inference_mode()
    def greedy(self, prompts: list[str], limit: int) -> list[str]:
        inputs = self.tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(
            self.device
        )
        out = self.model.generate(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=limit,
            do_sample=False, temperature=None, top_p=None, top_k=None,
        )  # fmt: skip
        texts = self.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=False)
        return [re.split(r"<\|im_end\|>|<\|endoftext\|>", t)[0] for t in texts]


class ServedModel(Model):
    """The checkpoint on a running server."""

    def __init__(self, path: Path, url: str) -> None:
        super().__init__(path)
        self.url = url

    def greedy(self, prompts: list[str], limit: int) -> list[str]:
        from concurrent.futures import ThreadPoolExecutor

        import httpx

        def one(prompt: str) -> str:
            sampling = {"temperature": 0, "max_new_tokens": limit, "skip_special_tokens": False}
            body = {"text": prompt, "sampling_params": sampling}
            return (
                httpx.post(self.url + "/generate", json=body, timeout=600).raise_for_status().json()["text"]
            )

        with ThreadPoolExecutor(32) as pool:
            return [re.split(r"<\|im_end\|>|<\|endoftext\|>", t)[0] for t in pool.map(one, prompts)]


def evaluate(model: Model, items: list[Item], batch: int, limit: int, show: int = 0) -> dict[str, Any]:
    """Shares of right items by part and by thinking, and of well-formed thinking."""
    scores: dict[str, list[bool]] = defaultdict(list)
    items = sorted(items, key=lambda i: len(str(i.messages)) + len(str(i.tools)))
    for start in range(0, len(items), batch):
        group = items[start : start + batch]
        for item, text in zip(group, model.greedy([model.prompt(i) for i in group], limit), strict=True):
            right = is_right(item, split_thinking(text)[1] if item.thinking else text.strip())
            scores[item.part].append(right)
            scores[f"{item.part}/{'thinking' if item.thinking else 'direct'}"].append(right)
            if item.thinking:
                scores["thinking_well_formed"].append(bool(THINK.match(text)))
            if item.target.get("tool_calls"):
                scores["all_calls"].append(right)
            if not right and show > 0:
                show -= 1
                print(f"--- {item.part}\n{item.messages[-1]['content']}\nwant {item.target}\ngot  {text!r}")
    return {k: {"right": round(sum(v) / len(v), 4), "items": len(v)} for k, v in sorted(scores.items())}


def main() -> None:
    """Evaluate and print; with --log, add the result to the training log."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=HERE / "model", help="the checkpoint")
    parser.add_argument("--items", type=int, default=300, help="about how many held-out items")
    parser.add_argument("--device", default="cpu", help="cuda or cpu")
    parser.add_argument("--server", help="address of a server that runs the checkpoint, in place of --device")
    parser.add_argument("--batch", type=int, default=64, help="prompts generated at once")
    parser.add_argument("--limit", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--show", type=int, default=0, help="print so many wrong items")
    parser.add_argument("--log", type=Path, help="training log that gets the result as `held_out`")
    args = parser.parse_args()
    begin = time.time()
    model = ServedModel(args.model, args.server) if args.server else LocalModel(args.model, args.device)
    results = {}
    for name, new_wordings in (("held_out_values", False), ("held_out_wordings", True)):
        items = held_out_items(args.items, new_wordings)
        results[name] = evaluate(model, items, args.batch, args.limit, args.show)
        print(f"--- {name}")
        for part, score in results[name].items():
            print(f"{part:36} {score['right']:7.2%} of {score['items']}")
    print(f"{time.time() - begin:.0f} s")
    if args.log:
        log = json.loads(args.log.read_text())
        args.log.write_text(json.dumps(log | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
