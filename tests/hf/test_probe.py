"""``python -m tests.families``: a sample of the table that the date draws, and the parts of the
command."""

import datetime
import json
import os
import re
import sys
import time

import pytest
import torch
import transformers

from cape_plugins.checkpoints.generated import GENERATED
from cape_plugins.doctor.check import Check
from hf_models.checks.proof import Proof, prove
from hf_models.checks.stock_models import stock_types
from hf_models.generated.kinds import SEAMS
from tests.families import __main__ as command
from tests.families import reasons, report, results
from tests.families.children import Died, in_children

DRAWN = 12
ROW = GENERATED["mistral"]


@pytest.mark.slow
def test_families_that_the_date_draws_and_all_odd_ones_are_proved():
    """Another sample each day: over time all rows of the table are run."""
    names = results.sample(DRAWN, datetime.date.today().isoformat(), stock_types())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # pools of threads do not survive a fork
    try:
        proofs = {name: proof for name, proof, _ in in_children(prove, names, 2, 60.0)}
    finally:
        torch.set_num_threads(threads)
    assert proofs.keys() == {*names}
    wrong = {
        name: str(proof) if isinstance(proof, Died) else proof.failure or proof.checks
        for name, proof in proofs.items()
        if isinstance(proof, Died) or not proof.is_proved
    }
    assert not wrong


def test_a_sample_depends_on_the_date_alone_and_has_all_odd_rows_and_each_seam():
    installed = stock_types()
    names = results.sample(3, "2026-01-01", installed)
    assert names == results.sample(3, "2026-01-01", installed)
    samples = {tuple(results.sample(3, f"2026-01-{day:02d}", installed)) for day in range(1, 9)}
    assert len(samples) > 1
    for each_sample in samples:
        assert {seam for name in each_sample for seam in GENERATED[name].seams} == {*SEAMS}
        assert {*results.ALWAYS} <= {*each_sample}
    odd = {name for name, row in GENERATED.items() if row.oddities}
    assert odd
    assert odd <= {*names} <= {*GENERATED}
    assert results.sample(1000, "", ["mistral"]) == ["mistral"]


def _child(name):
    if name == "crash":
        os.kill(os.getpid(), 9)
    if name == "endless":
        time.sleep(60)
    if name == "error":
        raise KeyError("x")
    if name == "large":
        torch.zeros(1 << 40)
    print("not seen")
    return name.upper()


def test_a_crash_an_error_and_an_endless_loop_do_not_stop_the_others(capfd):
    names = ["a", "crash", "endless", "error", "large", "b"]
    ended = {name: result for name, result, _ in in_children(_child, names, 2, 1.0)}
    assert ended.keys() == {*names}
    assert (ended["a"], ended["b"]) == ("A", "B")
    assert "status -9" in str(ended["crash"])
    assert str(ended["endless"]) == "no result after 1 s"
    assert "KeyError: 'x' (test_probe.py:" in str(ended["error"])
    assert "RuntimeError" in str(ended["large"])
    assert "not seen" not in "".join(capfd.readouterr())


@pytest.fixture
def run(monkeypatch):
    """Runs the command with these arguments."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["families", *arguments])
        return command.main()

    return run


def proof_of(model_type, *checks, row=ROW, stock="XModel"):
    return Proof(model_type, row, stock, [Check(*check) for check in checks])


REFUSAL = (
    "position embedding 'relpos' acts in attention, and XAttention computes scores; allowed: types "
    "that add to the content. Choose one, such as 'cape'."
)
ERROR = "XModel, shrunk: ImportError: XModel requires the timm library but it was not found"
SWITCH, ROPE = ("switch", "ok", ""), ("rope: positions reach the output", "ok", "")
GENERATION = ("generation", "skip", "the stock model fails it, too: x")
PADDING = ("padding on the left", "skip", "the forward of the model takes no tokens with a mask")
PROOFS = {
    "right": proof_of("right", SWITCH, GENERATION, ROPE, PADDING),
    "refused": proof_of("refused", SWITCH, ("in attention", "skip", REFUSAL)),
    "mistral": proof_of("mistral", SWITCH),
    "wrong": proof_of("wrong", SWITCH, ("outputs", "FAIL", "logits by | 1")),
    "seamless": proof_of("seamless", ("seam", "skip", "by a convolution"), row=None),
    "broken": proof_of("broken", ("stock model", "skip", f"{ERROR}; {ERROR}"), row=None, stock=""),
    "still": proof_of("still", ("seam", "skip", "by a convolution"), row=None),
    "half": proof_of("half", ("model type", "skip", "part of x"), row=None, stock=""),
    "new": proof_of("new", SWITCH)._replace(is_new=True),
    "zaya": proof_of("zaya", SWITCH, ("positions", "FAIL", "Error: x")),
    "dead": Died("no result after 1 s"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Results of the proofs above on one release, and of some of them on a newer one."""
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(report, "FOLDER", tmp_path)
    for name, proof in PROOFS.items():
        row = results.row_of(proof, name, "5.9.0", 1.0)
        results.append(results.path_of("5.9.0"), row)
    newer = {"right": PROOFS["right"], "mistral": PROOFS["broken"]}
    newer["refused"] = proof_of("refused", ROPE)
    for name, proof in newer.items():
        results.append(results.path_of("5.10.0"), results.row_of(proof, name, "5.10.0", 1.0))
    return tmp_path


