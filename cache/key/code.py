"""What of the code is in a key: the syntax trees of the modules that convert, by dotted name, in rooms and outside."""

import ast
import functools
import time
from pathlib import Path
from typing import Any

import xxhash

PACKAGE = Path(__file__).resolve().parent.parent

# Every module of `cache` is in exactly one of these sets, by its own name or by its room's; a test says so. One that is
# in none counts as tokenising until somebody has put it in its place.

# Only reads a finished cache, or only decides where and when one is built.
NOT_CONVERTING = frozenset({
    "__init__", "__main__", "batches", "config", "disk.__init__", "disk.commit", "disk.removal", "disk.store",
    "elsewhere", "errors", "json_file", "key", "locks", "plain_errors", "progress_bar", "show",
})  # fmt: skip

# Converts, but works on tokens alone: an edit here leaves slices of conversations as they are.
AFTER_TOKENS = frozenset({"build", "disk.arrays", "disk.manifest", "disk.metadata", "disk.shard", "rows"})

# Makes tokens of conversations, or reads what is made into tokens.
TOKENISING = frozenset({"canonical", "chat", "ragged", "slices", "source"})


def tokenising_code() -> str:
    """Hash of the modules that make tokens of conversations."""
    return hash_code(PACKAGE, AFTER_TOKENS)


@functools.cache  # the code that runs is the code that was there when this process began
def hash_code(package: Path, without: frozenset[str] = frozenset()) -> str:
    """Hash of the syntax trees of the modules that convert: comments, docstrings and line breaks are not in it."""
    digest = xxhash.xxh3_128()
    for name, path in modules_of(package).items():
        if not is_among(name, NOT_CONVERTING | without):
            tree = _parse(path.read_text(encoding="utf-8"))
            digest.update(f"{name}:{_spell(tree)};".encode())
    return digest.hexdigest()


def modules_of(package: Path) -> dict[str, Path]:
    """Every module below a package by its dotted name there, sorted by name; `__init__` modules too."""
    names = {".".join(path.relative_to(package).with_suffix("").parts): path for path in package.rglob("*.py")}
    return dict(sorted(names.items()))


def is_among(name: str, named: frozenset[str]) -> bool:
    """Whether a module is named, or lies in a subpackage that is."""
    parts = name.split(".")
    return any(".".join(parts[:end]) in named for end in range(1, len(parts) + 1))


def _parse(source: str) -> ast.Module:
    """`ast.parse`, again when Python 3.11 mixed up the trees of two threads: it counts their depth together."""
    for _ in range(100):
        try:
            return ast.parse(source)
        except SystemError:
            time.sleep(0.01)
    return ast.parse(source)


def _spell(node: Any) -> str:
    """One spelling of a syntax tree in every version of Python, unlike `ast.dump`: empty fields are left out."""
    if isinstance(node, list):
        return "[" + ",".join(_spell(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
        fields["body"] = fields["body"][1:]
    filled = (f"{name}={_spell(value)}" for name, value in fields.items() if value is not None and value != [])
    return f"{type(node).__name__}({','.join(filled)})"
