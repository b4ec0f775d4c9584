"""Sources on S3, the web and the hub become local files: once by etag or commit, whole or absent, resumed."""

import json
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from file_servers import Web, served

from cache.build import build
from cache.config import RowsConfig
from cache.disk.store import TokenCache
from cache.elsewhere import download, places
from cache.elsewhere import files as fetching
from cache.elsewhere.download import FetchProgress
from cache.elsewhere.places import address_of, fetched
from cache.errors import BadSource

ROWS = [[1, 2, 3], [4, 5]]


def lines(rows: list[list[int]] = ROWS) -> bytes:
    return "".join(json.dumps({"input_ids": row, "loss_mask": [1] * len(row)}) + "\n" for row in rows).encode()


@pytest.fixture
def web() -> Iterator[Web]:
    with served() as web:
        yield web


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def run(source: str | list[str], **options: Any) -> TokenCache:
        rows = RowsConfig(source=source, **{"held_out": 0.0} | options)
        return TokenCache.open(build(rows, home=tmp_path / "home", tokenizer=None, vocabulary=1000))

    return run


def rows_of(cache: TokenCache) -> list[list[int]]:
    return [cache.ids[a:b].tolist() for a, b in zip(cache.offsets[:-1], cache.offsets[1:], strict=True)]


def test_what_is_a_path_and_what_is_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own/there").write_text("")
    assert address_of("own/rows") == "hf://datasets/own/rows"
    assert address_of("s3://bucket/a.jsonl") == "s3://bucket/a.jsonl"
    for path in (
        "own/there",
        "/data/rows",
        "own/rows.jsonl",
        "own/*.parquet",
        "rows",
        "./own/rows",
        "~/own/rows",
        "a/b/c",
    ):
        assert address_of(path) is None
    for source, message in (
        ("ftp://host/a.jsonl", "ftp:// is not read, expected a path"),
        ("https://me:secret@host/a.jsonl", r"https://…@host/a\.jsonl: a name or password in an address"),
    ):
        with pytest.raises(BadSource, match=message):
            places.check_address(source)


def test_s3_is_read_like_local_files_and_has_their_key(s3: Any, make: Any, tmp_path: Path) -> None:
    s3.pipe("bucket/set/a.jsonl", lines())
    s3.pipe("bucket/set/deep/train b #2.jsonl", lines([[7, 8]]))
    (tmp_path / "local/deep").mkdir(parents=True)
    (tmp_path / "local/a.jsonl").write_bytes(lines())
    (tmp_path / "local/deep/train b #2.jsonl").write_bytes(lines([[7, 8]]))
    cache = make("s3://bucket/set")
    assert rows_of(cache) == [*ROWS, [7, 8]]
    assert cache.key == make(str(tmp_path / "local")).key
    assert cache.manifest.sources == ["s3://bucket/set"]
    assert rows_of(make("s3://bucket/set/*.jsonl")) == ROWS
    assert rows_of(make("s3://bucket/set/a.jsonl")) == ROWS
    assert rows_of(make(["s3://bucket/set/a.jsonl", str(tmp_path / "local/deep")])) == [*ROWS, [7, 8]]
    with pytest.raises(BadSource, match="nothing at s3://bucket/none"):
        make("s3://bucket/none")


def test_only_what_changed_is_fetched_again(s3: Any, tmp_path: Path) -> None:
    told: list[FetchProgress] = []
    s3.pipe("bucket/set/a.jsonl", lines())
    s3.pipe("bucket/set/b.jsonl", lines([[7, 8]]))
    first = fetched(RowsConfig(source="s3://bucket/set"), tmp_path, told.append).source
    assert told[-1].done == told[-1].total == len(lines()) + len(lines([[7, 8]]))
    told.clear()
    assert fetched(RowsConfig(source="s3://bucket/set"), tmp_path, told.append).source == first
    assert not told
    s3.pipe("bucket/set/b.jsonl", lines([[9, 9]]))
    second = fetched(RowsConfig(source="s3://bucket/set"), tmp_path, told.append).source
    assert second != first
    assert told[-1].total == len(lines([[9, 9]]))
    assert (Path(second) / "a.jsonl").samefile(Path(first) / "a.jsonl")
    assert (Path(first) / "b.jsonl").read_bytes() == lines([[7, 8]])


