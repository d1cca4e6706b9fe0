"""Comparisons of speech models: bins of durations, reports, and the commands."""

import jiwer
import pytest

pytest.importorskip("soundfile")
from recipes.asr import evaluate, run
from recipes.asr.report import Text, by_duration, in_training, rates
from recipes.asr.run import STUDIES
from recipes.lab.steps import CommandError
from tests.support.command_lines import warm_fairseq
from tests.support.fairseq_speech import durations, write_manifest
from tests.support.plots import COLOURS, assert_lines
from tests.support.tables import read_csv


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("speech")
    for seed, (split, count) in enumerate((("train", 16), ("valid", 3), ("test", 9))):
        write_manifest(path, split, durations(count, seed), seed)
    return path


TEXTS = [
    Text(0.5, "a b c", "a b c"),
    Text(1.0, "a b", "a x"),
    Text(1.5, "one two", ""),
    Text(9.0, "x", "x y"),
]


def test_rates_are_jiwers():
    references, hypotheses = [t.reference for t in TEXTS], [t.hypothesis for t in TEXTS]
    assert rates(TEXTS) == {
        "wer": pytest.approx(100 * jiwer.wer(references, hypotheses)),
        "ler": pytest.approx(100 * jiwer.cer(references, hypotheses)),
        "words": 8,
        "count": 4,
    }


def test_bins_include_their_upper_end():
    rows = by_duration(TEXTS, (1, 2, 4))
    assert [(row["duration"], row["count"], row["wer"]) for row in rows] == [
        ("0-1 s", 2, pytest.approx(20.0)),
        ("1-2 s", 1, 100.0),
        ("over 4 s", 1, 100.0),
        ("all", 4, pytest.approx(50.0)),
    ]


@pytest.mark.parametrize(("longest", "count"), [(0.9, 1), (1.0, 1), (1.1, 2), (5.0, 3)])
def test_durations_of_training_are_those_that_begin_below_its_longest(longest, count):
    rows = by_duration(TEXTS, (1, 2, 4))
    assert in_training(rows, (1, 2, 4), longest) == ["0-1 s", "1-2 s", "over 4 s"][:count]


def models(study, *words):
    """Pretends that there are data, so that no data are made."""
    names = () if words else ("--compare", *STUDIES[study].models)
    args = run.make_parser().parse_args(["--study", study, "--data", "x", *names, *words])
    return run.models(args)


def test_types_beside_the_study_have_the_settings_of_the_recipe():
    """The type alone, and with an option; in the study of types and in another."""
    for study in ("types", "shift"):
        rows = ("cape", "cape:max_local_shift=0.25")
        plain, other = models(study, "--recipe", "tedlium3", "--compare", *rows)
        assert "--position-max-global-scale 2" in plain.flags
        assert "--position-max-global-scale 2" in other.flags
        assert "--position-max-local-shift 0.25" in other.flags
    (small,) = models("shift", "--compare", "cape")
    assert "scale" not in small.flags


