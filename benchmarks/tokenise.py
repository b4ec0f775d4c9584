"""Conversations → ids and mask, against the bare tokenizer on text that is already rendered.

    python benchmarks/tokenise.py [--tokenizer DIR] [--template FILE] [--rows 4000] [--rounds 7]

Ours reads Arrow conversations of 1, 3 and 8 questions (the example's, joined), applies the rules, renders, proves the
spans, tokenises, makes the mask and compares a sample with serving, 256 rows at a time as `prepare` does. The bare
tokenizer is `tokenizer(list_of_texts)` of transformers on the same texts, in one call and 256 at a time: the faster of
the two counts. Both in turn, in every round. `vs_tokenizer` = our rows a second / its rows a second, median of rounds.
Without --tokenizer it takes the one of a target in $DFLASH_HOME, else trains a small one on the example.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pyarrow as pa  # noqa: E402

from cache.chat.tokenizer import ChatTokenizer  # noqa: E402
from cache.config import Columns  # noqa: E402
from cache.source.list_columns import Place  # noqa: E402

BATCH = 256
QUESTIONS = (1, 3, 8)
TEMPLATE = (
    r"{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--template")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    examples = [json.loads(line) for line in (ROOT / "examples" / "smollm2-chat.jsonl").open()]
    pairs = [row["messages"] for row in examples]
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.tokenizer or _found() or _trained(pairs, Path(scratch))
        print(f"tokenizer {directory}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        ours = ChatTokenizer(directory, template=arguments.template, template_arguments={}, supervise="all")
        results = {str(n): _compare(ours, pairs, n, arguments.rows // n, arguments.rounds) for n in QUESTIONS}
    ratio = statistics.geometric_mean(result["ratio"] for result in results.values())
    print(json.dumps({"vs_tokenizer": round(ratio, 3), "by_questions": results}))


def _compare(ours: ChatTokenizer, pairs: list[Any], num_questions: int, num_rows: int, rounds: int) -> dict[str, float]:
    conversations = [
        [message for k in range(num_questions) for message in pairs[(row * num_questions + k) % len(pairs)]]
        for row in range(num_rows)
    ]
    table = pa.table({"messages": conversations})
    bare = ours._tokenizer
    texts = [bare.apply_chat_template(c, chat_template=ours._template.source, tokenize=False) for c in conversations]
    starts = range(0, num_rows, BATCH)

    def run_ours() -> None:
        for start in starts:
            ours.tokenise(table.slice(start, BATCH), Columns(), Place("benchmark", start))

    def run_batches() -> None:
        for start in starts:
            bare(texts[start : start + BATCH])

    seconds: dict[str, list[float]] = {"ours": [], "whole": [], "batches": []}
    for _ in range(rounds):
        seconds["ours"].append(_seconds(run_ours))
        seconds["whole"].append(_seconds(lambda: bare(texts)))
        seconds["batches"].append(_seconds(run_batches))
    best = [min(pair) for pair in zip(seconds["whole"], seconds["batches"], strict=True)]
    num_tokens = sum(map(len, bare(texts, add_special_tokens=False)["input_ids"]))
    result = {
        "ratio": round(statistics.median(b / o for b, o in zip(best, seconds["ours"], strict=True)), 3),
        "tokens_a_row": round(num_tokens / num_rows),
        "rows_per_s": round(num_rows / statistics.median(seconds["ours"])),
        "tokens_per_s": round(num_tokens / statistics.median(seconds["ours"])),
        "bare_tokens_per_s": round(num_tokens / statistics.median(best)),
    }
    print(f"{num_questions} questions a row: {result}")
    return result


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _found() -> Path | None:
    home = Path(os.environ.get("DFLASH_HOME", ROOT / "var"))
    return next((file.parent for file in sorted(home.glob("targets/*/tokenizer.json"))), None)


def _trained(pairs: list[Any], directory: Path) -> Path:
    """A byte-level tokenizer of 8,192 tokens, trained on the example."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8192,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((message["content"] for pair in pairs for message in pair), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


if __name__ == "__main__":
    main()
