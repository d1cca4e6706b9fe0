"""A trained Hugging Face model that is switched: the rows of its table, their updates and rate."""

import argparse
import json

import pytest

pytest.importorskip("transformers")

from recipes.lab import hf_training
from recipes.lab.hf_switching import (
    FirstTraining,
    changed_arguments,
    first_training,
    plan_trainings,
)
from recipes.lab.steps import CommandError

COMPARED = {"sinpos": {"type": "sinpos"}, "cape": {"type": "cape"}}


def write_state(folder, updates, *rates):
    folder.mkdir(parents=True, exist_ok=True)
    history = [{"step": 1, "loss": 2.0}, *({"learning_rate": rate} for rate in rates)]
    state = {"global_step": updates, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state))


def plan(model, *words, scratch=False):
    args = argparse.Namespace(model=model, switch_updates=words, switch_scratch=scratch, lora=None)
    return plan_trainings(COMPARED, args)


def test_first_training_is_read_beside_the_model_or_its_last_checkpoint(tmp_path):
    assert first_training(str(tmp_path)) is None
    write_state(tmp_path / "checkpoint-90", 90, 1e-3)
    write_state(tmp_path / "checkpoint-100", 100)
    assert first_training(str(tmp_path)) == FirstTraining(100, None)
    write_state(tmp_path, 110, 1e-3, 2e-3, 1e-4)
    assert first_training(str(tmp_path)) == FirstTraining(110, 2e-3)


def test_rows_are_types_by_updates_and_types_from_scratch(tmp_path):
    write_state(tmp_path, 1000)
    rows = plan(str(tmp_path), "0", "25%", scratch=True)
    assert [(row.name, row.updates, row.continues) for row in rows] == [
        ("sinpos, 0 updates", 0, True),
        ("sinpos, 250 updates", 250, True),
        ("cape, 0 updates", 0, True),
        ("cape, 250 updates", 250, True),
        ("sinpos from scratch, 1250 updates", 1250, False),
        ("cape from scratch, 1250 updates", 1250, False),
    ]
    assert [row.name for row in plan(None)] == ["sinpos", "cape"]


def test_what_is_not_known_is_refused(tmp_path):
    for words, scratch in ((["10%"], False), (["10"], True)):
        with pytest.raises(CommandError, match=r"has no trainer_state.json.*give whole numbers"):
            plan(str(tmp_path), *words, scratch=scratch)
    with pytest.raises(CommandError, match="--switch-updates 5: switches a trained model"):
        plan(None, "5")
    with pytest.raises(CommandError, match="--switch-updates -5 is not allowed"):
        plan(str(tmp_path), "-5")
    with pytest.raises(CommandError, match="--switch-scratch belongs to --switch-updates"):
        plan(str(tmp_path), scratch=True)


def test_rate_follows_the_first_training_unless_one_is_given(tmp_path):
    write_state(tmp_path, 1000, 1e-3, 2e-3)
    switching = ["--model", str(tmp_path), "--switch-updates", "50%", "--warmup_steps", "400"]
    rates = []
    for more in (switching, [*switching, "--learning_rate", "3e-4"], ["--model", str(tmp_path)]):
        words = [*more, "--output", str(tmp_path / "out")]
        parser = hf_training.make_parser("", "image", (), "out")
        args, training = hf_training.parse(parser, (), words)
        rates.append(training.learning_rate)
        for row in plan_trainings(COMPARED, args):
            expected = {"max_steps": 500, "warmup_steps": 125} if args.switch_updates else {}
            assert changed_arguments(row, training) == expected
    assert rates == [2e-3, 3e-4, 5e-5]
