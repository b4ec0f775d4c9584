"""Tables and texts of results, also of results in which something could not be said."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tiny_inputs import make_target

from cache.build import build
from cache.config import RowsConfig
from cache.disk.store import TokenCache
from flows.show.progress import StageProgress, duration
from flows.show.tables import (
    busy_by_stage,
    curve_svg,
    pipeline_table,
    report_markdown,
    sample_rows,
    tau_table,
    thinned,
    tokens_table,
)

EVALUATION: dict[str, Any] = {
    "tau": {"before": {"value": 1.0, "se": None}, "after": {"value": 1.5, "se": 0.25}},
    "by_group": {"math": {"value": None, "se": None, "rows": 0}},
    "accepted_by_slot": [0.5, 0.125],
}


def test_tau_table_has_before_after_domains_and_slots() -> None:
    assert {row["what"]: row["value"] for row in tau_table(EVALUATION)} == {
        "τ before training": "1.000",
        "τ after training": "1.500 ± 0.250",
        "τ, domain math": "–, 0 rows",
        "drafts accepted at slot 1": "50.0%",
        "drafts accepted at slot 2": "12.5%",
    }


def test_busy_is_a_share_of_each_stages_own_time() -> None:
    trained = {
        "stages": {"read": {"busy": 1, "starved": 0, "blocked": 3}, "idle": {"busy": 0, "starved": 0, "blocked": 0}}
    }
    assert busy_by_stage(trained) == {"read": 0.25, "idle": 0.0}
    assert pipeline_table(trained)[0] == {"stage": "read", "busy": "25.0%", "starved": "0.0%", "blocked": "75.0%"}


@pytest.mark.parametrize("losses", [[], [3.0], [3.0, 3.0], [9.0, 4.0, 3.5]])
def test_curve_is_an_image_whatever_the_losses(losses: list[float]) -> None:
    image = ElementTree.fromstring(curve_svg([{"loss": loss} for loss in losses]))
    points = image.find("{http://www.w3.org/2000/svg}polyline")
    assert points is not None
    assert len(points.attrib["points"].split()) == len(losses)


def test_supervised_tokens_of_sample_rows_are_bold(tmp_path: Path) -> None:
    tokens: Any = SimpleNamespace(
        offsets=np.array([0, 4, 6]), ids=np.array([1, 2, 3, 4, 5, 6]), mask=np.array([0, 0, 1, 1, 0, 1])
    )
    text = sample_rows(tokens, make_target(tmp_path))
    assert "> w1 w2**w3 w4**" in text
    assert "> w5**w6**" in text


def test_accepted_drafts_of_the_sample_are_bold_and_its_text_is_no_markup() -> None:
    runs = [{"text": "a", "accepted": 0, "tokens": ["a"]}, {"text": " b*\nc", "accepted": 1, "tokens": [" b*\n", "c"]}]
    text = report_markdown({"rows": "3 | 4"}, [{"runs": runs}])
    assert "| rows | 3 / 4 |" in text
    assert "> a **b\\* ⏎** c" in text


def test_progress_reads_as_a_line() -> None:
    progress = StageProgress("train", 12, 480, "steps", 2.1, 5.7, 222, "loss 4.12")
    assert str(progress) == "train: 12/480 steps  2.1/s  3 min 42 s left  loss 4.12"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.21, "3.2 s"), (42, "42 s"), (245, "4 min 05 s"), (7800, "2 h 10 min"), (702_000, "8 d 3 h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_table_of_a_token_cache_says_what_was_dropped_and_how_much_is_supervised(tmp_path: Path) -> None:
    rows = [[1, 2, 3, 4], [5, 6], [7]]
    table = pa.table({"input_ids": rows, "loss_mask": [[0, 0, 1, 1], [1, 1], [1]]})
    config = RowsConfig(source="in memory", vocabulary=10, max_dropped=0.5)
    manifest = TokenCache.open(build(config, home=tmp_path, tokenizer=None, vocabulary=None, data=table)).manifest
    manifest = replace(manifest, noted={"cut": 3}, messages={"user: read": 2}, supervised_shares=((5, 1), (10, 1)))
    shown = {row["what"]: row["value"] for row in tokens_table(manifest)}
    assert shown["supervised tokens"] == "4, 66.7%"
    assert shown["answers"] == "2, 1.00 a row"
    assert shown["dropped: too_short"] == shown["rows over 40 % up to 50 % supervised"] == "1"
    assert shown["rows over 90 % up to 100 % supervised"] == "1", "of a tenth, not of all up to it"
    assert (shown["noted: cut"], shown["messages of user: read"]) == ("3", "2")


def test_long_curve_is_thinned_by_means() -> None:
    values = [float(number) for number in range(45_001)]
    thin = thinned(values)
    assert len(thin) == 1000
    assert thin == sorted(thin)
    assert sum(thin) / 1000 == pytest.approx(22_500, rel=1e-3)
    assert (thinned([]), thinned([3.0, 1.0])) == ([], [3.0, 1.0])
    assert len(curve_svg([{"loss": value} for value in values])) < 20_000
