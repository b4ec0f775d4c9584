"""Parameters in a file of one's own: `init` writes one with all fields, `-f` reads it, `schema` is for editors.

dflash-train init mine.yaml --model ./my-model --rows "chat/*.jsonl"
dflash-train full -f mine.yaml
"""

import argparse
import json
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import yaml

from cache.json_file import write_json
from flows.cli.fields import Everything, Field, absolute, all_fields, json_schema
from flows.cli.look import add_home
from flows.cli.presets import Tree, read_yaml
from flows.errors import BadParameter
from flows.runs.parameters import resolve_home

SCHEMA = "dflash-train.schema.json"

_SECTIONS = {
    "rows": "Where the rows come from and what becomes of them.",
    "target": "The frozen model that is to be sped up.",
    "drafter": "The model that is trained.",
    "training": "How it is trained.",
    "evaluation": "How it is evaluated.",
    "export": "How it is exported.",
    "generation": "Only for `regenerate`: how the target answers.",
}
# A demo's size: what two cores train in minutes. On a GPU the defaults are those of the paper.
_ON_CPU: Tree = {
    "target.dtype": "float32",
    "rows.max_tokens": 512,
    "drafter.layers": 2,
    "drafter.block_size": 8,
    "drafter.taps": 3,
    "drafter.init": "target",
    "training.tokens_per_step": 1024,
    "training.anchors": 8,
    "training.lr": 0.0015,
    "training.features": "reuse",
    "training.checkpoint_every_steps": 100,
    "evaluation.prompts": 8,
    "evaluation.max_new_tokens": 64,
}
_ON_GPU: Tree = {"target.dtype": "bfloat16", "training.evaluate_every_steps": 1000}


def init(arguments: list[str], program: str) -> int:
    parser = argparse.ArgumentParser(
        prog=f"{program} init",
        description="Writes a file with every field, its description and what suits this machine.",
    )
    parser.add_argument("file", type=Path, help="file to write, such as mine.yaml")
    parser.add_argument("--model", required=True, help="the target: a directory, a hub name or a GGUF file")
    parser.add_argument("--rows", required=True, nargs="+", help="the rows: files, a directory or a glob in quotes")
    parser.add_argument("--name", help="name of the run; default: the file's name")
    add_home(parser)
    given = parser.parse_args(arguments)
    if given.file.exists():
        raise BadParameter(f"init {given.file}: the file is there already. Give another name, or remove it.")
    if not given.file.absolute().parent.is_dir():
        raise BadParameter(f"init {given.file}: there is no directory {given.file.absolute().parent}.")
    gpus = gpu_count()
    name = given.name or re.sub(r"[^A-Za-z0-9._-]+", "-", given.file.stem).strip("-._") or "mine"
    here: Any = {"rows": {"source": given.rows if len(given.rows) > 1 else given.rows[0]}}
    here |= {"target": {"model": given.model}}
    from_here: Any = absolute(here, Path.cwd())
    is_beside = given.file.absolute().parent == Path.cwd()
    places = here if is_beside else from_here
    values: Tree = {"name": name, "rows.source": places["rows"]["source"], "target.model": places["target"]["model"]}
    values |= _ON_GPU if gpus else _ON_CPU
    found = _mask_token(from_here["target"]["model"])
    if found is not None:
        values["drafter.mask_token_id"] = found[0]
    home = resolve_home(given.home)
    write_json(home / SCHEMA, json_schema())
    machine = f"{gpus} GPUs" if gpus else f"{os.cpu_count()} cores without a GPU: sizes of a demo"
    given.file.write_text(_page(values, given.file.name, machine, home / SCHEMA))
    print(f"{given.file} is written. Next: {program} train -f {given.file} --dry-run")
    why = f" ({found[1]})" if found else ", which the first run proposes"
    print(f"Look first at rows, target and drafter.mask_token_id{why}.")
    return 0


def schema(arguments: list[str], program: str) -> int:
    argparse.ArgumentParser(
        prog=f"{program} schema", description="Prints the JSON schema of the parameters, for editors."
    ).parse_args(arguments)
    print(json.dumps(json_schema(), indent=1, ensure_ascii=False))
    return 0


