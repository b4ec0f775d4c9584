"""Which ids a drafter of a small vocabulary may draft: those that the training answers hold most often."""

from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Int64
from numpy import ndarray

from cache.disk.store import TokenCache
from dflash.model.vocabulary import Vocabulary

_READ_TOKENS = 1 << 24  # at once


def choose_ids(vocabulary: Vocabulary, store: TokenCache, vocab_size: int) -> float:
    """Fill in a drafter's ids, and say which share of the supervised training tokens they are."""
    counts = supervised_counts(store, vocab_size)
    ids = most_frequent(counts, vocabulary.ids.numel())
    vocabulary.ids.copy_(torch.from_numpy(ids))
    return float(counts[ids].sum() / max(1, counts.sum()))


def supervised_counts(store: TokenCache, vocab_size: int) -> Int64[ndarray, " V"]:
    """How often each id is a supervised token of a training row, read once from front to back."""
    trained = np.zeros(store.lengths.size, dtype=bool)
    trained[store.rows(0)] = True
    counts = np.zeros(vocab_size, dtype=np.int64)
    cuts = np.searchsorted(store.offsets, np.arange(0, int(store.offsets[-1]), _READ_TOKENS))
    bounds = np.unique([*cuts, trained.size]).tolist()
    for first, last in pairwise(bounds):
        piece = slice(int(store.offsets[first]), int(store.offsets[last]))
        counted = store.mask[piece].astype(bool) & np.repeat(trained[first:last], store.lengths[first:last])
        counts += np.bincount(store.ids[piece][counted], minlength=vocab_size)
    return counts


def most_frequent(counts: Int64[ndarray, " V"], size: int) -> Int64[ndarray, " n"]:
    """So many ids with the highest counts, ascending; of equally frequent ones the lowest."""
    return np.sort(np.argsort(-counts, kind="stable")[:size])
