"""What code decides the keys of slices: all that makes tokens of conversations, and nothing that comes after."""

import ast
import shutil
from pathlib import Path

import pytest

from cache.key.code import (
    AFTER_TOKENS,
    NOT_CONVERTING,
    PACKAGE,
    TOKENISING,
    hash_code,
    is_among,
    modules_of,
    tokenising_code,
)

HARMLESS = {"config", "errors", "locks"}  # options are in the key by value; neither of the others makes a token


@pytest.mark.parametrize(
    ("module", "decides"),
    [
        *(
            (name, True)
            for name in (
                "chat.tokenizer",
                "chat.find_answers",
                "slices.collect",
                "slices.pieces",
                "slices.cut",
                "slices.plan",
                "source.jsonl",
                "ragged",
            )
        ),
        *(
            (name, False)
            for name in ("rows.rules", "rows.convert", "rows.audit", "disk.shard", "build", "disk.manifest")
        ),
    ],
)
def test_an_edit_makes_other_slices_only_where_tokens_are_made(module: str, decides: bool, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(PACKAGE, tmp_path / "copy"))
    without = AFTER_TOKENS
    assert hash_code(copy, without) == tokenising_code()
    edited = Path(shutil.copytree(PACKAGE, tmp_path / "edited"))
    with (edited / f"{module.replace('.', '/')}.py").open("a") as file:
        file.write("\nEDITED = 1\n")
    assert (hash_code(edited, without) != tokenising_code()) == decides


def test_what_makes_tokens_imports_nothing_that_comes_after() -> None:
    met, left = set(), {name for name in modules_of(PACKAGE) if is_among(name, TOKENISING)}
    while left:
        met |= left
        left = set().union(*(_imports(name) for name in left if not name.startswith("key."))) - met
    assert not [name for name in met if is_among(name, AFTER_TOKENS)]
    allowed = HARMLESS | {name for name in met if name.startswith("key.")}  # names of slices are hashes
    assert {name for name in met if is_among(name, NOT_CONVERTING)} <= allowed
    assert len(met) > 25


def test_every_module_is_in_exactly_one_set() -> None:
    for name in modules_of(PACKAGE):
        found = [one for one in (TOKENISING, AFTER_TOKENS, NOT_CONVERTING) if is_among(name, one)]
        assert len(found) == 1, name


@pytest.mark.parametrize("named", [TOKENISING, AFTER_TOKENS, NOT_CONVERTING])
def test_a_set_names_what_is_there(named: frozenset[str]) -> None:
    rooms = {name.rpartition(".")[0] for name in modules_of(PACKAGE)}
    assert named <= modules_of(PACKAGE).keys() | rooms


def test_a_module_in_a_new_room_is_in_the_key(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(PACKAGE, tmp_path / "copy"))
    (copy / "attic").mkdir()
    (copy / "attic" / "helper.py").write_text("x = 1\n")
    assert hash_code(copy) != hash_code(PACKAGE)
    assert hash_code(copy, AFTER_TOKENS) != tokenising_code()


def _imports(name: str) -> set[str]:
    """The modules of the package that this one imports, anywhere in it."""
    tree = ast.parse(modules_of(PACKAGE)[name].read_text())
    found = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    found |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {module.removeprefix("cache.") for module in found if module.startswith("cache.")}