def test_a_bucket_that_is_not_ours_is_named(s3: Any, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(type(s3), "retries", 1)
    type(s3).clear_instance_cache()
    with pytest.raises(BadSource, match=r"s3://bucket/set: cannot be fetched .*credentials"):
        make("s3://bucket/set")


def test_the_web_is_fetched_once_by_etag(web: Web, make: Any) -> None:
    web.files["/data/rows.jsonl"] = lines()
    source = f"{web.address}/data/rows.jsonl"
    assert rows_of(make(source)) == ROWS
    web.asked.clear()
    assert rows_of(make(source)) == ROWS
    assert not [one for one in web.asked if one[0] == "GET" and one[2] is not None and one[2] != "bytes=0-0"]
    web.files["/data/rows.jsonl"] = lines([[6, 6]])
    assert rows_of(make(source)) == [[6, 6]]
    with pytest.raises(BadSource, match="nothing at http"):
        make(f"{web.address}/data/none.jsonl")
    web.has_etags = False
    with pytest.raises(BadSource, match="neither an etag nor a date"):
        make(source)


def test_a_download_that_broke_off_goes_on(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "BLOCK_BYTES", 4096)
    data = lines([[i % 900, i % 700] for i in range(1000)])
    web.files["/rows.jsonl"] = data
    web.cut["/rows.jsonl"] = 3 * 4096 + 100
    rows = RowsConfig(source=f"{web.address}/rows.jsonl")
    with pytest.raises(BadSource, match="What has come is kept"):
        fetched(rows, tmp_path)
    assert not list((tmp_path / "sources").rglob("rows.jsonl"))
    web.asked.clear()
    told: list[FetchProgress] = []
    local = Path(str(fetched(rows, tmp_path, told.append).source))
    assert local.read_bytes() == data
    starts = [int(one[2].removeprefix("bytes=").partition("-")[0]) for one in web.asked if one[0] == "GET" and one[2]]
    assert min(starts) >= 2 * 4096
    assert told[0].done >= 2 * 4096
    assert told[-1].done == len(data)


def test_a_file_that_changes_while_it_comes_is_refused(
    web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.files["/rows.jsonl"] = lines()
    rows = RowsConfig(source=f"{web.address}/rows.jsonl")

    def change(_: FetchProgress) -> None:
        web.files["/rows.jsonl"] = lines([[1, 2, 3], [4, 6]])

    with pytest.raises(BadSource, match="changed while it was fetched"):
        fetched(rows, tmp_path, change)
    assert Path(str(fetched(rows, tmp_path).source)).read_bytes() == lines([[1, 2, 3], [4, 6]])


def test_room_is_checked_first(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    web.files["/rows.jsonl"] = lines()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage(0, 0, download.LEFT_FREE + 10))
    with pytest.raises(BadSource, match=r"GB to fetch, but .* GB free"):
        fetched(RowsConfig(source=f"{web.address}/rows.jsonl"), tmp_path)
    assert not [one for one in web.asked if one[0] == "GET" and one[2] not in (None, "bytes=0-0")]


@pytest.fixture
def hub(web: Web, monkeypatch: pytest.MonkeyPatch) -> Web:
    from huggingface_hub import constants, hf_api

    monkeypatch.setattr(constants, "ENDPOINT", web.address)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", web.address + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hf_api.api, "endpoint", web.address)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return web


def test_a_data_set_of_the_hub_is_kept_by_commit(hub: Web, make: Any, tmp_path: Path) -> None:
    hub.files = {
        "/data/train_sft.jsonl": lines(),
        "/data/test_sft.jsonl": lines([[5, 5]]),
        "/README.md": b"# rows",
        "/.gitattributes": b"",
    }
    cache = make("own/rows", split="train_sft")
    assert rows_of(cache) == ROWS
    assert cache.manifest.sources == [f"hf://datasets/own/rows@{'0' * 12}"]
    assert not [one for one in hub.asked if one[1].endswith("README.md")]
    assert rows_of(make("hf://datasets/own/rows/data/test_sft.jsonl", revision="main")) == [[5, 5]]
    before = len(hub.asked)
    assert rows_of(make("own/rows", split="train_sft", revision="0" * 40)) == ROWS
    assert len(hub.asked) == before  # a commit never changes
    hub.commit = "1" * 40
    hub.files["/data/train_sft.jsonl"] = lines([[3, 3]])
    assert rows_of(make("own/rows", split="train_sft")) == [[3, 3]]
    assert rows_of(make("own/rows", split="train_sft", revision="0" * 40)) == ROWS
    with pytest.raises(BadSource, match=r"own/none: no path here, and no data set of the hub"):
        make("own/none")
    with pytest.raises(BadSource, match="Name one of them"):
        make("hf://datasets/own/rows@main", revision="other")


def test_the_hub_is_not_needed_for_what_is_here(hub: Web, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.files = {"/rows.jsonl": lines()}
    make("own/rows")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert rows_of(make("own/rows")) == ROWS