def test_the_page_has_a_row_for_each_type_with_what_was_shown_or_why_not(folder):
    not_proved = folder / "not_proved.json"
    report.write("Made on a machine.", folder / "families.md", not_proved)
    lines = (folder / "families.md").read_text().splitlines()
    assert "Made on a machine." in lines
    assert "| model types | 5.9.0 | 5.10.0 |" in lines  # 5.10 is the newer release
    assert "| proved, seam angles | 3 | 2 |" in lines
    assert "| fails, seam angles | 2 | 0 |" in lines
    assert "| **all proved** | **3** | **2** |" in lines
    # the newer release shows more
    in_attention = "5.9.0: none: XAttention computes scores; 5.10.0: rope"
    assert f"| `refused` | XModel | angles | {in_attention} | 5.9.0, 5.10.0 |  |" in lines
    assert "| `mistral` | XModel | angles |  | 5.9.0 |  |" in lines
    right = "rope | 5.9.0, 5.10.0 | generation: the stock model fails |"
    assert f"| `right` | XModel | angles | {right}" in lines
    zaya = reasons.reason_of({"type": "zaya", "result": results.FAILS, "reason": ""})
    timm = "The stock model needs the package timm, which is missing."
    lost = lines.index("## Families that the newest release does not show")
    assert lines[lost + 4] == f"| `mistral` | 5.10.0 | {timm} |"
    assert not lines[lost + 5]
    assert json.loads(not_proved.read_text()) == {"5.9.0": [], "5.10.0": ["mistral"]}
    assert lines[-7:] == [
        "| no row in the table | Everything was shown. | `new` |",
        "| fails | The checks did not end within 1 s. | `dead` |",
        "| fails | Outputs: logits by / 1. | `wrong` |",
        f"| fails | {zaya} | `zaya` |",
        "| no known seam | By a convolution. | `seamless` `still` |",
        "| part or other name | Part of x. | `half` |",
        f"| stock model not run | {timm} | `broken` |",
    ]


def test_the_page_gives_its_reasons_in_whole_sentences():
    lines = report.DOCUMENT.read_text().partition("## Model types without")[2].splitlines()[4:]
    assert len(lines) > 10
    for result, reason, _ in (line.strip("| ").split(" | ") for line in lines):
        assert reason[0].isupper() or reason[0] == "`", (result, reason)
        assert reason.endswith("."), (result, reason)
        assert not reason.endswith("..."), (result, reason)
        assert "Error:" not in reason, (result, reason)


ERRORS = {
    "IndexError: index 10784 is out of bounds for dimension 0 with size 128": "Small sizes of the "
    "probe do not fit together",
    "AttributeError: 'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'": "reads "
    "`image_outputs` of an output that has none",
    "AttributeError: 'NoneType' object has no attribute 'get'": "that the probe leaves empty",
}


@pytest.mark.parametrize("error", ERRORS)
def test_errors_of_stock_code_are_told_in_sentences(error):
    reason = f"XModel, shrunk: {error}; XModel, filled: {error}"
    row = {"type": "x", "result": results.NOT_RUN, "reason": reason}
    assert ERRORS[error] in reasons.reason_of(row)


def test_a_run_that_was_stopped_goes_on_where_it_was(folder, run, monkeypatch, capsys):
    path = results.path_of(transformers.__version__)
    results.append(path, results.row_of(PROOFS["right"], "a", "", 598.0))
    with path.open("a") as file:
        file.write('\n{"type": "b", "resu')  # the run ended here
    asked = []

    def children(function, names, jobs, seconds):
        asked.extend(names)
        return iter([(name, PROOFS["right"], 1.0) for name in names])

    monkeypatch.setattr(command, "in_children", children)
    monkeypatch.setattr(command, "stock_types", lambda: ["a", "b", "c"])
    monkeypatch.setattr(command.report, "write", lambda machine: print(machine))
    assert run("--jobs", "1") == 0
    assert asked == ["b", "c"]
    assert ", 10 minutes; Python" in capsys.readouterr().out  # of both runs
    assert results.read(path).keys() == {"a", "b", "c"}
    assert all(json.dumps(row) for row in results.read(path).values())


def test_a_named_type_that_fails_gives_status_1_and_no_page(folder, run, monkeypatch):
    def children(function, names, jobs, seconds):
        return iter([(name, PROOFS["wrong"], 1.0) for name in names])

    monkeypatch.setattr(command, "in_children", children)
    monkeypatch.setattr(command.report, "write", None)  # a page of a part cannot be written
    assert run("mistral") == 1
    with pytest.raises(SystemExit, match="'mistrl' is no model type"):
        run("mistrl")


WRONG = [
    ("--jobs 0", "argument --jobs: 0 is not allowed; allowed: 1 and more"),
    ("--sample x", "argument --sample: x is not allowed"),
    ("mistral --sample 2", "leave the names out"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_wrong_arguments_are_told(arguments, message, run, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(*arguments.split())
    assert message in capsys.readouterr().err


def test_the_page_has_a_line_for_each_row_of_the_table():
    """A row that nobody has proved, or that was removed, shows here until the page is made anew."""
    page = (results.ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    section = page.partition("\n## Families\n")[2].partition("\n## ")[0]
    seams = dict(re.findall(r"^\| `(\S+)` \| [^|]+ \| ([^|]+?) \|", section, re.MULTILINE))
    assert {name for name, seam in seams.items() if seam != results.FILE} == {*GENERATED}
