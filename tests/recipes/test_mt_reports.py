"""Pages over all trainings of a translation recipe: scores by file, sweeps, learning curves."""

from types import SimpleNamespace

import pytest

from recipes.lab.steps import CommandError
from recipes.mt import prepare
from recipes.mt.catalog import RECIPES, sampled
from recipes.mt.experiment import Experiment
from recipes.mt.reports import option_swept, read_curve, time_table, write_all_scores, write_curves
from tests.support.tables import read_csv

LOG = """
2026-01-02 10:00:00 | INFO | fairseq_cli.train | num. shared model params: 1,234,567 (num. trained: 1)
2026-01-02 10:01:00 | INFO | fairseq.trainer | begin training epoch 1
2026-01-02 10:01:00 | INFO | fairseq_cli.train | Start iterating over samples
2026-01-02 10:02:00 | INFO | train_inner | {"epoch": 1, "loss": "9", "num_updates": "50", "wall": "0"}
2026-01-02 10:02:10 | INFO | valid | {"name": "a\u2028b\x85c", "valid_loss": "7", "valid_ppl": "90.5", "valid_num_updates": "50"}
2026-01-02 10:03:10 | INFO | train_inner | {"epoch": 1, "loss": "8", "num_updates": "100", "wall": "0"}
2026-01-02 10:03:20 | INFO | valid | {"valid_loss": "6", "valid_ppl": "80", "valid_num_updates": "100"}
2026-01-02 10:04:20 | INFO | train_inner | {"epoch": 1, "loss": "7", "num_updates": "150", "wall": "0"}
2026-01-03 09:00:00 | INFO | fairseq_cli.train | num. shared model params: 1,234,567 (num. trained: 1)
2026-01-03 09:00:30 | INFO | fairseq.trainer | Loaded checkpoint x/checkpoint_last.pt (epoch 1 @ 100 updates)
2026-01-03 09:01:00 | INFO | fairseq_cli.train | Start iterating over samples
2026-01-03 09:02:00 | INFO | train_inner | {"epoch": 1, "loss": "7", "num_updates": "150", "wall": "0"}
2026-01-03 09:02:10 | INFO | valid | {"valid_loss": "5", "valid_ppl": "70", "valid_num_updates": "150"}
"""  # noqa: E501


def curve_in(folder):
    (folder / "train.log").write_text(LOG.lstrip())
    return read_curve(folder / "train.log")


def test_clock_of_an_interrupted_training_leaves_out_what_was_lost(tmp_path):
    """Update 100 was at 140 s; the 60 s to update 150, made twice, count once. Odd characters end
    no line of a log."""
    curve = curve_in(tmp_path)
    points = [(50, 70.0, 7.0, 90.5), (100, 140.0, 6.0, 80.0), (150, 210.0, 5.0, 70.0)]
    assert [tuple(point) for point in curve.points] == points
    assert (curve.updates, curve.seconds, curve.parameters) == (150, 210.0, 1_234_567)


def test_speed_is_relative_to_the_first_type(tmp_path):
    curve = curve_in(tmp_path)
    slow = curve._replace(seconds=420.0)
    lines = time_table({"sinpos": [curve], "relpos": [slow]})
    assert lines[2] == "| sinpos | 1234567 | 150 | 210 | 1.00 | 70.00 | 70.00 |"
    assert lines[3] == "| relpos | 1234567 | 150 | 420 | 0.50 | 70.00 | 70.00 |"


def test_training_without_validation_has_no_curve(tmp_path):
    log = tmp_path / "train.log"
    with pytest.raises(CommandError, match="run the stage train first"):
        read_curve(log)
    log.write_text("\n".join(line for line in LOG.split("\n") if "| valid |" not in line))
    with pytest.raises(CommandError, match="no validation.*--disable-validation"):
        read_curve(log)


