"""An open cache shows what was written, and a damaged one says which file is damaged."""

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from arrow_rows import rows_of, table

from cache.disk.manifest import ARRAYS, INNER_CHUNK, Manifest
from cache.disk.shard import inner_chunk, shard_bytes
from cache.disk.store import TokenCache
from cache.errors import CacheCorrupt, CacheError, CacheIncomplete, CacheMismatch

ROWS = [[i % 900, i % 7, 3, 4] for i in range(100)]


@pytest.fixture
def path(make: Any) -> Path:
    found: Path = make(data=table(ROWS)).path
    return found


def test_zarr_reads_what_numpy_maps(path: Path) -> None:
    cache = TokenCache.open(path)
    group = zarr.open_group(str(path), mode="r")
    for name in ARRAYS:
        assert (group[name][:] == getattr(cache, name)).all()
        assert group[name].dtype == getattr(cache, name).dtype
    assert group["ids"][4:8].tolist() == ROWS[1]
    assert Manifest.from_json(dict(group.attrs)) == cache.manifest


@pytest.mark.parametrize("size", [1, INNER_CHUNK - 1, INNER_CHUNK, INNER_CHUNK + 1, 2 * INNER_CHUNK + 5])
def test_inner_chunks_of_a_shard_are_read_alone(tmp_path: Path, size: int) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from cache.disk.metadata import write_array_metadata
    from cache.disk.shard import ShardFile

    values = np.arange(size, dtype=np.uint32)
    with ThreadPoolExecutor(1) as thread:
        file = ShardFile(tmp_path / "ids/c/0", "uint32", submit=thread.submit, buffer_bytes=1 << 16)
        for part in np.array_split(values, 3):
            file.write(part)
        found = file.close()
    write_array_metadata(tmp_path, "ids", size, "uint32")
    assert found[0] == shard_bytes(size, 4) == (tmp_path / "ids/c/0").stat().st_size
    array = zarr.open_array(str(tmp_path / "ids"), mode="r")
    assert array.chunks == (inner_chunk(size),)
    assert array[size - 1] == size - 1
    assert (array[:] == values).all()
    front = np.memmap(tmp_path / "ids/c/0", dtype=np.uint32, mode="r", shape=(size,))
    assert (front == values).all()


def test_tensorstore_reads_one_row_of_it(path: Path) -> None:
    tensorstore = pytest.importorskip("tensorstore")
    store = {"driver": "file", "path": str(path / "ids")}
    ids = tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True).result()
    assert ids[8:12].read().result().tolist() == ROWS[2]


def test_maps_are_read_only(path: Path) -> None:
    cache = TokenCache.open(path)
    for name in ARRAYS:
        with pytest.raises(ValueError, match="read-only"):
            getattr(cache, name)[0] = 1


def test_it_pickles_as_its_path(path: Path) -> None:
    cache = TokenCache.open(path)
    pickled = pickle.dumps(cache)
    assert len(pickled) < 500
    assert rows_of(pickle.loads(pickled)) == ROWS


def test_views_outlive_the_cache_and_its_removal(path: Path) -> None:
    ids = TokenCache.open(path).ids
    shutil.rmtree(path)
    assert ids.tolist() == [token for row in ROWS for token in row]


def damaged(path: Path, name: str, change: Any) -> Path:
    """Replace a file by its changed content, as a copy tool or a failing disk would."""
    file = path / name
    content = change(bytearray(file.read_bytes()))
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    return file


def flip(content: bytearray) -> bytearray:
    content[len(content) // 2] ^= 1
    return content


FILES = [f"{name}/c/0" for name in ARRAYS]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", [1, 4, 10**9])
def test_a_file_cut_short_does_not_open(path: Path, name: str, cut: int) -> None:
    file = damaged(path, name, lambda content: content[: max(0, len(content) - cut)])
    with pytest.raises(CacheIncomplete, match=rf"{file}: \d+ bytes, expected \d+: it was cut short"):
        TokenCache.open(path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_has_grown_does_not_open(path: Path, name: str) -> None:
    damaged(path, name, lambda content: content + b"\0")
    with pytest.raises(CacheCorrupt, match=rf"{name}: \d+ bytes, expected \d+: it has grown"):
        TokenCache.open(path)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_never_read_as_zeros(path: Path, name: str) -> None:
    damaged(path, name, lambda _: None)
    assert zarr.open_group(str(path), mode="r")[name.split("/")[0]][0] == 0  # what a Zarr reader makes of it
    with pytest.raises(CacheIncomplete, match=f"{name}: missing"):
        TokenCache.open(path)


@pytest.mark.parametrize("name", [*FILES, *(f"{name}/zarr.json" for name in ARRAYS)])
def test_a_flipped_bit_is_found(path: Path, name: str) -> None:
    damaged(path, name, flip)
    with pytest.raises(CacheCorrupt, match=rf"{name}(: checksum \w+, expected \w+|: offsets)"):
        TokenCache.open(path).verify()


def test_every_bit_of_the_manifest_counts(path: Path) -> None:
    file = path / "zarr.json"
    content = file.read_bytes()
    for position in range(0, len(content), 11):
        broken = bytearray(content)
        broken[position] ^= 1
        file.write_bytes(broken)
        try:
            shown = TokenCache.open(path)
        except CacheError:
            continue
        file.write_bytes(content)
        assert shown.manifest == TokenCache.open(path).manifest, position  # blanks between values


def test_swapped_files_are_found(make: Any, path: Path) -> None:
    other = make(data=table([[token + 1 for token in row] for row in ROWS])).path
    shutil.copy(other / "ids/c/0", path / "ids/c/0")
    with pytest.raises(CacheCorrupt, match="ids/c/0: checksum"):
        TokenCache.open(path).verify()


def test_offsets_must_rise_and_end_at_the_last_token(path: Path) -> None:
    def swap(content: bytearray) -> bytearray:
        content[8:16], content[16:24] = content[16:24], content[8:16]
        return content

    damaged(path, "offsets/c/0", swap)
    with pytest.raises(CacheCorrupt, match="offsets fall after row 1"):
        TokenCache.open(path)


def test_what_is_no_cache_is_said_to_be_none(path: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheIncomplete, match="no such directory"):
        TokenCache.open(tmp_path / "nowhere")
    (path / "zarr.json").unlink()
    with pytest.raises(CacheIncomplete, match=r"no zarr\.json in it"):
        TokenCache.open(path)
    (path / "zarr.json").write_text("{")
    with pytest.raises(CacheCorrupt, match="not a manifest"):
        TokenCache.open(path)


def test_another_layout_version_is_refused(path: Path) -> None:
    content = json.loads((path / "zarr.json").read_text())
    content["attributes"]["layout_version"] = 99
    (path / "zarr.json").write_text(json.dumps(content))
    with pytest.raises(CacheMismatch, match="layout version 99, expected 1"):
        TokenCache.open(path)
