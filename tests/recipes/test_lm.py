"""The recipe of language models: its tasks and tables by hand, and its command lines, tiny."""

import gzip
import json
import shutil

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from cape_plugins.settings.registry import ROTARY, types_of
from recipes.lab.hf_switching import with_adapters
from recipes.lab.steps import CommandError
from recipes.lm import data
from recipes.lm import finetune_hf as lm
from tests.support.hf import FAMILIES, OF_FAMILY
from tests.support.tables import read_csv, read_scores

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2}
QUICK = ("--max_steps", 4, "--save_steps", 2, "--limit", 4, "--model-config", json.dumps(TINY))
TOKENIZER = transformers.ByT5Tokenizer(extra_ids=0)


def right_answer(name, question):
    """The answer, computed from the question alone."""
    asked = question.removeprefix(">").removesuffix("=")
    if name == "addition":
        first, second = (int(digits[::-1], 2) for digits in asked.split("+"))
        return f"{first + second:0{len(asked) // 2 + 1}b}"[::-1]
    return {"copy": asked, "reverse": asked[::-1]}[name]


@pytest.mark.parametrize("name", [name for name, task in data.TASKS.items() if task.make])
def test_answers_are_right_at_each_length(name):
    task = data.TASKS[name]
    for length in (1, 2, 7, 30):
        work = [*data.exercises(task, [length], 20, "test")]
        assert all(exercise.answer == right_answer(name, exercise.question) for exercise in work)
        assert {len(exercise.answer) - length for exercise in work} == {int(name == "addition")}
    assert work == [*data.exercises(task, [length], 20, "test")]
    assert work != [*data.exercises(task, [length], 20, "train")]


def test_only_answers_and_their_ends_are_predicted():
    (sample,) = data.encode([data.Exercise(">ab=", "ba")], TOKENIZER)
    assert TOKENIZER.decode(sample["input_ids"]) == ">ab=ba</s>"
    assert sample["labels"][:4] == [data.IGNORED] * 4
    assert sample["labels"][4:] == sample["input_ids"][4:]


def make_model(settings, **more):
    args = lm.read_options(["--model-config", json.dumps({**TINY, **more})])[0]
    torch.manual_seed(0)
    return lm.build_model(args, settings, TOKENIZER).eval()


def test_losses_equal_the_model():
    """Token by token, one text at a time."""
    model = make_model({"type": "rope"})
    tokens = TOKENIZER("to be or not to be", add_special_tokens=False)["input_ids"]
    stretches = data.blocks(tokens, 6, "test")
    assert list(map(len, stretches)) == [6, 6, 6]
    losses = lm.losses(model, stretches, 2)
    for ids, row in zip(stretches, losses, strict=True):
        for position in range(1, 6):
            logits = model(torch.tensor([ids[:position]])).logits[0, -1]
            expected = -logits.log_softmax(-1)[ids[position]]
            assert row[position - 1].item() == pytest.approx(expected.item(), abs=1e-5)


def test_right_answers_are_what_generation_writes():
    """After a short training on single letters: right at some of them, wrong at longer ones."""
    model = make_model({"type": "cape"}, hidden_size=32)
    collate = transformers.DataCollatorForSeq2Seq(TOKENIZER)
    work = [*data.exercises(data.TASKS["copy"], [1], 20, "test")]
    batch = collate(data.encode(work, TOKENIZER))
    work += data.exercises(data.TASKS["copy"], [4], 5, "test")
    optimizer = torch.optim.Adam(model.train().parameters(), 1e-2)
    losses = []
    for _ in range(40):
        losses.append(model(**batch).loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    scores = lm.right_answers(model.eval(), collate, data.encode(work, TOKENIZER), 7)
    generated = []
    for exercise in work:
        inputs = TOKENIZER(exercise.question, add_special_tokens=False, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0]
        written = out[inputs["input_ids"].shape[1] :].tolist()
        asked = data.encode([exercise], TOKENIZER)[0]["labels"]
        generated.append(written == [token for token in asked if token != data.IGNORED])
    assert [bool(whole) for whole, _ in scores] == generated
    assert {True, False} == {*generated}
    assert all(0 <= share <= 1 and (share == 1) == whole for whole, share in scores)


def test_files_of_text_are_read(tmp_path):
    (tmp_path / "a").write_text("one ")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"two"))
    (tmp_path / "c").write_text("three")
    train, test = [tmp_path / "a", tmp_path / "b.gz"], [tmp_path / "c"]
    assert data.read_texts({"train": train, "test": test}) == {"train": "one two", "test": "three"}


