"""What the README shows is what the package does: the table of flags, and the torch example."""

from __future__ import annotations

import re
from pathlib import Path

from cape_plugins.cli import main


def _between(text: str, name: str) -> str:
    found = re.search(rf"<!-- {name}:begin -->\n(.*?)<!-- {name}:end -->", text, re.DOTALL)
    assert found, f"README.md has no block {name!r}"
    return found.group(1)


def test_table_of_flags_is_generated(repo_root: Path, capsys) -> None:
    main(["flags"])
    table = capsys.readouterr().out.strip()
    assert table.count("\n") > 10
    shown = _between((repo_root / "README.md").read_text(encoding="utf-8"), "flags").strip()
    assert shown == table, "paste the output of `cape-plugins flags` between the flags marks"


def test_torch_example_runs(repo_root: Path) -> None:
    block = _between((repo_root / "README.md").read_text(encoding="utf-8"), "example")
    code = block.replace("```python\n", "").replace("```", "")
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["loss"].isfinite()
    assert names["draw"].shift.shape == (8, 1, 1)
    assert names["embed"].weight.grad.abs().sum() > 0


def test_paper_map_names_what_exists(repo_root: Path) -> None:
    """Every test, preset and function that docs/paper_map.md names is there."""
    table = (repo_root / "docs/paper_map.md").read_text(encoding="utf-8")
    files = [p for folder in ("tests", "cape_plugins", "fairseq_user_dir", "hf_models")
             for p in (repo_root / folder).rglob("*.py")]  # fmt: skip
    code = "\n".join(path.read_text(encoding="utf-8") for path in files)
    names = re.findall(r"`([\w.]+)`", table)
    tests = [name for name in names if name.startswith("test_") and not name.endswith(".py")]
    assert len(tests) > 15, "the pattern that finds the names no longer fits the table"
    for name in names:
        last = name.removesuffix(".py").rpartition(".")[2]
        known = f"def {last}(" in code or f"class {last}(" in code or f'"{last}"' in code
        assert known or list(repo_root.rglob(f"{last}.py")) or (repo_root / last).is_dir(), name
