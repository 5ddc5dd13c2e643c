# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Problems: what is wrong, what shows it, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict

Severity = Literal["error", "warning"]

# "class" is a keyword, hence the functional form.
Problem = TypedDict("Problem", {"class": str, "evidence": str, "remedy": str, "severity": Severity})


def problem(class_: str, evidence: str, remedy: str, severity: Severity = "error") -> Problem:
    """One problem. class_: snake_case kind; evidence: the line or number that shows it; remedy: what the user does next."""
    return {"class": class_, "evidence": evidence, "remedy": remedy, "severity": severity}


def errors(problems: Iterable[Problem]) -> list[Problem]:
    """Those that must stop a run."""
    return [p for p in problems if p["severity"] == "error"]


def describe(problems: Sequence[Problem], headline: str = "") -> str:
    """All problems as one text for a person: cause, evidence and remedy of each, the worst first."""
    ordered = sorted(problems, key=lambda p: p["severity"] != "error")
    lines = [headline] if headline else []
    for p in ordered:
        lines.append(f"{p['severity'].upper()} {p['class']}: {p['evidence']}")
        lines.append(f"  remedy: {p['remedy']}")
    return "\n".join(lines)
