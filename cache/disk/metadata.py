"""What zarr writes beside our bytes: the metadata by which any Zarr reader finds them.

zarr is imported when something is written: a preparation that finds its token cache does without.
"""

from pathlib import Path

import xxhash

from cache.disk.manifest import Manifest
from cache.disk.shard import inner_chunk


def write_array_metadata(directory: Path, name: str, size: int, dtype: str) -> str:
    """The zarr.json of one array: a single uncompressed shard of inner chunks; returns its checksum."""
    import zarr

    inner = inner_chunk(size)
    zarr.create_array(
        store=str(directory / name),
        shape=(size,),
        dtype=dtype,
        chunks=(inner,),
        shards=(-(-max(1, size) // inner) * inner,),
        compressors=None,
        filters=None,
        fill_value=0,
    )
    return xxhash.xxh3_64_hexdigest((directory / name / "zarr.json").read_bytes())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """The zarr.json of the group, whose attributes are the manifest."""
    import zarr

    zarr.create_group(store=str(directory), attributes=manifest.to_json())
