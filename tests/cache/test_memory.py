"""A conversion holds a chunk, not the source: also where the source is one record batch."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

ROWS, LENGTH = 20_000, 2_000  # 160 MB of ids, 40 MB of mask

CODE = """
import json, sys
from pathlib import Path
from cache.config import RowsConfig
from cache.build import build

def memory_mb(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1e3 for line in lines if line.startswith(field + ":"))

own = [memory_mb("RssAnon")]
rows = RowsConfig(source=sys.argv[1], vocabulary=151936, held_out=0.1, max_tokens=int(sys.argv[3]))
report = lambda _: own.append(memory_mb("RssAnon"))
build(rows, home=Path(sys.argv[2]), tokenizer=None, vocabulary=None, progress=report)
print(json.dumps({"resident": memory_mb("VmHWM"), "own": max(own) - own[0]}))
"""


@pytest.mark.parametrize(("batch_rows", "max_tokens"), [(1000, 3072), (ROWS, 1500)])
def test_memory_is_bounded_whatever_the_batches_are(tmp_path: Path, batch_rows: int, max_tokens: int) -> None:
    source = tmp_path / "rows.arrow"
    schema = pa.schema([("input_ids", pa.large_list(pa.int32())), ("loss_mask", pa.large_list(pa.int8()))])
    offsets = pa.array(np.arange(batch_rows + 1, dtype=np.int64) * LENGTH)
    with pa.ipc.new_stream(source, schema) as stream:
        for first in range(0, ROWS, batch_rows):
            ids = (np.arange(batch_rows * LENGTH, dtype=np.int32) + first) % 151_936
            columns = [
                pa.LargeListArray.from_arrays(offsets, pa.array(ids)),
                pa.LargeListArray.from_arrays(offsets, pa.array(np.ones(batch_rows * LENGTH, dtype=np.int8))),
            ]
            stream.write_batch(pa.record_batch(columns, schema=schema))
    assert source.stat().st_size > 2e8
    command = [sys.executable, "-c", CODE, str(source), str(tmp_path / "home"), str(max_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(found)
    assert found["own"] < 100, found
    assert found["resident"] < 300, found
