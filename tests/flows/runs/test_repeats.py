"""What is tried again, and what would only fail again."""

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from cache.errors import BadRow
from flows.errors import StageError, StageKilled
from flows.runs.repeats import is_hopeless, is_worth_retrying


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), False),
        (OSError(errno.EROFS, "Read-only file system"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (BadRow("row 17"), False),
        (OSError(errno.EIO, "Input/output error"), True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), True),
        (StageKilled("out of memory"), True),
        (StageError("a lost GPU"), True),
    ],
)
def test_only_what_may_do_better_next_time_is_tried_again(failure: Exception, expected: bool) -> None:
    state: Any = SimpleNamespace(result=lambda raise_on_failure: failure)
    assert is_worth_retrying(SimpleNamespace(name="slice", retries=3), None, state) is expected
    assert is_hopeless(failure) is not expected
