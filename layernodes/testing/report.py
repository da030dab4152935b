"""What a check of a node found, in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import final

from layernodes.errors import LayerNodesError


class Check(StrEnum):
    """What is looked at, in the order in which it is."""

    PLAN = "plan"
    FORMULA = "formula"
    INTERLEAVING = "interleaving"
    HAPPENS_BEFORE = "happens-before"
    LIFE_CYCLE = "life cycle"
    MEMORY = "memory"
    FAULTS = "faults"


@final
@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a node.

    Attributes:
        check: which check found it.
        found: what was found, and where.
        advice: what to change.
    """

    check: Check
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.check.value}: {self.found}\n    {self.advice}"


@final
@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What ``check_node`` did and found.

    Attributes:
        node: name of the node's class.
        done: the checks that ran; after a plan or a formula that is wrong, the rest makes no sense and is left out.
        schedules: how many schedules were run.
        faults: how many exceptions were planted.
        findings: everything that is wrong; empty where all is well.
        notes: what is legal and probably not meant, such as a product of matrices on the communication stream.
    """

    node: str
    done: tuple[Check, ...]
    schedules: int
    faults: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        looked = f"{', '.join(check.value for check in self.done)}; {self.schedules} schedules, {self.faults} faults"
        notes = "".join(f"\n  note: {note}" for note in self.notes)
        if not self.findings:
            return f"{self.node}: nothing wrong ({looked}){notes}"
        left_out = [check.value for check in Check if check not in self.done]
        tail = f"\nnot looked at before these are mended: {', '.join(left_out)}" if left_out else ""
        listed = "\n".join(f"  {finding}" for finding in self.findings)
        return f"{self.node}: {len(self.findings)} found ({looked})\n{listed}{notes}{tail}"


class NodeCheckError(LayerNodesError, AssertionError):
    """A node failed its check; the text is the report.

    Attributes:
        report: what was done and found.
    """

    def __init__(self, report: NodeReport) -> None:
        super().__init__(str(report))
        self.report = report
