"""Releases of transformers on which the tests of this package have passed."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

# `make test-versions` writes this file. A self-contained folder lacks it and holds code only.
TESTED = Path(__file__).with_name("tested.json")


def minor_release(release: str) -> tuple[int, ...]:
    """``(5, 24)`` of ``"5.24.1"``: names of arguments change between minor releases."""
    return tuple(int(number) for number in re.findall(r"\d+", release)[:2])


def tested_releases() -> list[dict[str, Any]]:
    """A row for each tested release, oldest first, with the versions of transformers, torch and
    Python, the date, and the numbers of tests that passed, were skipped and failed (none)."""
    return json.loads(TESTED.read_text(encoding="utf-8")) if TESTED.exists() else []


def is_tested(release: str) -> bool:
    """Whether the tests have passed on a release with this minor number."""
    return minor_release(release) in {
        minor_release(row["transformers"]) for row in tested_releases()
    }


def warn_if_untested(release: str) -> None:
    """Warns of a release of transformers on which the tests have not passed."""
    rows = tested_releases()
    if rows and not is_tested(release):
        tested = " to ".join(dict.fromkeys(row["transformers"] for row in (rows[0], rows[-1])))
        warnings.warn(
            f"transformers {release} is not among the releases that hf_models has been tested on, "
            f"{tested}; run `cape-plugins doctor` to see whether models compute the same with it.",
            stacklevel=3,
        )
