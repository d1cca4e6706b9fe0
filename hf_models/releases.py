"""Releases of transformers on which the tests of this package have passed, and on which generated
families have been proved."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

# `make test-versions` writes this file. A self-contained folder lacks it and holds code only.
TESTED = Path(__file__).with_name("tested.json")
# `python -m tests.families` writes this file: the releases on which it has run, each with the rows
# of the table of generated families that were not proved there.
NOT_PROVED = Path(__file__).with_name("not_proved.json")


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


def warn_if_not_proved(model_type: str, release: str) -> None:
    """Warns of a generated family that has not been compared with its stock models on a tested
    release of transformers; :func:`warn_if_untested` has told about other releases.

    Args:
        model_type: Model type of the stock models.
        release: Of transformers.
    """
    if not (NOT_PROVED.exists() and is_tested(release)):
        return
    by_release = json.loads(NOT_PROVED.read_text(encoding="utf-8"))
    by_minor = {minor_release(proved_on): names for proved_on, names in by_release.items()}
    if model_type not in by_minor.get(minor_release(release), (model_type,)):
        return
    warnings.warn(
        f"the family of {model_type!r} has not been shown to equal its stock models on "
        f"transformers {release}; run `cape-plugins doctor {model_type}` to see whether it does, "
        "or take a release that docs/families.md names for this model type.",
        stacklevel=3,
    )
