"""Places of tokens by what they spell are the tokenizer's own offsets, whatever the kind of tokenizer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from toy import byte_letters

from cache.chat.token_places import Speller, byte_places

WORDS = ["[E]", "[A] ", "ab", "aab", " b", "é", "e\u0301", "日本", "😀", "A", "ﬁ", " ", "\n"]


def byte_level(normalizer=None, **token) -> Tokenizer:
    letters = byte_letters()
    a, b = letters[ord("a")], letters[ord("b")]
    vocabulary = {letter: byte for byte, letter in letters.items()} | {"[E]": 256, a + b: 257}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[(a, b)]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("[E]", special=True, normalized=False, **token)])
    return backend


def with_blanks(normalizer) -> Tokenizer:
    """A vocabulary with a mark for blanks and bytes for what it lacks."""
    tokens = ["<unk>", "\u2581", "a", "b", "é", "\u2581b", "日", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [("\u2581", "b")]
    backend = Tokenizer(
        models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken("[E]", special=True, normalized=False)])
    return backend


KINDS = {
    "byte-level": byte_level,
    "normalised": lambda: byte_level(normalizers.NFC()),
    "compatibility": lambda: byte_level(normalizers.NFKC()),
    "lower case": lambda: byte_level(normalizers.Lowercase()),
    "takes blanks": lambda: byte_level(lstrip=True, rstrip=True),
    "blanks": lambda: with_blanks(normalizers.Replace(" ", "\u2581")),
    "blank before": lambda: with_blanks(
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    ),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map("".join), min_size=1, max_size=5))
def test_places_are_the_tokenizers_own(kind, texts):
    backend = KINDS[kind]()
    speller = Speller(backend)
    for _ in range(2):  # the second batch by what the first one showed
        encoded = speller.encode([[text] for text in texts * 4])
        whole = "".join(texts * 4).encode()
        for i, text in enumerate(texts * 4):
            theirs = backend.encode(text, add_special_tokens=False)
            tokens = slice(encoded.offsets[i], encoded.offsets[i + 1])
            assert encoded.ids[tokens].tolist() == theirs.ids
            starts = encoded.start[tokens] - encoded.text_start[i]
            ends = encoded.end[tokens] - encoded.text_start[i]
            places = byte_places(text)
            for start, end, (low, high) in zip(starts, ends, theirs.offsets, strict=True):
                # Spelled places are exact; the tokenizer's cover the whole of a character that several tokens share.
                assert places[low] <= start <= end <= places[high]
        assert encoded.text_start[-1] == len(whole)


def test_byte_level_places_are_exact():
    encoded = Speller(byte_level()).encode([["a😀ab[E]é"]])
    assert encoded.start.tolist() == [0, 1, 2, 3, 4, 5, 7, 10, 11]
    assert encoded.end.tolist() == [1, 2, 3, 4, 5, 7, 10, 11, 12]


def test_pieces_are_tokenised_apart_and_counted_together():
    encoded = Speller(byte_level()).encode([["a", "b"], ["ab", "[", "E]"], []])
    assert encoded.ids.tolist() == [97, 98, 257, *b"[E]"]
    assert encoded.offsets.tolist() == [0, 2, 6, 6]
    assert encoded.text_start.tolist() == [0, 2, 7, 7]


def test_saved_truncation_and_padding_are_off():
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert Speller(backend).encode([["[E]bcdef"]]).ids.tolist() == [256, *b"bcdef"]


def test_texts_that_are_not_spelled_are_encoded_once():
    backend = with_blanks(normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]))
    speller = Speller(backend)
    first = speller.encode([["ab"]] * 20)
    assert not speller._spells
    assert np.array_equal(speller.encode([["ab"]] * 20).start, first.start)
