# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Problems as a text for a person."""

from __future__ import annotations

import pytest
from ansible_collections.dgxspark.vllm.plugins.module_utils.problems import describe, problem


def test_errors_come_first_and_each_has_its_remedy() -> None:
    text = describe([problem("slow", "w", "wait", "warning"), problem("full", "e", "free space")], "It does not work.")
    assert text.splitlines() == ["It does not work.", "ERROR full: e", "  remedy: free space", "WARNING slow: w", "  remedy: wait"]


@pytest.mark.parametrize(
    ("count", "shown", "rest"), [(1, 1, ""), (4, 4, ""), (5, 4, "  and 1 more of this kind"), (900, 4, "  and 896 more of this kind")]
)
def test_one_fault_of_many_files_is_told_once(count: int, shown: int, rest: str) -> None:
    lines = describe([problem("gated", f"file {n}", "ask for access") for n in range(count)]).splitlines()
    assert lines[:shown] == [f"ERROR gated: file {n}" for n in range(shown)]
    assert lines[shown:] == [*([rest] if rest else []), "  remedy: ask for access"]


def test_what_needs_another_remedy_stands_alone() -> None:
    found = [problem("bad", "a", "one"), problem("bad", "b", "two"), problem("bad", "c", "one"), problem("bad", "d", "one", "warning")]
    assert describe(found).splitlines() == [
        *("ERROR bad: a", "ERROR bad: c", "  remedy: one"),
        *("ERROR bad: b", "  remedy: two"),
        *("WARNING bad: d", "  remedy: one"),
    ]
