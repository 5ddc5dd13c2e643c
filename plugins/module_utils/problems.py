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


MOST_ALIKE = 4  # problems of one kind that a text for a person shows


def describe(problems: Sequence[Problem], headline: str = "") -> str:
    """All problems as one text for a person: cause, evidence and remedy of each, the worst first.

    Those with one cause and one remedy, such as a fault of many files, stand together, and the first few of them are enough.
    """
    ordered = sorted(problems, key=lambda p: p["severity"] != "error")
    alike: dict[tuple[str, str, str], list[str]] = {}
    for p in ordered:
        alike.setdefault((p["severity"], p["class"], p["remedy"]), []).append(p["evidence"])
    lines = [headline] if headline else []
    for (severity, class_, remedy), evidence in alike.items():
        lines += [f"{severity.upper()} {class_}: {text}" for text in evidence[:MOST_ALIKE]]
        if len(evidence) > MOST_ALIKE:
            lines.append(f"  and {len(evidence) - MOST_ALIKE} more of this kind")
        lines.append(f"  remedy: {remedy}")
    return "\n".join(lines)
