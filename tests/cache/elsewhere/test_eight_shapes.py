"""The same conversations in eight shapes: equal ids, masks and domains, and one key where the bytes are the same."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
from toy import save_tokenizer

from cache.build import build
from cache.config import RowsConfig
from cache.disk.store import TokenCache

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "smollm2-chat.jsonl"
EVERY = 60  # of the examples, so that the test is fast


def test_eight_shapes_are_the_same_rows(s3: Any, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in EXAMPLES.read_text().splitlines()[::EVERY]]
    optional = [row | ({"finished": i % 2 == 0, "tools": []} if i % 3 else {}) for i, row in enumerate(rows)]
    sharegpt = [
        {"domain": row["domain"], "conversations": [{"from": names[m["role"]], "value": m["content"]} for m in turns]}
        for row in optional
        for names in [{"system": "system", "user": "human", "assistant": "gpt"}]
        for turns in [row["messages"]]
    ]
    sharegpt = [
        one | {k: row[k] for k in ("finished",) if k in row} for one, row in zip(sharegpt, optional, strict=True)
    ]
    text = "".join(json.dumps(row) + "\n" for row in optional).encode()
    table = pa.Table.from_pylist([{"finished": None} | row for row in optional])
    for name, content in {
        "lines.jsonl": text,
        "lines.jsonl.gz": gzip.compress(text),
        "lines.jsonl.zst": pa.Codec("zstd").compress(text, asbytes=True),
        "array.json": json.dumps(optional, indent=2).encode(),
        "sharegpt.jsonl": "".join(json.dumps(row) + "\n" for row in sharegpt).encode(),
    }.items():
        (tmp_path / name).write_bytes(content)
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    saved = tmp_path / "saved"
    saved.mkdir()
    with pa.ipc.new_stream(saved / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    s3.pipe("bucket/lines.jsonl", text)

    names = [
        "lines.jsonl",
        "lines.jsonl.gz",
        "lines.jsonl.zst",
        "array.json",
        "rows.parquet",
        "saved",
        "sharegpt.jsonl",
    ]
    sources = [*(str(tmp_path / name) for name in names), "s3://bucket/lines.jsonl"]
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    caches = [
        TokenCache.open(build(RowsConfig(source=source), home=tmp_path / "home", tokenizer=tokenizer, vocabulary=None))
        for source in sources
    ]
    first = caches[0]
    assert first.manifest.rows == len(rows)
    facts = ("rows", "tokens", "supervised_tokens", "answers", "dropped", "noted", "group_names", "messages")
    for cache in caches:
        for array in ("ids", "mask", "offsets", "split", "group", "source_row"):
            assert (getattr(cache, array) == getattr(first, array)).all(), (cache.manifest.sources, array)
        assert [getattr(cache.manifest, name) for name in facts] == [getattr(first.manifest, name) for name in facts]
    assert caches[-1].key == first.key
    assert len({cache.key for cache in caches}) == len(caches) - 1