def read_file(path: Path) -> Tree:
    """The tree in a file; its relative paths are taken from the file's directory."""
    try:
        tree = read_yaml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BadParameter(f"-f {path}: cannot be read ({error}). `init` writes such a file.") from None
    except yaml.YAMLError as error:
        raise BadParameter(f"{path}: {' '.join(str(error).split())}. Correct the YAML at that place.") from None
    if not isinstance(tree, dict):
        raise BadParameter(f"{path}: no fields in it; expected `name: …`, `rows:` and so on, as `init` writes them.")
    sections = {field.path.rpartition(".")[0] for field in all_fields().values()}
    return absolute(_sections_filled(tree, sections, ""), path.absolute().parent)


def _sections_filled(tree: Tree, sections: set[str], before: str) -> Tree:
    """A section with all of its fields left out is empty; YAML reads null."""
    return {
        name: _sections_filled(value or {}, sections, f"{before}{name}.")
        if f"{before}{name}" in sections and (value is None or isinstance(value, dict))
        else value
        for name, value in tree.items()
    }


def part_for(tree: Tree, taken: frozenset[str]) -> Tree:
    """What a flow takes of a file that serves them all; what no flow knows stays, to be refused by its name."""
    return {name: value for name, value in tree.items() if name in taken or name not in Everything.model_fields}


def gpu_count() -> int:
    """NVIDIA's GPUs of this machine, without the seconds that asking torch takes."""
    return len([path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)])


def _mask_token(model: str) -> tuple[int, str] | None:
    """The proposal for a local target; None where it cannot be read yet."""
    path = Path(model).expanduser()
    if not path.exists():
        return None
    try:
        from transformers import AutoConfig, AutoTokenizer

        from dflash.target.mask_token import find_mask_token

        where: Tree = {"pretrained_model_name_or_path": str(path)}
        if path.is_file():
            where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        config = AutoConfig.from_pretrained(**where, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=False)
        return find_mask_token(tokenizer, config, config.vocab_size)
    except Exception:  # a proposal only: the run's own check says what is wrong with a target
        return None


def _page(values: Tree, file: str, machine: str, schema: Path) -> str:
    lines = [
        f"# yaml-language-server: $schema={schema}",
        f"# Parameters of dflash-train, written for {machine}.",
        f"#   dflash-train full -f {file}       rows to exported drafter; also prepare, train, evaluate, export",
        f"#   dflash-train train -f {file} --dry-run      what it takes; trains nothing",
        f"#   dflash-train train -f {file} --show         all parameters as they will be used",
        "# A line behind # shows a default: take the # away to change it. Relative paths start where this file lies.",
    ]
    before: list[str] = []
    order = ["", *_SECTIONS]
    fields = [field for field in all_fields().values() if field.path != "override"]
    for field in sorted(fields, key=lambda one: order.index(one.path.rpartition(".")[0].partition(".")[0])):
        *sections, name = field.path.split(".")
        for depth in range(len(sections)):
            if sections[: depth + 1] != before[: depth + 1]:
                path = ".".join(sections[: depth + 1])
                text, hidden = _SECTIONS.get(path), "" if any(one.startswith(f"{path}.") for one in values) else "#"
                lines += ["", *([f"# {text}"] if text else []), f"{'  ' * depth}{hidden}{sections[depth]}:"]
        before = sections
        lines += _lines(field, name, "  " * len(sections), values)
    return "\n".join(lines) + "\n"


def _lines(field: Field, name: str, indent: str, values: Tree) -> list[str]:
    described = f"{field.description} ({field.type_text})"
    width = 100 - len(indent)
    lines = [f"{indent}# {line}" for line in textwrap.wrap(described, width)]
    is_chosen = field.path in values
    value = values.get(field.path, field.default)
    spelled = json.dumps(value, ensure_ascii=False)
    return [*lines, f"{indent}{'' if is_chosen else '#'}{name}: {spelled}"]
