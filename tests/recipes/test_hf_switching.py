"""A trained Hugging Face model that is switched: the rows of its table, their updates and rate."""

import argparse
import json

import pytest

pytest.importorskip("transformers")

from recipes.lab import hf_switching, hf_training
from recipes.lab.hf_switching import FirstTraining, first_training, plan_trainings
from recipes.lab.steps import CommandError

SINPOS, CAPE = {"type": "sinpos"}, {"type": "cape"}
COMPARED = {"sinpos": SINPOS, "cape": CAPE}


def write_state(folder, updates, *rates):
    folder.mkdir(exist_ok=True)
    history = [{"step": 1, "loss": 2.0}, *({"learning_rate": rate} for rate in rates)]
    state = {"global_step": updates, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "config.json").write_text('{"model_type": "marian"}')


def plan(model, *words, scratch=False, compared=COMPARED, first_name=None):
    args = argparse.Namespace(model=model, switch_updates=words, switch_scratch=scratch, lora=None)
    return plan_trainings(compared, args, first_name)


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
    expected = [(f"{n}, {k} updates", k, True) for n in COMPARED for k in (0, 250)]
    expected += [(f"{n} from scratch, 1250 updates", 1250, False) for n in COMPARED]
    assert [(row.name, row.updates, row.continues) for row in rows] == expected
    assert [row.name for row in plan(None)] == ["sinpos", "cape"]


def test_the_type_of_the_model_is_compared_unchanged_and_trained_on(tmp_path):
    """Not from scratch. A row with the settings of the model is not repeated."""
    write_state(tmp_path, 1000)
    rows = plan(str(tmp_path), "10%", scratch=True, compared={"cape": CAPE})
    assert [(row.name, row.settings, row.yardstick) for row in rows] == [
        ("sinpos, 0 updates", SINPOS, None),
        ("sinpos, 100 updates", SINPOS, None),
        ("cape, 100 updates", CAPE, "sinpos, 100 updates"),
        ("cape from scratch, 1100 updates", CAPE, None),
    ]
    stored = {"type": "cape", "max_global_shift": 7.0}
    config = {"model_type": "cape_marian", "position_embedding": stored}
    (tmp_path / "config.json").write_text(json.dumps(config))
    written = {"type": "cape", "max_global_shift": 7}
    for name, row, more in (("cape", CAPE, ["cape of the model"]), ("cape:seven", written, [])):
        rows = plan(str(tmp_path), "0", compared={name: row, "sinpos": SINPOS})
        names = [row.name.removesuffix(", 0 updates") for row in rows]
        assert names == [*more, name, "sinpos"]


def test_a_model_that_the_program_names_gets_no_second_row(tmp_path):
    write_state(tmp_path, 1000)
    rows = plan(str(tmp_path), "5", compared={"sinpos": SINPOS, "padded": {}}, first_name="padded")
    assert [(row.name, row.yardstick) for row in rows] == [
        ("sinpos, 5 updates", "padded, 5 updates"),
        ("padded, 0 updates", None),
        ("padded, 5 updates", None),
    ]


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
        expected = {"max_steps": 500, "warmup_steps": 125} if args.switch_updates else {}
        last = plan_trainings(COMPARED, args)[-1]
        assert hf_switching.changed_arguments(last, training) == expected
    assert rates == [2e-3, 3e-4, 5e-5]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "cape: trained for 3 epochs at the Trainer's default rate of 5e-05"),
        (("--max_steps", "7"), "cape: trained for 7 updates at the Trainer's default rate"),
        (("--learning_rate", "5e-5"), ""),
        (("--learning_rate=1e-3",), ""),
        (("--switch-updates", "10"), ""),
    ],
)
def test_a_switch_at_a_rate_that_nobody_chose_is_warned_of(words, said, tmp_path, capsys):
    """Even a first training at the default rate is a choice."""
    write_state(tmp_path, 1000, 5e-5)
    words = ["--model", str(tmp_path), "--output", str(tmp_path / "out"), *words]
    args, training = hf_training.parse(hf_training.make_parser("", "text", (), "out"), (), words)
    hf_switching.warn_of_default_rate(COMPARED, args, training)
    out = capsys.readouterr().out
    assert said in out
    assert bool(out) == bool(said)
    for name in ("--learning_rate", "--switch-updates", "has sinpos") if said else ():
        assert name in out
    hf_switching.warn_of_default_rate({"sinpos": SINPOS}, args, training)  # no switch
    training.learning_rate = 1e-4  # as a recipe sets it
    hf_switching.warn_of_default_rate(COMPARED, args, training)
    assert capsys.readouterr().out == ""