def test_drawn_positions_reach_as_far_as_the_test():
    for name in types_of(ROTARY):
        args = lm.read_options(["--compare", name])[0]
        sampled = bool(types_of(ROTARY)[name].sampling)
        assert ("max_position" in lm.models(args, 27)[name]) == sampled
    args = lm.read_options(["--compare", "rope:draw_positions=subset"])[0]
    (drawn,) = lm.models(args, 27).values()
    assert drawn == {"type": "rope", "draw_positions": "subset", "max_position": 27}


OF_THIS_FILE = ["--task", "text", "--train-file", __file__, "--train-length", "90000"]
BAD = [
    (["--task", "sorting"], "--task"),
    (["--compare", "sinpos"], "--compare sinpos is unknown; allowed: "),
    (["--train-file", "a.txt"], "--train-file has no effect on --task copy"),
    (["--task", "text", "--validation-file", "a.txt"], "--validation-file needs --train-file"),
    (["--task", "text", "--train-file", "gone.txt"], "gone.txt: No such file"),
    (["--task", "text", "--test-lengths", "1", "4"], "length 1 has no token to predict"),
    (OF_THIS_FILE, "the validation text has"),
    (["--train-length", "64", "--test-lengths", "32"], "shorter than --train-length 64"),
    (["--position-max-global-shift", "5"], "--position-max-global-shift"),
    ([*map(str, QUICK), "--lora", "2"], "--lora 2: adapts a trained model; give the model by"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=lambda value: str(value)[-40:])
def test_bad_input_is_refused(words, message, tmp_path, capsys):
    with pytest.raises((CommandError, SystemExit)) as refused:
        lm.main([*words, "--output", str(tmp_path)])
    said = str(refused.value) + capsys.readouterr().err
    assert message in said
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_exercises_from_the_command_line(run_cli, repo_root, tmp_path):
    command = ("python", repo_root / "recipes/lm/finetune_hf.py", "--output", "out", *QUICK)
    command += ("--task", "reverse", "--seeds", 1, 2, "--test-lengths", 2, 12)
    output = run_cli(*command, "--compare", "rfs", cwd=tmp_path).stdout
    assert {*lm.COMPARED} == {*types_of(ROTARY)}
    assert list(read_scores(tmp_path / "out", "token_accuracy")["rfs"]) == ["2", "12"]
    assert "mean ± sample standard deviation of 2 seeds" in output
    assert Image.open(tmp_path / "out/scores.png").size[0] > 800  # two panels
    settings = json.loads((tmp_path / "out/rfs-seed2/config.json").read_text())
    assert settings["position_embedding"]["max_position"] == 27  # >abcdefghijkl= 12 letters, end


def test_no_model_is_taken_for_other_training_text(tmp_path):
    """Without --validation-file the test is the end of the training text, which a model that was
    trained with --validation-file has read; and a file may have changed."""
    train, valid = (tmp_path / name for name in ("train.txt", "valid.txt"))
    train.write_text("all work and no play\n" * 40)
    valid.write_text("makes Jack a dull boy\n" * 20)
    words = [*QUICK, "--task", "text", "--train-file", train, "--train-length", 8, "--test-lengths"]
    words += [8, "--position-embedding", "nopos", "--output", tmp_path / "out"]
    words = list(map(str, words))
    lm.main([*words, "--validation-file", str(valid)])
    weights = (tmp_path / "out/nopos/model.safetensors").stat().st_mtime_ns
    with pytest.raises(CommandError, match=r"training_data '.*', now .*; give another --output"):
        lm.main(words)
    record = tmp_path / "out/nopos/settings.json"
    settings = record.read_text()
    valid.write_text("other text " * 20)
    lm.main([*words, "--validation-file", str(valid)])  # the model has not seen that text
    assert record.read_text() == settings
    assert (tmp_path / "out/nopos/model.safetensors").stat().st_mtime_ns == weights
    train.write_text(train.read_text().replace("play", "game", 1))
    with pytest.raises(CommandError, match="training_data"):
        lm.main([*words, "--validation-file", str(valid)])


@pytest.mark.slow
def test_own_text_from_a_checkpoint(tmp_path):
    """Trained from scratch, then finetuned with another type, from where the first ended."""
    (tmp_path / "my text.txt").write_text("all work and no play\n" * 400)
    common = ["--task", "text", "--train-file", str(tmp_path / "my text.txt"), "--limit", "4"]
    common += ["--train-length", "16", "--test-lengths", "16", "64", "--warmup_steps", "1"]
    first_words = ["--output", str(tmp_path / "first"), "--position-embedding", "nopos"]
    first_words += ["--max_steps", "60", "--model-config", json.dumps(TINY)]
    lm.main([*common, *first_words])
    first = read_scores(tmp_path / "first", "loss")["nopos"]
    assert list(first) == ["0-15", "16-63"]
    assert first["0-15"] < 5.5 - 2  # chance is log(259)
    again = ["--model", str(tmp_path / "first/nopos"), "--output", str(tmp_path / "second")]
    lm.main([*common, *again, "--max_steps", "4", "--compare", "cape"])
    second = read_scores(tmp_path / "second", "loss")
    assert second["cape"]["0-15"] < first["0-15"] + 0.5
    assert [row["position"] for row in read_csv(tmp_path / "second/scores.csv")] == [*first]


def test_adapters_beside_a_new_type_train_all_of_its_weights():
    """Stock Marian adds sinusoids: no weight of positions is in its checkpoint."""
    pytest.importorskip("peft")
    family, settings = FAMILIES["marian"], OF_FAMILY["marian"]
    stock = dict(family.build(settings["sinpos"]).named_parameters())
    with_weights = set()
    for name in settings:
        model = family.build(settings[name])
        new = {key for key, _ in model.named_parameters()} - {*stock}
        trained = {
            key.removeprefix("base_model.model.").replace("modules_to_save.default.", "")
            for key, weight in with_adapters(model, 2).named_parameters()
            if weight.requires_grad
        }
        assert new <= trained, name
        with_weights |= {name} if new else set()
    assert {"abspos", "relpos", "fire"} <= with_weights


def test_adapters_go_on_after_an_interruption_and_are_merged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # four updates need few exercises, and most of the time goes into their tokens
    monkeypatch.setitem(lm.TASKS, "copy", lm.TASKS["copy"]._replace(samples=100))
    common = [*map(str, QUICK[:-2]), "--test-lengths", "5", "--save_total_limit", "2"]
    lm.main([*common, *QUICK[-2:], "--compare", "rope", "--output", "first"])
    switching = [*common, "--model", "first/rope", "--lora", "2", "--switch-updates", "4"]
    switching += ["--compare", "cape:max_global_scale=2", "--output", "second"]
    lm.main(switching)
    (folder,) = (tmp_path / "second").glob("cape*")
    first, merged = (load_file(f"{path}/model.safetensors") for path in ("first/rope", folder))
    assert merged.keys() == first.keys()
    moved = {name for name in first if not torch.equal(first[name], merged[name])}
    assert moved == {name for name in first if "_proj" in name}
    for name in moved:
        assert torch.linalg.matrix_rank(merged[name] - first[name], rtol=1e-3) <= 2

    for file in ("model.safetensors", "train_results.json"):  # as if the training had ended
        (folder / file).unlink()
    shutil.rmtree(folder / "checkpoint-4")
    lm.main(switching)
    again = load_file(folder / "model.safetensors")
    assert all(torch.equal(merged[name], again[name]) for name in merged)
