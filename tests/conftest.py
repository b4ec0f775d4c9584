"""The order in which several workers take the files of tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Last folders first: those of the flows and of whole programs take longest, and nobody should end with them.
    Files of `cache` that are in no room kill processes, and come before its quick ones."""
    items.sort(key=lambda item: (item.path.parent.name == "cache", item.path.parts[:-1]), reverse=True)
