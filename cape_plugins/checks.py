"""One check of a model on the hosts that are installed, as every host's doctor returns it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

OK, FAILED, SKIPPED, NOTE = "ok", "FAIL", "skip", "note"
# Largest difference relative to the largest number that is compared; float32 loses less in any
# depth, a wrong position costs a hundred times more.
LIMIT = 1e-4


class Check(NamedTuple):
    """The result of one comparison.

    Attributes:
        name: What was compared.
        status: "ok", "FAIL" or "skip"; "note" of what a report of an error should say.
        text: The difference with its limit, or the reason.
    """

    name: str
    status: str
    text: str

    @property
    def failed(self) -> bool:
        """Whether there is a difference."""
        return self.status == FAILED


class Mismatch(Exception):
    """What a comparison has to say where a number cannot: a shape, a name, a missing weight."""


class NotApplicable(Exception):
    """Why a model has nothing to compare."""


def check(name: str, compare: Callable[[], float | str]) -> Check:
    """Runs one comparison.

    Args:
        name: What is compared.
        compare: Returns the largest relative difference, which passes up to :data:`LIMIT`, or what
            was seen to be right, in words.

    Returns:
        a failed check also where `compare` raises: a host whose release calls its parts in another
        way can stop them with any error.
    """
    try:
        result = compare()
    except NotApplicable as reason:
        return Check(name, SKIPPED, str(reason))
    except Mismatch as reason:
        return Check(name, FAILED, str(reason))
    except Exception as error:
        message = " ".join(str(error).split()) or "no message"
        return Check(name, FAILED, f"raises {type(error).__name__}: {message}")
    if isinstance(result, str):
        return Check(name, OK, result)
    status = OK if result <= LIMIT else FAILED  # NaN fails
    return Check(name, status, f"relative difference {result:.2g}, at most {LIMIT:g}")
