"""READMEs of exported folders. Each README is a template in Markdown, beside the module that fills
in the values."""

from __future__ import annotations

import re
from pathlib import Path
from string import Template

_MARK = re.compile(r"<!-- (?:if (not )?(\w+)|end) -->")


def fill(template: Path, **values: object) -> str:
    """The text of a template with values.

    ``$name`` becomes the value. Lines between ``<!-- if name -->`` and ``<!-- end -->`` stay if the
    value is true; lines after ``<!-- if not name -->`` stay if the value is false. Such sections
    may stand in others. Sections that are left out need no values.

    Args:
        template: Path of the file.
        values: Values by name.

    Raises:
        KeyError: for a name without a value.
    """
    lines, is_shown = [], [True]
    for line in template.read_text(encoding="utf-8").splitlines(keepends=True):
        mark = _MARK.fullmatch(line.strip())
        if mark is None:
            if all(is_shown):
                lines.append(line)
        elif mark[2] is None:
            is_shown.pop()
        else:
            is_shown.append(all(is_shown) and bool(values[mark[2]]) != bool(mark[1]))
    return Template("".join(lines)).substitute(values)
