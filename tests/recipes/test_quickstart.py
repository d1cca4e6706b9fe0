"""The quickstart at a micro scale, through its real command line."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import psutil
import pytest
from PIL import Image

from recipes.lab import runs
from recipes.lab.steps import CommandError
from recipes.mt.quickstart import Comparison, Data, main, parse_arguments, read_splits
from recipes.mt.scoring import METRICS
from tests.support.command_lines import warm_fairseq
from tests.support.plots import assert_lines
from tests.support.tables import read_csv

MICRO = ("--updates", "12", "--train-size", "400", "--test-size", "24", "--jobs", "2")


@pytest.mark.slow
def test_finished_runs_have_every_row_and_are_reused(run_cli, tmp_path, monkeypatch):
    command = ("python", "-m", "recipes.mt.quickstart", *MICRO, "--compare", "shape-sync", "cape")
    run_cli(*command, cwd=tmp_path, timeout=1200, warm_children=True)
    rows = read_csv(tmp_path / "results/quickstart/scores.csv")
    assert {(row["variant"], row["seed"]) for row in rows} == {("shape-sync", "1"), ("cape", "1")}
    lengths = [str(n) for n in range(1, 13)]
    for start in range(0, len(rows), 13):
        block = rows[start : start + 13]
        assert [row["length"] for row in block] == [*lengths, "all"]
        assert sum(int(row["count"]) for row in block[:-1]) == int(block[-1]["count"]) == 24
    for row in rows:
        assert 0 <= float(row["exact_match"]) <= float(row["token_accuracy"]) <= 1
        assert 0 <= float(row["bleu"]) <= 100
        assert float(row["train_seconds"]) > 0
    assert_lines(tmp_path / "results/quickstart/scores.png")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.executable", None)  # no command of fairseq can be started
    main([*MICRO, "--compare", "cape", "--output", "again"])
    assert read_csv(tmp_path / "again/scores.csv") == [r for r in rows if r["variant"] == "cape"]
    with pytest.raises(CommandError, match="made with other settings.*--work"):
        main([*MICRO, "--updates", "13", "--compare", "cape"])


def test_first_look_is_at_the_updates_that_it_names(tmp_path, monkeypatch):
    """Not at a checkpoint of more updates, which an interrupted training leaves. The flags of both
    parts are the same, so that the training resumes like every training of fairseq
    (tests/fairseq/test_resume.py)."""
    tested, checkpoint = [], tmp_path / "number_lists/runs/cape-seed2/checkpoint_last.pt"

    def train(data, run, flags, settings, *, threads, title, until=None):
        ends = "--max-update 1200 --total-num-update 1200"
        assert f"{ends} --seed {2 * runs.SEED_STEP} --position-embedding cape" in " ".join(flags)
        updates = int(checkpoint.read_text()) if checkpoint.exists() else 0
        run.mkdir(parents=True, exist_ok=True)
        checkpoint.write_text(str(max(updates, until or 1200)))
        if until:
            (run / runs.FIRST_SECONDS).write_text("1.0")
        return 1.0

    def test(self, variant, seed, name, *rest):
        tested.append((name, checkpoint.read_text()))

    monkeypatch.setattr(runs, "train", train)
    monkeypatch.setattr(Comparison, "test", test)
    words = ["--work", str(tmp_path), "--output", str(tmp_path / "out"), "--compare", "cape"]
    data = Data(tmp_path / "number_lists/data", {}, ("en", "de"), "", (), ())
    args = parse_arguments(words)
    comparison, (step,) = Comparison(args, data, {}), args.plan
    comparison.run(step, 2)
    assert tested == [("cape (400 of 1200 updates)", "400"), ("cape", "1200")]
    checkpoint.write_text("1200")
    comparison.run(step, 2)
    assert tested[2:] == [("cape", "1200")]
    (tmp_path / "number_lists/runs/cape-seed2" / runs.FIRST_SECONDS).unlink()
    Comparison(parse_arguments([*words, "--first-look", "0"]), data, {}).run(step, 2)
    assert tested[3:] == [("cape", "1200")]


@pytest.mark.parametrize(("device", "has_flag"), [("cpu", True), ("meta", False)])
def test_device_decides_about_fairseqs_flag_of_a_cpu(tmp_path, monkeypatch, device, has_flag):
    """In training and in decoding; meta stands for a GPU."""
    seen = []
    monkeypatch.setattr(runs, "train", lambda *args, **how: seen.append(args[2]) or 1.0)
    monkeypatch.setattr(runs, "generate", lambda *args, **how: seen.append(args[3]) or [])
    monkeypatch.setattr("recipes.mt.quickstart.read_written", lambda path: [])
    monkeypatch.setattr("recipes.mt.quickstart.SentencePiece", lambda path: Mock())
    monkeypatch.setattr("recipes.mt.quickstart.score_groups", lambda *args, **how: {})
    monkeypatch.setattr(Comparison, "write", lambda self: None)
    data = Data(tmp_path, {}, ("en", "de"), "", (), ())
    args = parse_arguments(["--device", device, "--first-look", "0", "--output", str(tmp_path)])
    Comparison(args, data, {}).run(args.plan[0], 1)
    assert all("--num-workers" in flags for flags in seen)
    assert ["--cpu" in flags for flags in seen] == [has_flag, has_flag]


def test_a_switched_model_begins_with_the_trained_one(tmp_path, monkeypatch):
    """With a schedule of its updates and other seeds; 0 updates move no weight."""
    flags = {}

    def train(data, run, words, settings, *, threads, title, until=None):
        flags[title] = " ".join(words)
        return 1.0

    monkeypatch.setattr(runs, "train", train)
    monkeypatch.setattr(Comparison, "test", lambda *args: None)
    words = ["--work", str(tmp_path), "--output", str(tmp_path / "out"), "--updates", "40"]
    words += ["--switch-rate", "2"]
    args = parse_arguments([*words, "--switch-from", "sinpos", "--switch-updates", "0", "25%"])
    data = Data(tmp_path / "number_lists/data", {}, ("en", "de"), "", (), ())
    comparison = Comparison(args, data, {})
    for step in args.plan:
        comparison.run(step, 1)
    first, more, none, switched, scratch = flags.values()
    assert list(flags)[3] == "cape, 10 updates after sinpos seed 1"
    start = f"--finetune-from-model {tmp_path}/number_lists/runs/sinpos-seed1/checkpoint_last.pt"
    assert all(start in words for words in (more, none, switched))
    assert "--finetune" not in first + scratch
    assert none.endswith("--position-embedding cape --position-max-global-shift 30")
    seed, other_seed = runs.SEED_STEP, 501 * runs.SEED_STEP
    assert f"--max-update 40 --total-num-update 40 --seed {seed} " in first
    assert f"--max-update 50 --total-num-update 50 --seed {seed} " in scratch
    schedule = f"--max-update 10 --total-num-update 10 --seed {other_seed} --warmup-updates 2 "
    assert all(f"{schedule}--lr 0.004 " in words for words in (more, switched))
    assert "--max-update 1 " in none
    assert "--lr 0 --finetune" in none

    scores = dict.fromkeys(METRICS, 0.5)
    for step in args.plan:
        row = {"variant": step.name, "seed": 1, "length": "4", "train_seconds": 3.0, **scores}
        comparison.rows[step.name, 1] = [row]
    comparison.write()
    line = "* cape, 10 updates after sinpos: 0.00 lost at 4 (against sinpos, 10 more updates), 3 s"
    assert (tmp_path / "out" / "scores.md").read_text().count(line) == len(METRICS)


@pytest.fixture
def heard_interrupt():
    """Ctrl-C reaches child processes, also where a shell has begun the tests in the background and
    lets them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("heard_interrupt")
