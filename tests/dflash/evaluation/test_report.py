"""The page for people: it says what evaluation.json says, and is a page."""

import html.parser
import itertools
import re
from typing import Any

from dflash.evaluation.report import render

WALKED = {"value": 1.5, "se": 0.02, "accepted_per_round": 0.5}


def evaluation(**decode: Any) -> dict[str, Any]:
    return {
        "tau": {
            "before": {"value": 1.0, "se": None}, "after": WALKED, "rows": 9, "rows_held_out": 9,
            "convention": "as <decoded>",
        },
        "accepted_by_slot_before": [0.0, 0.0, 0.0],
        "accepted_by_slot": [0.4, 0.1, 0.0],
        "by_group": {"math": WALKED | {"rows": 5}, "facts & more": WALKED | {"rows": 4}},
        "decode": {
            "prompts": 2, "identical": 1, "near_ties": 1, "lossless": True, "temperature": 0.0, "tau": 2.667,
            "accepted_per_round": 1.667, "plain_tokens_per_s": 10.0, "speculative_tokens_per_s": 18.0, "speedup": 1.8,
            "by_group": {"math": {"tau": 2.5, "answers": 2}}, "convention": "greedy; template x",
        } | decode,
        "samples": [
            {
                "prompt": "What is <b>?", "group": "math",
                "runs": [
                    {"text": "It", "accepted": 0, "tokens": ["It"]},
                    {"text": " is a <tag>", "accepted": 2, "tokens": [" is", " a", " <tag>"]},
                    {"text": ".", "accepted": 1, "tokens": ["."]},
                ],
            }
        ],
    }  # fmt: skip


LINES = [
    {"steps": 5, "loss": 9.0 - i, "lr": 1e-3, "coverage_by_length": [[64, 10, 40], [128, 30 * i, 90]]} for i in range(4)
]


class Strict(html.parser.HTMLParser):
    """Every element that opens is closed, in order."""

    VOID = frozenset({"meta", "rect", "line", "polyline"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        assert tag in self.VOID

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_and_says_what_was_measured() -> None:
    page = render("my <run>", LINES, evaluation())
    parser = Strict()
    parser.feed(page)
    assert not parser.open
    for said in (
        "Drafter my <run>", "1.500 ± 0.020", "1.000 ± –", "2.667 over 2 prompts", "1.667: τ without the bonus token",
        "yes: 1 of 2 token for token, 1 parted at a near tie", "18.0 tokens/s with the drafter, 10.0 without: 1.80 ×",
        "as <decoded>", "greedy; template x", "facts & more", "1: 40%", "3: 0%", "What is <b>?",
        "5 tokens in 3 target passes", "up to 64 tokens25%", "up to 128 tokens50%",
    ):  # fmt: skip
        assert said in parser.text, said
    assert "<script" not in page
    assert "http" not in page
    assert page.count("<polyline") == 2


def test_each_run_has_one_colour_other_than_its_neighbours() -> None:
    page = render("run", LINES, evaluation())
    runs = re.findall(
        r'<span class="run" style="background:(#\w+)" title="([^"]+)">(.*?)</span>(?=<span class="run|</p>)', page
    )
    assert [title for _, title, _ in runs] == [
        "the prompt's pass",
        "pass 1: 3 tokens, 2 accepted drafts",
        "pass 2: 1 tokens, 1 accepted drafts",
    ]
    colours = [colour for colour, _, _ in runs]
    assert all(a != b for a, b in itertools.pairwise(colours))
    assert runs[1][2] == ' is a<span class="own"> &lt;tag&gt;</span>'
    assert runs[2][2] == ".", "an answer that ended with an accepted draft has no token of the target's own"


def test_what_cannot_be_said_is_not_said() -> None:
    page = render("run", LINES[:1], evaluation(lossless=None, temperature=0.7))
    assert "not comparable at temperature 0.7" in page
    assert "Too few lines of metrics" in page
    assert "NO: 1 of 2" in render("run", [], evaluation(lossless=False, near_ties=0))


def test_what_a_server_said_is_on_the_page() -> None:
    served = {
        "server": "llama.cpp <1>", "prompts": 3, "identical": 2, "near_ties": 1, "lossless": True, "tau": 1.4771,
        "tau_ours": 1.485, "plain_tokens_per_s": 10.0, "speculative_tokens_per_s": 18.0, "speedup": 1.8,
        "cases": {"two prompts at once": True, "a stop text": False}, "convention": "over HTTP",
    }  # fmt: skip
    page = Strict()
    page.feed(render("demo", LINES, evaluation(), served))
    assert (
        "llama.cpp <1>: same text yes: 2 of 3 token for token, 1 parted at a near tie; τ 1.477, 1.485 of ours"
        in page.text
    )
    assert "WRONG: a stop text" in page.text
    assert "Served: over HTTP." in page.text
