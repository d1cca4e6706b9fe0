"""`recipes.mt.run prepare` with the user's text: cleaning and languages; and the built-in corpus:
its language, lengths, and no test list in training."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.lab.steps import CommandError, recorded
from recipes.mt import prepare
from recipes.mt.experiment import Experiment
from recipes.mt.number_lists import MAX_NUMBER, make_number_lists, spell, write_number_lists
from recipes.mt.run import main, parse_arguments

PAIRS = 60
SPLITS = ("train", "valid", "test")


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes texts by name of the file, into the folder in which commands run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prepare, "binarise", lambda *_: None)  # a command of fairseq

    def write(**texts):
        for name, lines in texts.items():
            text = "".join(f"{line}\n" for line in lines)
            (tmp_path / name.replace("_", ".")).write_text(text, encoding="utf-8")

    return write


def sentences(count=PAIRS, words=4):
    return [f"satz {' '.join(str(n * k) for k in range(1, words))} ." for n in range(count)]


def run(recipe, *words, codes=("en", "de")):
    """Prepares ``train.en train.de`` and the files of other splits in the folder ``work``."""
    files = [x for s in SPLITS for x in (f"--{s}", *(f"{s}.{code}" for code in codes))]
    main([recipe, "prepare", *files, "--work", "work", "--workers", "1", *words])


def write_corpus(write, source=None, target=None, codes=("en", "de")):
    write(**{f"{split}_{code}": sentences(6) for split in SPLITS for code in codes})
    sides = zip(codes, (source, target), strict=True)
    write(**{f"train_{code}": lines or sentences() for code, lines in sides})


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_file_of_blank_lines_is_refused_by_name_and_leaves_no_folder(write, tmp_path, split):
    write_corpus(write)
    write(**{f"{split}_en": [" "] * (PAIRS if split == "train" else 6)})
    before = sorted(tmp_path.iterdir())
    why = f"--{split} {split}.en {split}.de: no line has text in both"
    with pytest.raises(CommandError, match=why):
        run("multi30k_small")
    assert sorted(tmp_path.iterdir()) == before


def test_cleaning_that_leaves_no_pair_is_an_error(write):
    write_corpus(write, target=sentences(words=200))
    for recipe, unit in (("wmt14_en_de", "words"), ("multi30k_small", "subwords")):
        why = f"--train: cleaning by {unit} removed all {PAIRS} pairs .*; check that line n of one"
        with pytest.raises(CommandError, match=why):
            run(recipe, "--work", unit)


def test_cleaning_says_how_many_pairs_it_removed_and_why(write, capsys):
    source, target = sentences(), sentences()
    source[3] = target[10] = ""
    source[20] = target[20] = " ".join("a" * 81)
    target[30] = " ".join("a" * 70)
    write_corpus(write, source, target)
    write(test_en=source, test_de=target)
    run("wmt14_en_de")
    said = capsys.readouterr().out
    why = "2 empty on a side, 1 of more than 80 words on a side, 1 more than 9 times as long"
    assert f"train: cleaning by words removed 4 of {PAIRS} pairs ({why} on one side)" in said
    assert f"train: cleaning by subwords removed none of {PAIRS - 4} pairs" in said
    assert Path("work/subwords/test.reference").read_text() == Path("test.de").read_text()


def test_other_files_are_not_mixed_with_prepared_ones(write):
    write_corpus(write)
    run("multi30k_small")
    write_corpus(write, source=sentences(words=5))
    with pytest.raises(CommandError, match="made with other settings.*train.en.*--work"):
        run("multi30k_small")


def test_later_stages_take_the_languages_that_are_given_for_files_of_others(write):
    write_corpus(write, codes=("en", "fr"))
    why = "--train train.en train.fr: .* en and fr, .* en and de; give .* --target-lang fr"
    with pytest.raises(CommandError, match=why):
        run("multi30k_small", codes=("en", "fr"))
    run("multi30k_small", "--target-lang", "fr", codes=("en", "fr"))
    args, extra = parse_arguments(["multi30k_small", "train", "--work", "work", "--device", "cpu"])
    assert (args.settled.languages, extra) == (("en", "fr"), [])
    assert args.settled.title.endswith("(no paper), here en to fr")
    with pytest.raises(CommandError, match=r"--work work: its text is en to fr, not en to cs"):
        parse_arguments(["multi30k_small", "train", "--work", "work", "--target-lang", "cs"])


@pytest.mark.parametrize("names", [("a.src", "a.tgt"), ("a.en", "b.en")])
def test_names_that_name_no_languages_are_as_good(write, names):
    write(**{name.replace(".", "_"): sentences() for name in names})
    main(["multi30k_small", "prepare", "--train", *names, "--work", "work", "--workers", "1"])
    assert recorded(Path("work/text"))["languages"] == ["en", "de"]


def test_moses_reads_the_language_that_is_given(write, monkeypatch):
    """French keeps an apostrophe with the word before it, English with what follows."""
    calls = []
    monkeypatch.setattr(prepare, "binarise", lambda *args: calls.append(args[1]))
    write_corpus(write, target=["l'eau c'est bon ."] * PAIRS, codes=("en", "fr"))
    run("wmt14_en_de", "--target-lang", "fr", codes=("en", "fr"))
    assert Path("work/tokenised/train.fr").read_text().startswith("l&apos; eau c&apos; est")
    assert {path.name for path in Path("work").rglob("train.*")} == {"train.en", "train.fr"}
    assert calls == [("en", "fr")]


@pytest.mark.parametrize(("target", "tokenizer"), [("zh", "zh"), ("de", "13a")])
def test_sacrebleu_splits_as_is_usual_for_the_target(write, monkeypatch, target, tokenizer):
    write_corpus(write, codes=("en", target))
    run("multi30k_small", "--target-lang", target, codes=("en", target))
    args, extra = parse_arguments(["multi30k_small", "score", "--work", "work"])
    args.extra = extra
    monkeypatch.setattr(Experiment, "subwords", SimpleNamespace(decode=str))
    training = Experiment(args, "cape", {}, None)
    training.scores_of("test", [[["eins zwei drei vier"]] * 3], "mean")
    assert f"|tok:{tokenizer}|" in (training.run / "scores.md").read_text()


BAD_LANGUAGES = {
    "en": "--source-lang en --target-lang en: both languages are the same",
    "a/b": "--target-lang: 'a/b' is not the name of a language",
    "xx": "language xx: there are no built-in number lists",
}


@pytest.mark.parametrize("language", BAD_LANGUAGES)
def test_bad_languages_are_refused(tmp_path, monkeypatch, capsys, language):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((CommandError, SystemExit)) as error:
        main(["multi30k_small", "prepare", "--sample", "--target-lang", language])
    assert BAD_LANGUAGES[language] in f"{error.value} {capsys.readouterr().err}"


SIZES = {"train": 800, "valid": 80, "test": 240}


def test_numbers_are_spelled_in_each_language():
    assert spell((81, 7, 36), "en") == "eighty-one, seven, thirty-six"
    assert spell((81, 7, 36), "de") == "einundachtzig, sieben, sechsunddreißig"  # units first
    assert spell((99,), "fr") == "quatre-vingt-dix-neuf"


def test_training_lists_are_short_and_all_others_new():
    """Training has all numbers, also alone; lengths of the test are equally frequent."""
    splits = make_number_lists(seed=1, sizes=SIZES)
    train, valid, test = (set(splits[name]) for name in SPLITS)
    assert {*map(len, train)} == {*map(len, valid)} == {1, 2, 3, 4}
    assert {n for numbers in train for n in numbers} == set(range(MAX_NUMBER + 1))
    assert sum(len(numbers) == 1 for numbers in train) >= 60
    assert [sum(len(numbers) == n for numbers in test) for n in range(2, 13)] == [20] * 11
    assert not train & test | train & valid | valid & test
    assert (len(test), len(valid)) == (SIZES["test"], SIZES["valid"])
    assert make_number_lists(seed=2, sizes=SIZES) != splits


def test_files_are_aligned(tmp_path):
    write_number_lists(tmp_path, sizes=SIZES)
    lines = {path.name: path.read_text().splitlines() for path in tmp_path.iterdir()}
    names = {f"{split}.{side}" for split in SPLITS for side in ("en", "de")}
    assert set(lines) == {*names, "test.group"}
    for split in SPLITS:
        assert len(lines[f"{split}.en"]) == len(lines[f"{split}.de"])
    assert [str(line.count(",") + 1) for line in lines["test.de"]] == lines["test.group"]
