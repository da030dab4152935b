"""Print the matrix: ``python -m tests.support.matrix [--own] [--ep 1|2] [-k PATTERN] [--hooks] [--json FILE]``."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.support.compare import Verdict
from tests.support.configs import CELLS, Cell
from tests.support.world import LAYERNODES, MEGATRON, run_cells


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected cells, print verdicts and totals; exit code 1 if any is wrong, rounding or crashed."""
    options = _parse(arguments)
    cells = [cell for cell in CELLS if _selected(cell, options)]
    _say(f"{len(cells)} of {len(CELLS)} cells")
    verdicts = run_cells(
        cells, MEGATRON if options.own else LAYERNODES, hooks=options.hooks, cell_timeout=options.timeout, report=_show
    )
    totals = Counter(verdict.status for verdict in verdicts.values())
    _say(", ".join(f"{count} {status}" for status, count in totals.most_common()))
    if options.json:
        options.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts.values()], indent=1))
    return int(any(totals[status] for status in ("wrong", "rounding", "crash")))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.matrix", description=__doc__)
    parser.add_argument("--own", action="store_true", help="run Megatron-Core's own plan instead of layernodes'")
    parser.add_argument("--ep", type=int, choices=(1, 2), help="only cells of this expert-parallel size")
    parser.add_argument("-k", dest="pattern", default="", help="only cells whose name matches this regular expression")
    parser.add_argument("--hooks", action="store_true", help="also compare the calls of forward hooks")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one cell may take")
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    return parser.parse_args(arguments)


def _selected(cell: Cell, options: argparse.Namespace) -> bool:
    return bool(re.search(options.pattern, cell.name)) and options.ep in (None, cell.ep)


def _show(verdict: Verdict) -> None:
    names = ", ".join(verdict.differing[:3]) + (" ..." if len(verdict.differing) > 3 else "")
    _say(f"{verdict.status:10} {verdict.name:40} {verdict.detail} {names}".rstrip())


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
