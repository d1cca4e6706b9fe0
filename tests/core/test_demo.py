"""The control experiment through its command line: results, tasks, files, and inputs it refuses."""

import contextlib
import csv
import io
import itertools
import re

import pytest
import torch

pytest.importorskip("matplotlib")
from PIL import Image

from cape_plugins import DOMAINS
from cape_plugins.cli import main
from cape_plugins.demo import command, model
from cape_plugins.demo.model import Labeller
from cape_plugins.demo.tasks import CELLS, LAG, TASKS
from cape_plugins.settings.config import PositionConfig
from cape_plugins.settings.registry import types_of
from cape_plugins.settings.switching import Step, gains_of_switches
from tests.support.expected import EXPECTED


def demo(folder, *words):
    """Runs the command in this process; returns its table as ``{(type, seed, size): error}``."""
    main(["demo", "--jobs", "1", "--output", str(folder), *map(str, words)])
    return scores(folder)


def scores(folder):
    with open(folder / "scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return {tuple(row.values())[:3]: float(row["error_percent"]) for row in rows}


def test_augmented_positions_reach_beyond_training_and_others_do_not(tmp_path, monkeypatch):
    """Weak augmentation of few patches needs the fewest updates."""
    monkeypatch.setitem(TASKS, "image", TASKS["image"]._replace(train=4, tests=(4, 8)))
    monkeypatch.setattr(model, "TEST_PLACES", 1024)
    cape = "cape:max_local_shift=0,max_global_shift=0.1"
    words = ("--domain", "image", "--compare", "sinpos", cape, "--seeds", 1, "--updates", 130)
    errors = demo(tmp_path, *words)
    assert max(errors[name, "1", "4"] for name in ("sinpos", cape)) < 10
    assert errors["sinpos", "1", "8"] > 1.5 * errors[cape, "1", "8"]


@pytest.mark.parametrize("domain", ["audio", "text"])
def test_label_is_the_symbol_at_a_lag(domain):
    symbols, labels, scored = TASKS[domain].batch(3, 9, torch.Generator().manual_seed(1))
    assert scored.tolist() == [position >= LAG for position in range(9)]
    assert torch.equal(labels[:, LAG:], symbols[:, :-LAG])


@pytest.mark.parametrize("side", [4, 12])
def test_label_of_a_patch_is_the_symbol_of_the_cell_up_and_left(side):
    batch = TASKS["image"].batch(3, side, torch.Generator().manual_seed(1))
    symbols, labels, scored = (part.unflatten(-1, (side, side)) for part in batch)
    width = side // CELLS
    for row, column in itertools.product(range(side), repeat=2):
        assert scored[row, column] == (min(row, column) >= width)
        cell = symbols[:, row // width * width, column // width * width]
        assert torch.equal(symbols[:, row, column], cell)
        if scored[row, column]:
            assert torch.equal(labels[:, row, column], symbols[:, row - width, column - width])


@pytest.mark.parametrize("domain", TASKS)
def test_training_reaches_the_largest_test(domain):
    """Positions of the largest test, without augmentation, are among the positions of training."""
    task = TASKS[domain]
    rows, settings = command._defaults(domain)
    for name in rows:
        config = PositionConfig.from_dict({"type": name, **settings[name]}, domain)
        if not config.random:
            continue
        encoder = Labeller(config, 8).encode  # the table is not asked
        sizes, cpu = (task.train, task.tests[-1]), torch.device("cpu")
        train, test = (task.positions(512, size, cpu) for size in sizes)
        drawn = encoder.coordinates(train, encoder.draw(512), random=True)
        used = encoder.eval().coordinates(test)
        slack = 0.05 * (used.max() - used.min())
        reached = drawn.min() <= used.min() + slack and drawn.max() >= used.max() - slack
        # grids of all sizes span the same square
        expected = domain not in EXPECTED[name].unreached or bool(DOMAINS[domain].grid)
        assert reached == expected, name


QUICK = ("--updates", 2, "--seeds", 2, 1, "--compare", "nopos", "cape:max_global_shift=2")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """The folder that a quick comparison writes, and what it prints on a terminal."""
    folder, out, err = tmp_path_factory.mktemp("demo") / "new", Terminal(), Terminal()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        demo(folder, *QUICK)
    return folder, out.getvalue(), err.getvalue()


def test_a_trained_model_is_switched_beside_its_yardsticks(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "text", TASKS["text"]._replace(tests=(40, 80)))
    words = ("--domain", "text", "--updates", 4, "--seeds", 1)
    switching = ("--switch-from", "sinpos", "--switch-updates", 0, "50%")
    seeds, train = {}, model.train

    def noted(trained, task, step, seed, device):
        seeds[step.name] = seed
        train(trained, task, step, seed, device)

    monkeypatch.setattr(model, "train", noted)
    errors = demo(tmp_path / "switched", *words, *switching, "--compare", "shape", "relpos")
    first = demo(tmp_path / "first", *words, "--compare", "sinpos")
    assert first.items() <= errors.items()
    scratch = demo(
        tmp_path / "scratch", *words[:2], "--updates", 6, *words[4:], "--compare", "shape"
    )
    after = [f"{name}, {n} updates after sinpos" for name in ("shape", "relpos") for n in (0, 2)]
    others = [f"{name} from scratch, 6 updates" for name in ("shape", "relpos")]
    # a training that goes on sees other inputs
    assert {seeds[name] for name in ("sinpos", *others)} == {1}
    assert 1 not in {seeds[name] for name in ("sinpos, 2 more updates", *after)}
    assert {key[0] for key in errors} == {"sinpos", "sinpos, 2 more updates", *after, *others}
    for size in ("40", "80"):
        assert errors[others[0], "1", size] == scratch["shape", "1", size]
        # not augmented, shape has the sinusoids of sinpos
        assert errors[after[0], "1", size] == errors["sinpos", "1", size]
    assert errors[after[0], "1", "80"] != errors[after[1], "1", "80"]
    page = (tmp_path / "switched" / "scores.md").read_text()
    assert "**After sinpos**: weights of this model" in page
    assert re.search(r"^\| type .* \| 40 \(training\) \| 80 \|", page, re.MULTILINE)
    line = r"^\* (.*) \(against sinpos, 2 more updates\), \d+ s of training$"
    lines = re.findall(line, page, re.MULTILINE)
    assert [line.partition(":")[0] for line in lines] == [after[1], after[3]]


def test_gains_of_a_switch_are_means_over_seeds_and_lengths():
    """At the lengths of training and at others; against the first type trained on for as long."""
    first = Step("first", {}, 9, True)
    short, long = (Step(f"next {n}", {}, n, True, yardstick="first") for n in (3, 9))
    trainings = [(first, 5.0), (short, 1.0), (long, 4.0), (long, None), (long, 8.0)]
    scores = {
        "first": {"1": [90], "2": [80, 90], "3": [10], "4": [0]},
        "next 3": {"1": [90], "2": [80], "3": [10], "4": [0]},
        "next 9": {"1": [89], "2": [84, 84], "3": [30], "4": [50, 60]},
    }
    how = {"trained": {"1", "2"}, "digits": 1}
    said = "* next 9: 1.0 {} at 1, 2 on average; 37.5 {} at 3, 4 on average (against first), 6 s"
    for lower_is_better, changes in ((False, ("lost", "gained")), (True, ("gained", "lost"))):
        (line,) = gains_of_switches(trainings, scores, lower_is_better=lower_is_better, **how)
        assert line == f"{said.format(*changes)} of training"
    one = {name: {"2": rows["2"], "4": rows["4"]} for name, rows in scores.items()}
    (line,) = gains_of_switches([(long, None)], one, lower_is_better=False, **how)
    assert line == "* next 9: 1.0 lost at 2; 55.0 gained at 4 (against first)"
    unfinished = {"next 9": scores["next 9"]}
    assert gains_of_switches(trainings, unfinished, lower_is_better=False, **how) == []


def test_other_options_of_a_type_are_a_switch_as_well(tmp_path, monkeypatch):
    """Also if tables have other sizes."""
    monkeypatch.setitem(TASKS, "text", TASKS["text"]._replace(tests=(40,)))
    words = ("--domain", "text", "--updates", 2, "--seeds", 1, "--switch-updates", 0)
    wide, narrow = (f"relpos:relative_context={context}" for context in (5, 3))
    errors = demo(tmp_path, *words, "--switch-from", wide, "--compare", narrow)
    assert f"{narrow}, 0 updates after {wide}" in {key[0] for key in errors}


def test_it_writes_table_page_and_picture(quick):
    folder, out, err = quick
    assert {key[:2] for key in scores(folder)} == {
        (name, seed) for name in ("nopos", "cape:max_global_shift=2") for seed in "12"
    }
    page = (folder / "scores.md").read_text()
    (head,) = re.findall(r"^\| type .*$", page, re.MULTILINE)
    assert "mean ± standard deviation of 2 seeds" in head
    assert head in out
    assert "cape-plugins demo --jobs 1" in page
    assert "max_global_shift=2.0" in page
    assert "4 of 4" not in err  # the bar is gone at the end
    assert "3 of 4 trainings, about" in err
    with Image.open(folder / "scores.png") as picture:
        assert picture.width > 800
    assert len(list(folder.iterdir())) == 3


@pytest.mark.slow
def test_processes_compute_the_same(quick, tmp_path, capsys):
    assert demo(tmp_path / "two", *QUICK, "--jobs", 2) == scores(quick[0])
    assert "[" not in capsys.readouterr().err  # a bar is for terminals


@pytest.mark.parametrize("domain", TASKS)
def test_every_domain_trains(domain, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, domain, TASKS[domain]._replace(tests=TASKS[domain].tests[:1]))
    monkeypatch.setattr(model, "TEST_PLACES", 1)
    monkeypatch.setattr(model, "BATCH", 1)
    monkeypatch.setattr(command, "save", lambda figure, path: None)
    errors = demo(tmp_path, "--updates", 1, "--seeds", 1, "--domain", domain)
    assert {name for name, *_ in errors} == types_of("encoder", domain).keys()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--compare rotary", "--compare rotary is unknown.*choose one"),
        ("--compare cape:max_offset=1", "position embedding cape:max_offset=1.*no effect"),
        ("--compare cape --position-max-global-shift 1", "leave --compare out to train one"),
        ("--seeds 0", "--seeds.*'0'.*at least 1"),
        ("--device nonsense", "--device nonsense.*give cpu"),
        ("--output /nowhere/such", "--output /nowhere/such.*make the folder"),
        (f"--output {__file__}", f"--output {__file__}.*no folder that can be written to"),
        (
            "--switch-from sinpos --switch-updates 10%%",
            "-updates 10%% is not allowed; allowed:",
        ),
        ("--switch-from sinpos --compare sinpos", "-from sinpos is among the types of --compare"),
        ("--switch-from sinpos --switch-rate 0", "-rate: '0' is not allowed; allowed: above 0"),
        ("--switch-from sinus", "--switch-from sinus is unknown; allowed: nopos"),
    ],
)
def test_mistakes_are_one_line_and_train_nothing(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "train_and_test", lambda job: pytest.fail("would train"))
    with pytest.raises(SystemExit, match="2"):
        main(["demo", *words.split()])
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: .*{message}", line)
    assert list(tmp_path.iterdir()) == []


def test_interrupted_it_says_so(tmp_path, monkeypatch, capsys):
    def interrupt(job):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "train_and_test", interrupt)
    with pytest.raises(SystemExit, match="130"):
        main(["demo", "--jobs", "1", "--output", str(tmp_path / "x")])
    assert capsys.readouterr().err.strip() == "interrupted"
    assert not (tmp_path / "x").exists()
