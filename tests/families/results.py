"""Results of the probe: a line of JSON for each model type and release, kept in build/families, so
that a run that was stopped goes on; and which model types a sample has."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cape_plugins.checkpoints.generated import GENERATED
from cape_plugins.doctor.check import OK, SKIPPED
from hf_models.checks.in_attention import REACHED
from hf_models.checks.proof import SEAM, STOCK_MODEL, Proof
from tests.families.children import Died

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "families"
# What a row of the table says.
PROVED, NO_ROW, FAILS, NO_SEAM = "proved", "no row in the table", "fails", "no known seam"
PART, NOT_RUN = "part or other name", "stock model not run"
FILE = "file"  # seam of a family with a file
# In each sample, although the row is like others: several thetas, positions of three coordinates,
# and models that many users have.
ALWAYS = ("gemma3_text", "qwen2_vl", "gpt2", "llava", "opt", "roberta")

Row = dict[str, Any]


def row_of(proof: Proof | Died, model_type: str, release: str, seconds: float) -> Row:
    """The result for a model type as numbers and texts."""
    row = {"type": model_type, "release": release, "seconds": round(seconds, 1)}
    if isinstance(proof, Died):
        return {**row, "result": FAILS, "seam": "", "class": "", "reason": str(proof)}
    row |= {"class": proof.stock, "seam": ", ".join(proof.row.seams) if proof.row else ""}
    last = proof.checks[-1]
    if len(proof.checks) == 1 and last.status == SKIPPED:
        result = {STOCK_MODEL: NOT_RUN, SEAM: NO_SEAM}.get(last.name, PART)
        return {**row, "result": result, "reason": last.text}
    row["seam"] = row["seam"] or FILE
    row["shown"] = [check.name for check in proof.checks if check.status == OK]
    row["in_attention"] = [
        name.removesuffix(REACHED) for name in row["shown"] if name.endswith(REACHED)
    ]
    row["skipped"] = {c.name: c.text for c in proof.checks if c.status == SKIPPED}
    if proof.row is not None:
        row["row"] = dataclasses.asdict(proof.row)
    if (failure := proof.failure) is not None:
        return {**row, "result": FAILS, "reason": f"{failure.name}: {failure.text}"}
    if proof.is_new:
        return {**row, "result": NO_ROW, "reason": "everything was shown"}
    return {**row, "result": PROVED, "reason": ""}


def path_of(release: str) -> Path:
    """The file of a release."""
    return FOLDER / f"{release}.jsonl"


def read(path: Path) -> dict[str, Row]:
    """Results by model type; the last line counts. A line that was cut is left out."""
    rows = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            rows[row["type"]] = row
    return rows


def append(path: Path, row: Row) -> None:
    """Adds a line at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(row)}")


def sample(number: int, date: str, installed: Sequence[str]) -> list[str]:
    """Families of the table: some that the date draws, all with a row that is odd, one for each
    seam, and the families of :data:`ALWAYS`.

    Args:
        number: Families to draw.
        date: Any text, the same for the same sample.
        installed: Model types that the installed transformers has.
    """
    families = sorted(GENERATED.keys() & {*installed})
    draw = random.Random(date)
    names = {*draw.sample(families, min(number, len(families)))}
    names |= {name for name in families if GENERATED[name].oddities} | {*ALWAYS}.intersection(
        families
    )
    by_seam: dict[str, list[str]] = {}
    for name in families:
        for seam in GENERATED[name].seams:
            by_seam.setdefault(seam, []).append(name)
    for _, those in sorted(by_seam.items()):
        if names.isdisjoint(those):  # a seam of few families, which the date seldom draws
            names.add(draw.choice(those))
    return sorted(names)
