"""What code decides the keys of slices: all that makes tokens of conversations, and nothing that comes after."""

import ast
import shutil
from pathlib import Path

import pytest

import cache
from cache.key import AFTER_TOKENS, NOT_CONVERTING, hash_code, tokenising_code

PACKAGE = Path(cache.__file__).parent
HARMLESS = {"config", "errors", "readahead"}  # options are in the key by value; neither of the others makes a token


@pytest.mark.parametrize(
    ("module", "decides"),
    [
        *((name, True) for name in ("chat", "answers", "tokenise", "pieces", "cuts", "slices", "jsonl", "ragged")),
        *((name, False) for name in ("rules", "convert", "audit", "shard", "writer", "manifest")),
    ],
)
def test_an_edit_makes_other_slices_only_where_tokens_are_made(module: str, decides: bool, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(PACKAGE, tmp_path / "copy"))
    without = frozenset(AFTER_TOKENS)
    assert hash_code(copy, without) == tokenising_code()
    edited = Path(shutil.copytree(PACKAGE, tmp_path / "edited"))
    with (edited / f"{module}.py").open("a") as file:
        file.write("\nEDITED = 1\n")
    assert (hash_code(edited, without) != tokenising_code()) == decides


def test_what_makes_tokens_imports_nothing_that_comes_after() -> None:
    met, left = set(), ["chat", "tokenise", "pieces", "cuts"]
    while left:
        name = left.pop()
        met.add(name)
        left += _imports(name) - met
    assert met & AFTER_TOKENS == set()
    assert met & NOT_CONVERTING <= HARMLESS
    assert len(met) > 20
    assert _imports("slices") & AFTER_TOKENS == set()


def test_what_comes_after_is_there() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} - NOT_CONVERTING >= AFTER_TOKENS


def _imports(name: str) -> set[str]:
    """The modules of the package that this one imports, anywhere in it."""
    tree = ast.parse((PACKAGE / f"{name}.py").read_text())
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {module.removeprefix("cache.") for module in found if module.startswith("cache.")}
