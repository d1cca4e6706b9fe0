"""``make test-versions``: which releases it takes, what it writes, and when it fails."""

import json

import pytest

from tests import versions
from tests.versions import main, record, unmet

ROW = {"torch": "2.13.0", "python": "3.11.7", "date": "2026-11-25", "skipped": 0, "failed": 0}


def row(release, passed=2000, failed=0):
    return {"transformers": release, **ROW, "passed": passed, "failed": failed}


def test_a_release_that_passes_has_the_row_of_its_minor_release():
    rows = record(row("5.24.1"), [row("5.9.0"), row("5.24.0")])
    assert [row["transformers"] for row in rows] == ["5.9.0", "5.24.1"]
    releases = [row["transformers"] for row in record(row("5.10.0"), rows)]
    assert releases == ["5.9.0", "5.10.0", "5.24.1"]


@pytest.mark.parametrize("result", [row("5.24.0", failed=1), row("5.24.0", passed=0)])
def test_a_release_that_fails_or_runs_no_test_loses_its_row(result):
    assert record(result, [row("5.23.0"), row("5.24.0")]) == [row("5.23.0")]
    assert record(result, [row("5.24.0")]) == [row("5.24.0")]  # the last row stays


def test_requirements_that_the_environment_does_not_meet_are_found(tmp_path):
    metadata = tmp_path / "transformers-9.0.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(
        "Metadata-Version: 2.1\nName: transformers\nVersion: 9.0.0\n"
        "Requires-Dist: numpy>=1\nRequires-Dist: tokenizers>=99\nRequires-Dist: no-such-package\n"
        'Requires-Dist: torch>=99; extra == "torch"\n'
    )
    assert list(unmet(tmp_path)) == ["tokenizers>=99", "no-such-package"]


@pytest.mark.parametrize("choice", [[], ["--choose", "-k packed"]])
def test_the_ends_of_the_releases_are_run_and_recorded(choice, monkeypatch, tmp_path, capsys):
    """Without a choice of tests: some of them prove nothing."""
    results = {"5.20.2": row("5.20.2"), "5.25.0": row("5.25.0", failed=1)}
    tested = tmp_path / "tested.json"
    tested.write_text(json.dumps([row("5.20.2"), row("5.25.0")]))
    monkeypatch.setattr(versions, "TESTED", tested)
    monkeypatch.setattr(versions, "tested_releases", lambda: json.loads(tested.read_text()))
    monkeypatch.setattr(versions, "newest_release", lambda: "5.25.0")
    monkeypatch.setattr(versions, "run", lambda release, options: results[release])
    monkeypatch.setattr("sys.argv", ["versions", *choice])
    assert main() == 1
    left = [row["transformers"] for row in json.loads(tested.read_text())]
    assert left == ["5.20.2", "5.25.0"][: 2 if choice else 1]
    assert "transformers 5.25.0: 2000 passed, 1 failed" in capsys.readouterr().out