@pytest.mark.slow
def test_comparison_from_training_to_figure(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.executable", warm_fairseq())
    monkeypatch.chdir(tmp_path)
    command = ["--data", str(folder), "--compare", "cape", "--updates", "3", "--bins", "1"]
    command += ["--batches", "padding-free", "--seeds", "2", "--hops", "10", "16", "--curve", "2"]
    command += ["--", "--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16"]
    command += ["--encoder-layers", "1", "--encoder-attention-heads", "2", "--max-tokens", "500"]
    command += ["--lr", "0.01"]
    run.main(command)
    out = tmp_path / "results/asr/types"
    rows = read_csv(out / "scores.csv")
    model = {"model": "cape (padding-free)", "seed": "2"}
    assert all(model.items() <= row.items() for row in rows)
    assert {row["duration"] for row in rows} == {"0-1 s", "over 1 s", "all"}
    assert all(float(row["wer"]) > 0 for row in rows)
    text = (out / "scores.md").read_text()
    assert "--padding-free" in text
    assert text.count(str(tmp_path.parent)) == 1, "in the command, as it was typed"
    hops, curve = read_csv(out / "hops.csv"), read_csv(out / "curve.csv")
    assert all(model.items() <= row.items() for row in (*hops, *curve))
    assert [row["hop_ms"] for row in hops] == ["10", "16"]
    assert all(float(row["audio_seconds_per_second"]) > 0 for row in hops)
    assert [row["updates"] for row in curve] == ["2", "3"]
    longest = max(durations(16, 0))
    within = sum(seconds <= longest for seconds in durations(9, 2))
    assert {row["count"] for row in curve} == {str(within)}, "no longer than in training"
    for name in ("scores.png", "hops.png"):
        assert_lines(out / name, COLOURS[:1])
    # the same decoding, of a checkpoint alone
    checkpoint = tmp_path / "build/asr/types/runs/cape-(padding-free)-seed2/checkpoint_last.pt"
    words = ["--model", str(checkpoint), "--data", str(folder), "--bins", "1"]
    evaluate.main([*words, "--output", "again"])
    alone = read_csv(tmp_path / "again/test/scores.csv")
    again = [(row["duration"], row["wer"]) for row in alone]
    assert {(row["seed"], row["train_seconds"]) for row in alone} == {("", "")}, "not known"
    assert again == [(row["duration"], row["wer"]) for row in rows]
    capsys.readouterr()
    run.main(command)  # all is reused
    assert "1 trainings of" in capsys.readouterr().out
    command[command.index("--curve") + 1] = "1"
    with pytest.raises(CommandError, match="--curve 1: .*seed2 has already reached update 3"):
        run.main(command)


def test_recordings_without_text_are_decoded_and_not_counted(folder, tmp_path, monkeypatch):
    """A set in which no recording has a text is refused."""
    output = {"H-0": "a b", "H-1": "x", "H-2": "c", "T-0": "a b"}
    monkeypatch.setattr(evaluate, "run_module", lambda *_, log, **__: log.write_text(
        "".join(f"{name}\t{text}\n" for name, text in output.items())
        + "Translated 3 sentences (3 tokens) in 0.5s (1 sentences/s, 1 tokens/s)\n"
    ))  # fmt: skip
    rows = ["audio\tseconds\ttext", "test/000.wav\t1.5\ta b"]
    rows += [f"test/00{n}.wav\t1.0\t" for n in (1, 2)]
    (folder / "mixed.tsv").write_text("\n".join(rows) + "\n")
    checkpoint = tmp_path / "one.pt"
    checkpoint.touch()
    texts, speed = evaluate.decode(folder, "mixed", checkpoint, tmp_path / "mixed")
    assert texts == [Text(1.5, "a b", "a b")]
    assert speed == pytest.approx(7.0)
    (folder / "bare.tsv").write_text("audio\ntest/000.wav\n")
    with pytest.raises(CommandError, match="no recording of bare.tsv has a text to compare with"):
        evaluate.decode(folder, "bare", checkpoint, tmp_path / "bare")


BAD = [
    (run, ["--data", "gone"], "there is no train.tsv"),
    (run, ["--bins", "3", "2"], "--bins 3 2: the numbers must increase"),
    (run, ["--test", "gone"], "there is no gone.tsv"),
    (run, ["--curve", "9", "5"], "--curve 9 5: the numbers must increase"),
    (run, ["--curve", "600"], "--curve 600: allowed: numbers below 600, the last update"),
    (evaluate, ["--model", "gone.pt"], "--model gone.pt: no such file; give a checkpoint"),
    (evaluate, ["gone.pt"], "gone.pt: give checkpoints by --model"),
    (evaluate, ["--model", __file__, "--sets", "gone"], "there is no .*gone.tsv"),
    (evaluate, ["--model", __file__, "--hop-seconds", "0.02"], "--hop-seconds is set by this"),
    (evaluate, ["--model", __file__, "--gpu"], "--gpu is set by this command; see --device"),
]


@pytest.mark.parametrize(("program", "words", "message"), BAD, ids=lambda value: str(value)[-30:])
def test_bad_input_is_refused(folder, program, words, message):
    data = [] if "--data" in words else ["--data", str(folder)]
    with pytest.raises(CommandError, match=message):
        program.main([*words, *data])
