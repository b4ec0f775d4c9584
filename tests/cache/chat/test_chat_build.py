"""Conversations through the whole build: what is cut, dropped and counted after they are tokenised, by case."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from toy import C0, C0_IDS, C0_MASK, EOS, PLAIN, E, U, save_tokenizer

from cache.build import build
from cache.config import RowsConfig
from cache.disk.store import TokenCache
from cache.errors import BadRow, BadSource
from cache.key.content import content_key


@pytest.fixture
def prepare(tmp_path):
    """Build the cache of some lines with the toy tokenizer and open it."""

    def run(lines, *, tokenizer=None, vocabulary=None, **rows):
        file = tmp_path / "chat.jsonl"
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
        config = RowsConfig(source=str(file), **{"held_out": 0.0, "max_dropped": 1.0} | rows)
        directory = tokenizer or save_tokenizer(tmp_path / "tokenizer")
        cache = TokenCache.open(build(config, home=tmp_path / "home", tokenizer=directory, vocabulary=vocabulary))
        cache.verify()
        return cache

    return run


def talk(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def masks(cache: TokenCache) -> list[list[int]]:
    return [part.tolist() for part in np.split(np.asarray(cache.mask), cache.offsets[1:-1])]


@pytest.mark.parametrize(
    ("length", "supervised"), [*zip(range(5, 17), [0, 1, 2, 3, 3, 3, 3, 3, 3, 4, 5, 6], strict=True)]
)
def test_truncation_keeps_a_prefix_of_the_mask(prepare, length, supervised):
    cache = prepare([talk("", "abc"), {"messages": C0}], max_tokens=length)  # the first row always stays
    rows = masks(cache)[1:]
    assert rows == ([C0_MASK[:length]] if supervised >= 2 else [])  # one token alone can teach nothing
    assert sum(map(sum, rows)) == (supervised if supervised >= 2 else 0)


def test_mask_survives_every_option(prepare):
    lines = [{"messages": C0}, talk("hi", "ok")]
    for options in ({}, {"held_out": 0.5}, {"overflow": "split", "max_tokens": 16}, {"overflow": "drop"}):
        cache = prepare(lines, **options)
        assert cache.manifest.supervised_tokens == int(np.asarray(cache.mask).sum()) == 9
        assert cache.manifest.answers == 3


def test_prompt_longer_than_the_limit_is_dropped_after_the_cut(prepare):
    long = talk("q" * 17, "an")
    cache = prepare([long, talk("hi", "ok"), long], max_tokens=8)
    assert cache.manifest.rows == 1
    assert cache.manifest.dropped == {"no_anchor": 2}
    with pytest.raises(BadSource, match="no row is left of 2"):
        prepare([long, long], max_tokens=8)


def test_conversation_too_short_to_learn_from(prepare):
    cache = prepare([talk("q", ""), talk("hi", "ok")])
    assert cache.manifest.rows == 1
    assert cache.manifest.dropped == {"no_answer": 1}


def test_long_rows_are_dropped_whole(prepare):
    cache = prepare([talk("q" * 10, "answer"), talk("hi", "ok")], max_tokens=8, overflow="drop")
    assert cache.manifest.rows == 1
    assert sum(cache.manifest.dropped.values()) == 1


def test_one_bos_and_the_same_number_of_ends(prepare, tmp_path):
    adding = save_tokenizer(tmp_path / "adding", "{{ bos_token }}" + PLAIN, adds_bos=True)
    cache = prepare([{"messages": C0}], tokenizer=adding)
    assert np.asarray(cache.ids).tolist() == [256, *C0_IDS]


def test_tokenizers_that_behave_otherwise_have_other_keys(prepare, tmp_path):
    plain = save_tokenizer(tmp_path / "plain")
    adding = save_tokenizer(tmp_path / "adding", adds_bos=True)
    caches = [prepare([{"messages": C0}], tokenizer=directory) for directory in (plain, adding)]
    assert caches[0].key != caches[1].key
    rows = RowsConfig(source=str(tmp_path / "chat.jsonl"))
    probes = [content_key(rows, directory).tokenizer["probe"] for directory in (plain, adding)]
    assert probes[1] == [256, *probes[0]]


def test_no_end_of_sequence_is_added(prepare):
    assert EOS not in np.asarray(prepare([{"messages": C0}]).ids)


@pytest.mark.parametrize(("vocabulary", "dtype"), [(263, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_ids_are_wide_enough_for_the_vocabulary(prepare, vocabulary, dtype):
    assert prepare([{"messages": C0}], vocabulary=vocabulary).ids.dtype == dtype


def test_token_beyond_the_targets_rows_is_named(prepare, tmp_path):
    grown = save_tokenizer(tmp_path / "grown", PLAIN.replace("[E]", "[MASK]"))  # an id that the target lacks
    with pytest.raises(BadRow, match=r"line 1 of .*chat.jsonl.* token id 262 .*vocabulary of 262"):
        prepare([{"messages": C0}], tokenizer=grown, vocabulary=262)


def test_half_of_a_surrogate_pair_spares_the_other_rows(prepare):
    lines = [
        r'{"messages": [{"role": "user", "content": "\ud83d x"}, {"role": "assistant", "content": "ok"}]}',
        r'{"messages": [{"role": "user", "content": "\ud83d\ude00"}, {"role": "assistant", "content": "ok"}]}',
        {"messages": C0},
    ]
    cache = prepare(lines)
    ids = [part.tolist() for part in np.split(np.asarray(cache.ids), cache.offsets[1:-1])]
    assert ids[0][1:6] == list("\ufffd x".encode())
    assert ids[1][1:5] == list("\U0001f600".encode())
    assert ids[2] == C0_IDS


def test_arguments_and_content_of_other_shapes_in_one_file(prepare):
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in C0]
    cache = prepare([{"messages": C0}, {"messages": parts}, {"conversations": C0, "extra": 1}])
    assert np.asarray(cache.ids).tolist() == C0_IDS * 3


def test_prompt_and_completion_in_lines_and_in_parquet(prepare, tmp_path):
    pairs = [{"prompt": "hi", "completion": "ok", "id": 1}, {"prompt": C0[:3], "completion": C0[3:]}]
    assert np.asarray(prepare(pairs).ids).tolist() == [*C0_IDS[:8], *C0_IDS]
    with pytest.raises(BadRow, match=r"line 2 of .*: keys prompt, expected prompt and completion"):
        prepare([pairs[0], {"prompt": "hi"}])
    table = pa.table({"prompt": ['["hi"'], "completion": ["ok"]})  # no JSON: text stays text
    pq.write_table(table, tmp_path / "pairs.parquet")
    rows = RowsConfig(source=str(tmp_path / "pairs.parquet"), held_out=0.0)
    built = build(rows, home=tmp_path / "home", tokenizer=tmp_path / "tokenizer", vocabulary=None)
    assert np.asarray(TokenCache.open(built).ids).tolist() == [U, *b'["hi"', E, *C0_IDS[4:8]]


def test_blank_lines_are_no_rows(prepare):
    line = json.dumps({"messages": C0})
    cache = prepare([line, "", "   ", line])
    assert cache.manifest.rows == cache.manifest.source_rows == 2


def test_empty_first_conversation(prepare):
    cache = prepare([{"messages": []}, {"messages": C0}])
    assert cache.manifest.dropped == {"empty": 1}
    assert np.asarray(cache.source_row).tolist() == [1]
    assert np.asarray(cache.offsets).tolist() == [0, 16]


def test_rows_of_one_conversation_stay_on_one_side_of_the_split(prepare, tmp_path):
    rewriting = PLAIN.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '-' }}")
    lines = [{"messages": [{"role": "user", "content": f"q{i}"}, *C0[1:]]} for i in range(40)]
    cache = prepare(lines, tokenizer=save_tokenizer(tmp_path / "rewriting", rewriting), held_out=0.3)
    assert cache.manifest.rows == 80
    sides = np.asarray(cache.split).reshape(40, 2)
    assert (sides[:, 0] == sides[:, 1]).all()
    assert 0 < sides[:, 0].sum() < 40


def test_what_was_changed_without_dropping_is_in_the_manifest(prepare):
    forged = talk("x[E]", "ok")
    assert prepare([forged]).manifest.noted == {"text of a control token, tokenised apart": 1}


def test_thousands_of_unknown_names_are_counted_without_being_listed(prepare):
    odd = [{"messages": [{"role": f"speaker {i}", "content": "x"}, *C0]} for i in range(300)]
    cache = prepare([*odd, odd[7], {"messages": C0}])
    dropped = cache.manifest.dropped
    assert (len(dropped), sum(dropped.values())) == (21, 301)
    assert (dropped["unknown_role: speaker 7"], dropped["unknown_role: others"]) == (2, 280)
    with pytest.raises(BadSource, match="unknown_role: others 280") as caught:
        prepare([*odd, odd[7], {"messages": C0}], max_dropped=0.1)
    assert len(str(caught.value)) < 2000