def test_ended_quickstart_leaves_no_training_behind_and_says_that_it_goes_on(repo_root, tmp_path):
    """By Ctrl-C, then by a kill. As a file, which needs no path."""
    args = ["--updates", "100000", "--train-size", "400", "--test-size", "24", "--jobs", "1"]
    args += ["--compare", "sinpos"]
    command = [sys.executable, repo_root / "recipes/mt/quickstart.py", *args]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    path = str(repo_root / "tests/support/warm_children")
    environment = {**os.environ, "WARM_PYTHON": warm_fairseq(), "PYTHONPATH": path}
    environment["PYTHONUNBUFFERED"] = "1"
    checkpoint = tmp_path / "build/quickstart/number_lists/runs/sinpos-seed1/checkpoint_last.pt"
    ends = []
    begun, again = "1 trainings of 100000 updates", "sinpos seed 1: goes on from update "
    for number, status, sign in ((signal.SIGINT, 130, begun), (signal.SIGTERM, 143, again)):
        with subprocess.Popen(command, cwd=tmp_path, env=environment, **output) as process:
            assert any(sign in line for line in process.stdout)
            deadline = time.monotonic() + 600
            while not checkpoint.exists():
                assert time.monotonic() < deadline
                time.sleep(0.2)
            trainings = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(number)
            ends.append(process.communicate(timeout=180)[0])  # data loaders look every 5 s
        assert process.returncode == status
        assert trainings
        assert not any(training.is_running() for training in trainings)
    assert "\ninterrupted; the same command goes on" in ends[0]
    assert not (tmp_path / "results").exists()


