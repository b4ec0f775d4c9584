"""From what a server says while it streams to passes: whatever the chunks look like, each token is of one pass."""

import pytest

from dflash.serving.client import Spelled, walk_of
from dflash.serving.serve_check import parts_at


def times(*chunks: tuple[int, float, int]) -> list[dict[str, float]]:
    return [{"predicted_n": n, "predicted_ms": ms, "draft_n_accepted": accepted} for n, ms, accepted in chunks]


@pytest.mark.parametrize(
    ("chunks", "accepted"),
    [
        ([(1, 0.001, 0)], ()),
        ([(1, 0.001, 0), (2, 9.0, 0), (3, 18.0, 0)], (0, 0)),
        ([(1, 0.001, 0), (2, 9.0, 2), (3, 9.0, 2), (4, 9.0, 2), (5, 20.0, 2)], (2, 0)),
        # The last chunk repeats the one before, with the reason why the answer ended.
        ([(1, 0.001, 0), (2, 9.0, 1), (3, 9.0, 1), (3, 9.0, 1)], (1,)),
        # The stop token was an accepted draft; drafts behind it do not count.
        ([(1, 0.001, 0), (2, 9.0, 3), (3, 9.0, 3)], (2,)),
        # Chunks of half letters are missing: the passes that they came from are not.
        ([(1, 0.001, 0), (4, 30.0, 1)], (1, 0)),
        ([(1, 0.001, 0), (4, 30.0, 0)], (0, 0, 0)),
    ],
)
def test_passes_are_what_lies_between_two_times(
    chunks: list[tuple[int, float, int]], accepted: tuple[int, ...]
) -> None:
    walk = walk_of(times(*chunks))
    assert walk.accepted == accepted
    assert walk.emitted == chunks[-1][0] - 1


def test_texts_part_at_a_token() -> None:
    answer = Spelled((1, 2, 3, 4), (b"The", b" caf", "é".encode()[:1], "é".encode()[1:] + b"!"), (1.0, 2.0, 3.0, 4.0))
    assert parts_at(answer, "The café!") is None
    assert parts_at(answer, "The cafe!") == 2
    assert parts_at(answer, "A") == 0
    assert parts_at(answer, "The caf") == 2
    assert parts_at(answer, "The café! More") == 3, "a text that goes on is another text"
    cut = Spelled((1, 2), (b"The ", "é".encode()[:1]), (1.0, 1.0))
    assert parts_at(cut, "The \ufffd") is None, "an answer may end inside a letter"
