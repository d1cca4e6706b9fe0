"""The translation recipes: each from its text to an update."""

import re
from dataclasses import astuple, fields, replace
from importlib import import_module

import pytest
import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

from fairseq_user_dir import average
from recipes.lab import runs, steps
from recipes.lab.runs import check_flags, last_update
from recipes.lab.steps import CommandError, recorded
from recipes.mt import prepare
from recipes.mt.catalog import RECIPES, Text, sampled
from recipes.mt.experiment import Experiment
from recipes.mt.run import main, parse_arguments, train_flags


def preprocess(module, *words, **how):
    """Takes the place of a child process."""
    parser = options.get_preprocessing_parser()
    import_module(module).main(parser.parse_args(list(map(str, words))))


@pytest.fixture(scope="module")
def text_of(tmp_path_factory):
    """The folder of prepared number lists for a recipe; recipes with the same text share it,
    because options of training do not change the text."""
    folders = {}

    def text_of(row):
        key = astuple(Text(**{option.name: getattr(row, option.name) for option in fields(Text)}))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("text")
        prepare_again(row, folders[key])
        return folders[key]

    return text_of


def prepare_again(row, work):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "run_module", preprocess)
        prepare.prepare(row, {"train": [], "valid": [], "test": []}, work, sample=True, workers=1)


@pytest.mark.parametrize("name", RECIPES)
def test_sample_comes_from_its_text_to_an_update(text_of, tmp_path, name):
    """The flags of every stage are fairseq's, and what they build trains."""
    args, args.extra = parse_arguments([name, "all", "--sample", "--device", "cpu"])
    row, ((position, settings),) = args.settled, args.compared.items()
    args.work = text_of(row)
    training = Experiment(args, position, settings, None)
    words = [str(training.data), *training.train_flags, "--cpu"]
    parsed = options.parse_args_and_arch(options.get_training_parser(), words)
    cfg = convert_namespace_to_omegaconf(parsed)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    trainer = Trainer(cfg, task, model, task.build_criterion(cfg.criterion))
    batches = trainer.get_train_iterator(epoch=1).next_epoch_itr(shuffle=False)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.train_step([next(batches)])
    assert trainer.get_num_updates() == 1
    changed = [not torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)]
    assert sum(changed) > len(changed) / 2
    decoding = [words[0], "--path", "x", *training.decode_flags, "--cpu"]
    options.parse_args_and_arch(options.get_generation_parser(), decoding)
    averaging = ["--inputs", "x", "--output", "y", *map(str, training.average_flags)]
    average.make_parser().parse_args(averaging)
    check_flags(train_flags(RECIPES[name], settings, 1))
    assert row.train.startswith(RECIPES[name].train)
    source = training.lines("train", row.languages[0])
    test = training.lines("test", "reference")
    if row.join > 1:
        assert source[0].split().count("<sep>") == row.join - 1
        assert sum(line.count("<sep>") for line in test) == 12 - len(test)
    if row.max_subwords:
        assert max(len(line.split()) for line in source) <= row.max_subwords


OTHER = {"languages": ("en", "fr"), "segmentation": "sentencepiece", "clean": (2, 9)}
OTHER |= {"max_subwords": 99}


@pytest.mark.parametrize("name", [option.name for option in fields(Text)])
def test_steps_with_another_option_are_not_reused(text_of, name):
    row = sampled(RECIPES["wmt14_en_de"])
    work = text_of(row)
    before = {path: path.stat().st_mtime_ns for path in work.rglob("*")}
    value = getattr(row, name)
    other = OTHER[name] if name in OTHER else not value if isinstance(value, bool) else value + 1
    with pytest.raises(CommandError, match=rf"made with other settings .*{name} .*--work"):
        prepare_again(replace(row, **{name: other}), work)
    assert before == {path: path.stat().st_mtime_ns for path in work.rglob("*")}


BAD_INPUTS = [
    ("wmt99 all", "RECIPE.*wmt99.*iwslt14_de_en"),
    ("iwslt14_de_en all", "--train.*--sample"),
    ("iwslt14_de_en all --train gone gone", "--train gone.*no such file"),
    ("iwslt14_de_en all --train a a", "--train.*hold out.*give --test"),
    ("iwslt14_de_en train", "--work.*run the stage prepare"),
    ("multi30k_study validate", "run the stages train and select first"),
    ("iwslt14_de_en swap", "swap.*wmt16_en_de_interpolate"),
    ("iwslt14_de_en train --seeds 1 2 --name x", "--name x.*a single training"),
    ("wmt14_en_de train --first-epoch 900", "--first-epoch 900.*at most 150"),
    ("wmt14_en_de train --max-epoch 20", "--first-epoch 50.*at most 20"),
    ("multi30k_study prepare train --train b b --max-updates 3", "unrec.*: --max-updates 3; cor"),
]


@pytest.mark.parametrize(("words", "message"), BAD_INPUTS)
def test_bad_input_names_option_value_and_remedy(tmp_path, monkeypatch, capsys, words, message):
    """Before any text is prepared."""
    for name, count in (("a", 2), ("b", 100)):
        (tmp_path / name).write_text("a b\n" * count)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((CommandError, SystemExit)) as error:
        main([*words.split(), "--device", "cpu"])
    assert re.search(message, f"{error.value} {capsys.readouterr().err}", re.DOTALL)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_a_training_that_left_no_checkpoint_begins_anew_with_other_settings(tmp_path, monkeypatch):
    def fail(*args, log, **more):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("a line\n", "utf-8")
        raise CommandError("stopped")

    def start(**settings):
        with pytest.raises(CommandError) as error:
            runs.train(tmp_path, tmp_path / "run", [], settings, threads=1, title="a training")
        return str(error.value)

    monkeypatch.setattr(runs.steps, "run_module", fail)
    assert start(rate=1) == start(rate=2) == "stopped"
    assert recorded(tmp_path / "run")["rate"] == 2
    (tmp_path / "run/checkpoint_last.pt").touch()
    assert start(rate=2) == "stopped"
    assert "made with other settings (rate 2, now 3)" in start(rate=3)


def test_progress_follows_the_number_of_updates_given_last():
    flags = train_flags(RECIPES["multi30k_small"], {"type": "cape"}, 1)
    assert last_update(flags) == 1200
    assert last_update([*flags, "--max-update", 30]) == 30
    assert last_update([*flags, "--max-update=30", "--lr", "1e-3"]) == 30
    assert last_update([*flags, "--max-update", "0"]) is None  # fairseq's word for no limit
