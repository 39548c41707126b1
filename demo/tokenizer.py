"""Trains the tokenizer: byte-level BPE over the text of data.py.

Words, single digits and runs of anything else are split before merging, so a word is the same tokens after a
space, a quote or a slash: the model copies names from a request into a call token by token.

    python -m demo.tokenizer            writes tokenizer files and the chat template into demo/model
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
VOCAB_SIZE = 2048
SPLIT = r"\p{L}+|\p{N}|[^\p{L}\p{N}]+"


def train_bpe(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = SPECIAL + MARKERS
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKERS])
    return tokenizer


def write_config(out: Path) -> None:
    """tokenizer_config.json and the chat template beside tokenizer.json."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": SPECIAL,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (out / "chat_template.jinja").write_text((HERE / "chat_template.jinja").read_text())


def corpus(count: int, seed: int, out: Path) -> list[str]:
    """Training text for the merges: rendered samples, cut at the added tokens."""
    from transformers import PreTrainedTokenizerFast

    from demo.data import render, training_samples

    blank = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    blank.chat_template = (HERE / "chat_template.jinja").read_text()
    texts = []
    for sample in training_samples(0, count, seed):
        rendered = render(sample, blank)[0]
        for token in SPECIAL + MARKERS:
            rendered = rendered.replace(token, "\0")
        texts.extend(part for part in rendered.split("\0") if part)
    return texts


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "model", help="where the files go")
    parser.add_argument("--samples", type=int, default=20000, help="training samples to count words in")
    parser.add_argument("--seed", type=int, default=1, help="seed of the training stream")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_config(args.out)
    tokenizer = train_bpe(corpus(args.samples, args.seed, args.out))
    tokenizer.save(str(args.out / "tokenizer.json"))
    print(f"{tokenizer.get_vocab_size()} tokens -> {args.out}")


if __name__ == "__main__":
    main()
