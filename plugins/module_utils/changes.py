# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""One record of what a module changes, from which both `changed` and `diff` come, so that they cannot disagree."""

from __future__ import annotations

from typing import Any


class Changes:
    """Collects differences between what is and what shall be."""

    def __init__(self) -> None:
        self._entries: list[dict[str, str]] = []

    def add(self, header: str, before: str, after: str) -> bool:
        """Note one subject's state before and after, as text. Equal texts are no change. Returns whether it changes."""
        if before == after:
            return False
        self._entries.append({"before_header": header, "after_header": header, "before": before, "after": after})
        return True

    @property
    def changed(self) -> bool:
        """Whether anything differs."""
        return bool(self._entries)

    def result(self) -> dict[str, Any]:
        """`changed` and `diff` for exit_json."""
        return {"changed": self.changed, "diff": self._entries}
