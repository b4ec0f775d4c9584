"""What whole-run tests stand on."""

from importlib.util import find_spec

import tiny


def test_what_is_imported_once_for_all_runs_exists() -> None:
    assert [name for name in tiny.PRELOADED if find_spec(name) is None] == []