def test_curves_of_seeds_share_a_line(tmp_path):
    trainings = []
    for name, seed in (("sinpos", 1), ("sinpos", 2), ("cape", 1)):
        run = tmp_path / f"{name}{seed}"
        run.mkdir()
        (run / "train.log").write_text(LOG.lstrip().replace('"70"', f'"{70 + seed}"'))
        trainings.append(SimpleNamespace(name=name, seed=seed, run=run))
    lines = write_curves(tmp_path, trainings, {"Command": "x"})
    assert "| sinpos | 1234567 | 150 | 210 ± 0 |" in lines[2]
    assert "71.50 ± 0.71" in lines[2]
    rows = read_csv(tmp_path / "curves.csv")
    assert len(rows) == 9
    assert rows[2] == {
        "type": "sinpos", "seed": "1", "update": "150", "seconds": "210.000", "loss": "5.000",
        "perplexity": "71.000",
    }  # fmt: skip
    assert (tmp_path / "curves.png").stat().st_size > 5000


def scored(name, seed, **bleu):
    """Rows of one training, by name of the set; names of validation sets begin with v."""
    return [
        {
            "type": name, "seed": seed, "test set": label, "sentences": 10, "sacreBLEU": value,
            "tokenised BLEU": value, "split": "valid" if label[0] == "v" else "test",
        }
        for label, value in bleu.items()
    ]  # fmt: skip


def test_best_is_chosen_on_validation_text(tmp_path, capsys):
    """The setting that is best on the test sets is not chosen; SHAPE appendix B."""
    settings, rows = {}, []
    for offset, valid, test in ((10, 21.0, 35.0), (40, 23.0, 30.0), (100, 22.0, 30.0)):
        name = f"shape:max_offset={offset}"
        settings[name] = {"type": "shape", "max_offset": offset}
        for seed in (1, 2):
            rows += scored(name, seed, v2010=valid + seed, v2011=valid - seed, t2014=test)
    write_all_scores(tmp_path, rows, settings, {"Command": "x"})
    assert "best on validation text: shape:max_offset=40\n" in capsys.readouterr().out
    page = (tmp_path / "scores.md").read_text()
    ranking = page.partition("## Validation text, the best first")[2]
    assert "| shape:max_offset=40 | 23.00 ± 0.00 |\n| shape:max_offset=100 |" in ranking
    assert "![sacreBLEU by max_offset](sweep.png)" in page
    assert (tmp_path / "sweep.png").stat().st_size > 5000


def test_mean_of_all_is_the_average_of_table_5(tmp_path):
    """SHAPE table 5, APE on Vanilla: 26.55 over the years 2010 to 2016."""
    years = {"v10": 24.22, "v11": 21.98, "v12": 22.20, "v13": 26.06}
    rows = scored("sinpos", 1, **years, t14=26.95, t15=29.98, t16=34.46)
    write_all_scores(tmp_path, rows, {"sinpos": {"type": "sinpos"}}, {})
    (mean,) = [r for r in read_csv(tmp_path / "scores.csv") if r["test set"] == "mean of all"]
    assert round(float(mean["sacreBLEU"]), 2) == 26.55


def test_swept_option_is_the_one_that_differs():
    shifts = {f"cape{d}": {"type": "cape", "max_global_shift": d} for d in (50, 5, 20)}
    assert option_swept(shifts) == ("max_global_shift", {"cape5": 5, "cape20": 20, "cape50": 50})
    assert option_swept({**shifts, "sinpos": {"type": "sinpos"}}) is None
    assert option_swept({name: shifts[name] for name in ("cape5", "cape20")}) is None


