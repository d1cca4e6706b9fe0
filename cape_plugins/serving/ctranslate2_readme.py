"""README of a folder for ctranslate2, and notes on precision, for both hosts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from cape_plugins.serving.ctranslate2_check import BEAM, EXACT
from cape_plugins.serving.templates import fill
from cape_plugins.settings.arguments import FAIRSEQ, HUGGING_FACE

TEMPLATE = Path(__file__).with_name("ctranslate2.md")
TRANSLATION, LANGUAGE_MODEL, RECOGNITION = "translation", "language_model", "recognition"
LONGEST = 1024  # limit of tokens in the program of the README, if no table limits them


def readme(
    host: str,
    task: str,
    rows: Mapping[str, int | None],
    quantization: str | None = None,
    **values: object,
) -> str:
    """The README of a folder.

    Args:
        host: Host of the model.
        task: What the model does.
        rows: Rows of the table of each side, "source" and "target"; None without a table, if
            positions act in attention only.
        quantization: Precision of the weights.
        values: Other values of the template, for the sections of this host and task.
    """
    return fill(
        TEMPLATE,
        **{name: name == host for name in (FAIRSEQ, HUGGING_FACE)},
        **{name: name == task for name in (TRANSLATION, LANGUAGE_MODEL, RECOGNITION)},
        weights=quantization or "float32",
        rounded=quantization not in EXACT,
        int16=quantization == "int16",
        source_rows=rows.get("source"),
        target_rows=rows["target"],
        table=any(rows.values()),
        longest=longest_target(rows),
        beam=BEAM,
        **values,
    )


def longest_target(rows: Mapping[str, int | None]) -> int:
    """Largest number of tokens of a target in the program of the README, EOS included."""
    return rows["target"] or LONGEST


def keywords(options: Mapping[str, Any]) -> str:
    """Options as arguments of a call, one a line."""
    return ",\n    ".join(f"{name}={value!r}" for name, value in options.items())


def precision_notes(quantization: str | None, supported: Collection[str]) -> list[str]:
    """Notes on a precision in which the processor of this machine does not compute.

    Args:
        quantization: Precision of the weights of a folder.
        supported: Result of ``ctranslate2.get_supported_compute_types("cpu")``.
    """
    if quantization in EXACT or quantization in supported:
        return []
    if quantization == "int16":
        return [
            "note: int16 is computed in int8 on this machine; the README says on which machines, "
            "and how to turn int16 on."
        ]
    return [
        f"note: {quantization} is converted on this machine when the folder is loaded, to the "
        "nearest precision that the processor computes in."
    ]
