"""Which ids are drafted: counted over supervised tokens of training rows, ties by id."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from cache.disk.store import TokenCache
from dflash.config import DrafterConfig, RunConfig, TargetConfig
from dflash.model.vocabulary import Vocabulary
from dflash.training import vocabulary_ids
from dflash.training.vocabulary_ids import choose_ids, most_frequent, supervised_counts


@given(arrays(np.int64, st.integers(1, 30), elements=st.integers(0, 3)), st.data())
def test_the_most_frequent_come_first_and_of_equals_the_lowest(counts: np.ndarray, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, counts.size))
    assert most_frequent(counts, size).tolist() == sorted(
        sorted(range(counts.size), key=lambda i: (-counts[i], i))[:size]
    )


def test_counts_are_those_of_a_loop_over_training_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_ids, "_READ_TOKENS", 100)
    store = TokenCache.open(tiny.make_rows(tmp_path))
    seen: Counter[int] = Counter()
    for row in store.rows(0).tolist():
        piece = slice(store.offsets[row], store.offsets[row + 1])
        seen.update(np.asarray(store.ids[piece])[np.asarray(store.mask[piece]) == 1].tolist())
    counts = supervised_counts(store, tiny.VOCABULARY)
    assert dict(enumerate(counts.tolist())) == {i: seen[i] for i in range(tiny.VOCABULARY)}
    vocabulary = Vocabulary(9)
    share = choose_ids(vocabulary, store, tiny.VOCABULARY)
    assert share == pytest.approx(sum(seen[i] for i in vocabulary.ids.tolist()) / sum(seen.values()))


@pytest.mark.parametrize(
    "drafter",
    [
        {"kind": "dflash"},
        {"kind": "dflash2"},
        {"kind": "dspark", "tables": "free"},
        {"kind": "dspark", "markov": "gated"},
    ],
)
def test_a_drafter_that_cannot_tell_a_server_is_refused(drafter: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"drafter\.vocabulary is told to servers"):
        RunConfig(target=TargetConfig(model="x"), drafter=DrafterConfig(mask_token_id=1, vocabulary=5, **drafter))  # type: ignore[arg-type]