def test_validation_files_stay_apart(tmp_path, monkeypatch):
    """Two files of 7 and 4 lines, joined by three: no line has sentences of both."""
    files = {}
    for name, count in (("train", 300), ("news1", 7), ("news2", 4), ("test", 5)):
        pair = (tmp_path / f"{name}.en", tmp_path / f"{name}.de")
        for path in pair:
            path.write_text("".join(f"{name[-1]} {n} one two three .\n" for n in range(count)))
        files.setdefault({"n": "valid"}.get(name[0], name), []).append(pair)
    monkeypatch.setattr(prepare, "binarise", lambda *_: None)
    row = sampled(RECIPES["multi30k_study_interpolate"])
    prepare.prepare(row, files, tmp_path / "work", sample=False, workers=1)
    lines = (tmp_path / "work/subwords/valid.reference").read_text().splitlines()
    assert [line.count("<sep>") for line in lines] == [2, 2, 0, 2, 0]
    files_of = ["".join(sorted({part[0] for part in line.split("<sep> ")})) for line in lines]
    assert files_of == ["1", "1", "1", "2", "2"]
    assert prepare.part_sizes(tmp_path / "work/subwords", 5) == [3, 2]
    experiment = SimpleNamespace(work=tmp_path / "work")
    assert Experiment.names(experiment, "valid", 2) == ["news1", "news2"]
    assert Experiment.names(experiment, "test", 1) == ["test"]
    same = {"valid": ["news.en 1", "news.de 2"], "test": ["news.en.gz 3", "news.de.gz 4"]}
    monkeypatch.setattr("recipes.lab.steps.recorded", lambda folder: same)
    assert Experiment.names(experiment, "valid", 1) == ["valid"]  # not a second news
    assert Experiment.names(experiment, "test", 1) == ["test"]
    monkeypatch.undo()
    (tmp_path / "work/subwords/valid.sizes").unlink()  # held out of the training text
    assert prepare.part_sizes(tmp_path / "work/subwords", 5) == [5]


@pytest.mark.slow
def test_all_stages_of_a_comparison(run_cli, tmp_path):
    """Types side by side in another language than the recipe's, from text to tables."""
    words = ("one", "two", "three", "four", "five", "six", "seven")
    for name, count in (("train", 600), ("v10", 8), ("v11", 9), ("t14", 10)):
        lines = [" ".join(words[(n + k) % 7] for k in range(9 + n % 9)) for n in range(count)]
        for code in ("en", "fr"):
            (tmp_path / f"{name}.{code}").write_text("".join(f"{line}.\n" for line in lines))
    split = {"train": "--train", "v10": "--valid", "v11": "--valid", "t14": "--test"}
    files = [w for name, flag in split.items() for w in (flag, f"{name}.en", f"{name}.fr")]
    stages = ["all", "validate", "curve", "stack", "analyze", "--select", "best"]
    compared = ["--compare", "sinpos", "cape:max_global_shift=2", "--jobs", "2", "--threads", "1"]
    how = ["--sample", "--target-lang", "fr", "--work", "work", "--device", "cpu"]
    command = ["python", "-m", "recipes.mt.run", "multi30k_study", *stages, *files, *compared, *how]
    run_cli(*command, "--dropout", "0.25", cwd=tmp_path, timeout=1200, warm_children=True)
    work = tmp_path / "work"
    page = (work / "scores.md").read_text()
    assert "| type | v10 | v11 | validation mean | t14 | mean of all |" in page
    assert "Validation text, the best first" in page
    curves = (work / "curves.md").read_text()
    assert all(f"| {name} |" in curves for name in ("sinpos", "cape:max_global_shift=2"))
    for name in ("stack", "length", "length-stacked"):
        assert "cape:max_global_shift 2" in (work / f"analysis/{name}.md").read_text()
        assert (work / f"analysis/{name}.png").exists()
    stacked = (work / "analysis/length-stacked.md").read_text()
    assert "BLEU by number of stacked sentences" in stacked
    assert "1: 10, 2: 5, 3: 3, 4: 2, 5: 2, 6: 1, all: 23" in stacked
    run = work / "runs/cape-max_global_shift-2"
    title = "# Multi30k English-German by a small model, 4800 updates (no paper), here en to fr"
    assert (run / "scores.md").read_text("utf-8").startswith(title)
    assert [int(row["epoch"]) for row in read_csv(run / "selection.csv")] == [1, 2]
    log = (run / "train.log").read_text()
    assert "'dropout': 0.25" in log or "dropout=0.25" in log
    assert "max_global_shift=2.0" in log
    positions = (run / "stacked.csv").read_text().splitlines()
    assert positions[0] == "position,mean_nll,count,tail"
    assert len(positions) > 40
    assert (work / "binary/dict.fr.txt").exists()
    assert not list(work.rglob("*.de*"))
