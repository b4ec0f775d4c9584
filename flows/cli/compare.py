"""`dflash-train compare A B`: settings that differ, results, τ with its error and by domain; also as an HTML page."""

import argparse
from pathlib import Path

from cache.json_file import write_text
from flows.cli.look import add_home, known_run
from flows.show.two_runs import Measured, Row, sections
from flows.show.two_runs_page import page

_WIDEST = 48  # letters of a cell; the page has all


def main(arguments: list[str], program: str) -> int:
    parser = argparse.ArgumentParser(prog=f"{program} compare", description="Two runs side by side.")
    parser.add_argument("one", help="name of a run")
    parser.add_argument("other", help="name of another")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with curves, too")
    add_home(parser)
    options = parser.parse_args(arguments)
    one, other = (Measured.read(known_run(name, options.home)) for name in (options.one, options.other))
    for title, rows in sections(one, other).items():
        _print([(title, one.name, other.name, "difference" if any(row[3] for row in rows) else ""), *rows])
    if options.html is not None:
        write_text(options.html, page(one, other))
        print(f"The page is {options.html.absolute()}.")
    return 0


def _print(rows: list[Row]) -> None:
    short = [tuple(cell if len(cell) <= _WIDEST else f"…{cell[1 - _WIDEST :]}" for cell in row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*short, strict=True)]
    for place, row in enumerate(short):
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        if place == 0:
            print("-" * (sum(widths) + 6))
    print()
