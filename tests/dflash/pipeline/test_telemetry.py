"""What a run says of its own stages: in its log, in metrics.jsonl and in train.json."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import tiny

from dflash.pipeline.telemetry import Clock, bottleneck


def test_a_run_says_what_waits_and_what_its_channels_hold(make_run: Callable[..., Path], tokens: Path) -> None:
    run = make_run("says", log_every_steps=2)
    tiny.run(["train", run, "--tokens", tokens], run / "log")
    log = (run / "log").read_text()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = json.loads((run / "train.json").read_text())["steps"]
    assert re.search(r"features of at most 24 passes at once: \d+\.\d\d GB", log)
    assert len(lines) == steps // 2
    assert len(re.findall(r"epoch \d step \d+: loss .* tokens/s; target \d+% busy, train \d+% busy", log)) == len(lines)
    for line in lines:
        assert line["tokens_per_s"] > 0
        assert 0 < line["padding"] < 1
        assert line["queues"].keys() == {"target", "train"}
        assert line["stages"].keys() == {"read", "target", "train"}
        for shares in line["stages"].values():
            assert 0 < sum(shares.values()) <= 1.001
        assert line["bottleneck"] in log
    result = json.loads((run / "train.json").read_text())
    assert result["stages"].keys() == {"read", "target", "train"}
    assert "busy" in result["bottleneck"]


def test_the_sentence_names_the_bottleneck_and_the_change() -> None:
    stages = {
        "read": Clock(busy=0.1, blocked=9.9, wall=10).shares(),
        "target": Clock(busy=9.9, starved=0.1, wall=10).shares(),
        "train": Clock(busy=5.9, starved=4.1, wall=10).shares(),
    }
    assert bottleneck(stages) == "target 99% busy, train 41% starved: add a target device, or more anchors"
