"""What the matrix found, kept in ``tests/configurations.json``, and the page of the site made of it.

python -W ignore -m tests.support.matrix --hooks --json OURS        (some minutes each)
python -W ignore -m tests.support.matrix --own --json MEGATRON
python -W ignore -m tests.support.configurations OURS MEGATRON      keeps them and writes the page
python -W ignore -m tests.support.configurations                    writes the page anew from what is kept
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, TypeAdapter

from tests.support.compare import Status, Verdict
from tests.support.configs import CELLS, Cell
from tests.support.configurations_page import Row, page, rows_of

Way = Literal["layernodes", "megatron"]
"""On layernodes' nodes, or Megatron-Core's own plan as it is."""

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "configurations.json"
PAGE = ROOT / "docs" / "configurations.md"


class Found(BaseModel):
    """What came of one cell.

    Attributes:
        digest: of the cell's content; a cell that has changed since is not the one that ran.
        layernodes, megatron: compared with the plain model.
        cause: what Megatron-Core's own plan raised, where it did.
    """

    digest: str
    layernodes: Status
    megatron: Status
    cause: str = ""


class Results(BaseModel):
    """What the matrix found: by cell, with the versions that it ran on."""

    versions: Mapping[str, str]
    cells: Mapping[str, Found]

    @classmethod
    def load(cls) -> Results:
        """Those that are kept."""
        return cls.model_validate_json(FILE.read_text())

    def save(self) -> None:
        """One cell a line."""
        cells = [f"  {json.dumps(name)}: {found.model_dump_json()}" for name, found in self.cells.items()]
        FILE.write_text(f'{{"versions": {json.dumps(self.versions)},\n "cells": {{\n' + ",\n".join(cells) + "\n}}\n")

    def rows(self) -> list[Row]:
        """The page's rows."""
        return rows_of((cell, found.layernodes, found.megatron, found.cause) for cell, found in self._found())

    def contradicted(self, ran: Iterable[tuple[Cell, Verdict]], way: Way) -> dict[str, str]:
        """Cells that were kept with another status than they have now; cells that have changed are left out."""
        wrong = {}
        for cell, verdict in ran:
            found = self.cells.get(cell.name)
            if found is not None and found.digest == digest(cell) and getattr(found, way) != verdict.status:
                wrong[cell.name] = f"{way}: kept as {getattr(found, way)}, now {verdict.status}: {verdict.detail}"
        return wrong

    def _found(self) -> list[tuple[Cell, Found]]:
        return [(cell, self.cells[cell.name]) for cell in CELLS]


def digest(cell: Cell) -> str:
    """A short digest of all that a cell says."""
    return hashlib.sha256(json.dumps(asdict(cell), sort_keys=True, default=str).encode()).hexdigest()[:10]


def text(results: Results) -> str:
    """The page."""
    return page(results.rows(), results.versions)


def _collect(ours: Path, megatron: Path) -> Results:
    """Puts the two runs of the matrix beside each other."""
    adapter = TypeAdapter(list[Verdict])
    a, b = ({v.name: v for v in adapter.validate_json(path.read_text())} for path in (ours, megatron))
    return Results(
        versions={name: version(name) for name in ("megatron-core", "torch")},
        cells={
            cell.name: Found(
                digest=digest(cell),
                layernodes=a[cell.name].status,
                megatron=b[cell.name].status,
                cause=_cause(b[cell.name]),
            )
            for cell in CELLS
        },
    )


def _cause(verdict: Verdict) -> str:
    """The error without the order that it came in, and without what differs from run to run."""
    return verdict.detail.partition(": ")[2] if verdict.status == "crash" else ""


def main(arguments: Sequence[str]) -> None:
    """Keep what was found, where given, and write the page."""
    if arguments:
        ours, megatron = map(Path, arguments)
        _collect(ours, megatron).save()
    PAGE.write_text(text(Results.load()))


if __name__ == "__main__":
    main(sys.argv[1:])
