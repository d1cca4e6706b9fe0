"""The conftest.py beside the tests of run.py: prints in one line which tests were run and left
out."""

import os
from collections import Counter
from importlib.metadata import version

OWN = "Skipped: left out: "  # the reasons of models.py


LINES = []


def pytest_unconfigure():
    """After pytest's own last line."""
    print(*LINES, sep="\n")


def pytest_terminal_summary(terminalreporter):
    """Counts."""
    counts = {name: len(reports) for name, reports in terminalreporter.stats.items()}
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    skips = Counter(reason.removeprefix(OWN) for reason in reasons if reason.startswith(OWN))
    left_out = [f"{reason} ({count})" for reason, count in sorted(skips.items())]
    ran, lacking = (os.environ[name] for name in ("RAN", "LACKING"))
    if lacking:
        left_out.append(
            f"all tests of {lacking}, which are not in the source distribution of transformers "
            "(--source takes its repository)"
        )
    LINES.append(
        f"transformers {version('transformers')}, position embedding "
        f"{os.environ['POSITION_EMBEDDING']}: ran the common tests of {ran}: "
        f"{counts.get('passed', 0)} passed, {counts.get('failed', 0) + counts.get('error', 0)} "
        f"failed, {len(reasons) - skips.total()} skipped by themselves (other hardware, packages "
        f"or kinds of model). Left out: {'; '.join(left_out) or 'nothing'}."
    )