def write_text(folder):
    """300 pairs of 2 to 21 words; the target is the source backwards."""
    words = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "house", "red", "old"]
    rng = random.Random(0)
    lines = [rng.choices(words, k=2 + n % 20) for n in range(300)]
    (folder / "own.en").write_text("".join(" ".join(line) + "\n" for line in lines))
    (folder / "own.de").write_text("".join(" ".join(line[::-1]) + "\n" for line in lines))
    return folder / "own.en", folder / "own.de"


@pytest.mark.slow
def test_own_text_is_scored_by_length_and_its_model_analysed(run_cli, tmp_path, monkeypatch):
    """The command line of the analysis needs no other flags."""
    files = write_text(tmp_path)
    monkeypatch.setenv("DATA", f"{files[0]},{files[1]}")
    monkeypatch.setattr("sys.executable", warm_fairseq())
    monkeypatch.chdir(tmp_path)
    main(["--updates", "5", "--vocab-size", "60", "--compare", "sinpos"])
    lengths = [row["length"] for row in read_csv(tmp_path / "results/quickstart/scores.csv")]
    assert lengths[-1] == "all"
    assert lengths[-2].startswith("over ") or "-" in lengths[-2]
    text = (tmp_path / "results/quickstart/scores.md").read_text()
    assert "by source words" in text
    for fact in ("cores", "torch 2", "--max-tokens 1000", "`--position-embedding sinpos`"):
        assert fact in text
    assert f"--data {files[0]} {files[1]}`" in text  # can be pasted
    data = tmp_path / "build/quickstart/own.en/data"
    texts = [(data / f"{split}.en").read_text().splitlines() for split in ("train", "test")]
    longest, of_test = (max(len(line.split()) for line in lines) for lines in texts)
    assert longest <= 12 < of_test

    monkeypatch.undo()
    model = f"sinpos={data.parent}/runs/sinpos-seed1/checkpoint_last.pt"
    command = ("python", "-m", "recipes.mt.analyze", "stack", "--target-tokens", 40)
    env = {"MPLBACKEND": "TkAgg", "DISPLAY": ""}
    done = run_cli(*command, "--model", model, "--test", *files, cwd=tmp_path, env=env)
    assert "| sinpos |" in done.stdout
    assert "INFO" not in done.stderr
    assert Image.open(tmp_path / "results/translation/stack.png").format == "PNG"


BAD_INPUTS = [
    ("--data missing.en own.de", "--data missing.en: no such file"),
    ("--data same same", "--data same same: .*only 0.*different sentences"),
    ("--data few few", "--data few few: .*only 3.*200"),
    ("--data own.en own.de --test gone gone", "--test gone"),
    ("--data own.en own.de --max-train-length 1", "--max-train-length 1"),
    ("--data own.en own.de --max-train-length 999", "--max-train-length 999.*no test .*smaller"),
    ("--test own.en own.de", "--test needs --data"),
]


@pytest.fixture
def bad_files(tmp_path, monkeypatch):
    write_text(tmp_path)
    (tmp_path / "same").write_text("a b c\n" * 300)
    (tmp_path / "few").write_text("a\nb\nc\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("words", "message"), BAD_INPUTS)
def test_bad_input_names_option_value_and_remedy(bad_files, capsys, words, message):
    with pytest.raises((CommandError, SystemExit)) as error:
        main(words.split())
    assert re.search(message, f"{error.value} {capsys.readouterr().err}")
    assert not (bad_files / "build").exists()


def test_pairs_that_are_empty_on_a_side_are_counted(bad_files, capsys):
    lines = (bad_files / "own.en").read_text().splitlines()
    (bad_files / "own.en").write_text("\n".join(["", " ", *lines[2:]]) + "\n")
    splits = read_splits(parse_arguments(["--data", "own.en", "own.de"]))
    assert all(all(pair) for pairs in splits.values() for pair in pairs)
    said = capsys.readouterr().out
    assert said == f"--data: 2 of {len(lines)} pairs are empty on a side and left out\n"


def test_bad_environment_variable_is_named(bad_files, monkeypatch):
    monkeypatch.setenv("DATA", "only_one")
    with pytest.raises(CommandError, match="DATA=only_one: .*DATA=train.en.gz,train.de.gz"):
        main([])
