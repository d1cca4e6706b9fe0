"""Proves that a checkpoint stores all position settings; that a training continues only with them
and its dictionary; that fine-tuning may switch the positions; that damaged files are named."""

import argparse
import shutil

import pytest
import torch
from fairseq import checkpoint_utils

from cape_plugins import TYPES
from cape_plugins.checkpoints.fairseq_files import fairseq_config
from cape_plugins.settings import registry
from cape_plugins.settings.config import option_fields
from fairseq_user_dir.average import average_checkpoints
from fairseq_user_dir.checkpoints import _switched_positions
from fairseq_user_dir.host.errors import SettingsError
from fairseq_user_dir.host.reading import read_checkpoint
from fairseq_user_dir.serving.source_checkpoint import load_trained
from tests.fairseq.conftest import UPDATES
from tests.fairseq.test_average import checkpoint
from tests.support.fairseq_models import (
    STOCK,
    build,
    lm_words,
    load,
    loss_of,
    parameters,
    run_here,
    train_words,
)
from tests.support.fairseq_speech import durations, write_manifest

SPEECH = ["--task", "cape_asr", "--conv-channels", 16, "--max-tokens", 4000]
NAMES = ["position_embedding", *(f"position_{o.name}" for o in option_fields("text"))]


def settings(checkpoint):
    """The position settings that the checkpoint stores."""
    model = torch.load(checkpoint, weights_only=True)["cfg"]["model"]
    stored = vars(model) if isinstance(model, argparse.Namespace) else model
    return {name: stored[name] for name in NAMES}


def updates(checkpoint):
    return torch.load(checkpoint, weights_only=True)["optimizer_history"][-1]["num_updates"]


@pytest.fixture
def begun(trained, tmp_path):
    """Function ``begun(NAME)``: the folder of a training that has made UPDATES updates."""

    def folder(name):
        (tmp_path / name).mkdir()
        return shutil.copy(trained(name), tmp_path / name / "checkpoint_last.pt").parent

    return folder


@pytest.fixture(scope="module")
def reordered(corpus, tmp_path_factory):
    """The data, with as many words in another order in the dictionaries."""
    folder = shutil.copytree(corpus.binary, tmp_path_factory.mktemp("data") / "reordered")
    for file in folder.glob("dict.*"):
        lines = file.read_text().splitlines()
        file.write_text("\n".join(lines[::-1]) + "\n")
    return folder


@pytest.mark.slow
def test_new_defaults_do_not_change_a_trained_model(trained, corpus, monkeypatch):
    before = load(trained("cape"), corpus.binary)[0].decoder.position_config
    row = registry.TYPES["cape"]
    other = {"max_local_shift": 0.25, "max_global_shift": 9.0}
    changed = registry.PositionType(row.encoding, {**row.options, **other}, "", {})
    monkeypatch.setitem(registry.TYPES, "cape", changed)
    assert load(trained("cape"), corpus.binary)[0].decoder.position_config == before


@pytest.mark.slow
def test_another_type_begins_with_its_own_defaults(trained, test_data):
    def config(**overrides):
        overrides["data"] = str(test_data)
        (model,), _ = checkpoint_utils.load_model_ensemble([str(trained("cape"))], overrides)
        assert (model.encoder.position_module is None) == (model.position_config.type == "nopos")
        return model.position_config

    other = config(position_embedding="sinpos")
    assert (other.type, other.random) == ("sinpos", False)
    same = config(position_max_global_shift=7)
    assert (same.max_global_shift, same.source_bos) == (7.0, True)
    assert config(position_embedding="nopos").type == "nopos"


@pytest.mark.slow
def test_resuming_stops_for_other_models(begun, corpus, trained, tmp_path):
    """Language models; other data, on which alpha is another; relative tables; stock models."""
    lm = ["--position-max-global-shift", 7, "--restore-file", trained("lm")]
    with pytest.raises(SettingsError, match=r"--position-max-global-shift 5.0 \(now 7.0\)"):
        run_here(*lm_words(corpus.lm, tmp_path / "lm", *lm))

    folder, data = begun("cape"), shutil.copytree(corpus.binary, tmp_path / "data")
    for file in data.glob("valid.*"):
        shutil.copy(file, data / file.name.replace("valid", "train1"))
    with pytest.raises(SettingsError, match=r"--position-source-scale 2710/2326 \(now ") as stopped:
        run_here(*train_words(data, folder, updates=UPDATES + 2))
    for told in (f"{folder / 'checkpoint_last.pt'}", "--allow-changed-settings"):
        assert told in str(stopped.value)
    assert updates(folder / "checkpoint_last.pt") == UPDATES

    words = ["--position-embedding", "relpos", "--position-relative-context", 3]
    with pytest.raises(SettingsError, match=r"--position-relative-context 150 \(now 3\)"):
        run_here(*train_words(corpus.binary, begun("relpos"), *words, updates=UPDATES + 2))

    with pytest.raises(SettingsError, match=r"--position-embedding cape \(now sinpos\)"):
        run_here(*train_words(corpus.binary, folder, updates=UPDATES + 2, arch="transformer_tiny"))
    with pytest.raises(SettingsError, match=r"--position-embedding sinpos \(now cape\)"):
        run_here(*train_words(corpus.binary, begun("stock"), updates=UPDATES + 2))


@pytest.mark.slow
def test_resuming_goes_on_where_nothing_or_someone_insists(begun, corpus, tmp_path):
    same = ["--position-embedding", "sinpos"]  # what the stock model computes
    run_here(*train_words(corpus.binary, folder := begun("stock"), *same, updates=UPDATES + 2))
    assert updates(folder / "checkpoint_last.pt") == UPDATES + 2

    folder, equal = begun("cape"), ["--position-source-scale", "1355/1163"]
    run_here(*train_words(corpus.binary, folder, *equal, updates=UPDATES + 1))
    change = ["--position-max-global-shift", 7, "--allow-changed-settings"]
    run_here(*train_words(corpus.binary, folder, *change, updates=UPDATES + 2))
    last = folder / "checkpoint_last.pt"
    assert updates(last) == UPDATES + 2
    assert settings(last)["position_max_global_shift"] == 7.0
    # a new start from its weights
    words = ["--position-max-global-shift", 9, "--restore-file", last, "--reset-optimizer"]
    words += ["--reset-dataloader", "--reset-meters", "--reset-lr-scheduler"]
    run_here(*train_words(corpus.binary, tmp_path / "new", *words, updates=2))
    assert settings(tmp_path / "new" / "checkpoint_last.pt")["position_max_global_shift"] == 9.0


@pytest.mark.slow
def test_new_relative_tables_start_anew(corpus, trained, tmp_path):
    words = ["--finetune-from-model", trained("stock"), "--lr", 0]
    words += ["--position-embedding", "relpos", "--position-relative-context", 4]
    run_here(*train_words(corpus.binary, tmp_path, *words, updates=1))
    start, result = parameters(trained("stock")), parameters(tmp_path / "checkpoint_last.pt")
    tables = {name for name in result if ".relative." in name}
    assert len(tables) == 4
    assert result.keys() - tables == start.keys()
    assert all(torch.equal(start[name], result[name]) for name in start)
    for name in tables:
        assert 0.05 < result[name].abs().max() <= 0.1  # as initialised
    # a resumed training is strict again
    state = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    del state["model"]["encoder.layers.1.self_attn.relative.keys"]
    torch.save(state, tmp_path / "checkpoint_last.pt")
    with pytest.raises(SettingsError, match="lacks .*layers.1.self_attn.relative.keys of this"):
        run_here(*train_words(corpus.binary, tmp_path, *words, updates=2))


@pytest.mark.slow
def test_learned_tables_give_way_to_the_biases_of_another_type(corpus, trained, tmp_path):
    words = ["--finetune-from-model", trained("abspos"), "--lr", 0, "--position-embedding", "fire"]
    run_here(*train_words(corpus.binary, tmp_path, *words, updates=1))
    start, result = parameters(trained("abspos")), parameters(tmp_path / "checkpoint_last.pt")
    assert {name.split(".")[1] for name in start.keys() - result.keys()} == {"embed_positions"}
    assert all(".layer_bias." in name for name in result.keys() - start.keys())
    assert all(torch.equal(start[name], result[name]) for name in start.keys() & result.keys())


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("trained_as", ["abspos", "relpos", "fire", "stock"])
def test_every_type_takes_the_weights_of_another(trained_as, name):
    """Also the weights of a stock model with learned positions. Only the loading; the test above
    trains."""
    stock = {"arch": "transformer_tiny", **STOCK["table"]}
    trained_model = build(**stock if trained_as == "stock" else {"position_embedding": trained_as})
    model = build(seed=2, position_embedding=name)
    with _switched_positions(model):
        model.load_state_dict(trained_model.state_dict())
    shared = trained_model.state_dict().keys() & model.state_dict().keys()
    assert "encoder.layers.0.self_attn.q_proj.weight" in shared
    assert all(torch.equal(trained_model.state_dict()[n], model.state_dict()[n]) for n in shared)
    assert torch.isfinite(loss_of(model, seed=1))


@pytest.mark.slow
def test_finetuning_refuses_what_does_not_fit(corpus, trained, tmp_path):
    words = ["--finetune-from-model", trained("relpos"), "--position-embedding", "relpos"]
    words += ["--position-relative-context", 4]
    shapes = r"relative.keys has shape \(1, 301, 16\) in the checkpoint, \(1, 9, 16\) here"
    with pytest.raises(SettingsError, match=shapes):
        run_here(*train_words(corpus.binary, tmp_path, *words))
    wider = ["--finetune-from-model", trained("stock"), "--encoder-ffn-embed-dim", 48]
    with pytest.raises(Exception, match="please ensure that the architectures match"):
        run_here(*train_words(corpus.binary, tmp_path, *wider))


@pytest.mark.slow
def test_another_order_of_the_dictionary_is_refused(begun, reordered, trained, tmp_path):
    message = "trained with other units than this source dictionary, or in another order"
    folder = begun("cape")
    with pytest.raises(SettingsError, match=message):
        run_here(*train_words(reordered, folder, updates=UPDATES + 2))
    start = ["--finetune-from-model", trained("cape")]
    with pytest.raises(SettingsError, match=message):
        run_here(*train_words(reordered, tmp_path / "new", *start, updates=2))
    with pytest.raises(SettingsError, match=f"{message}.*not {reordered}"):
        load(trained("cape"), reordered)
    # someone insists; a dictionary of another size is a matter of shapes
    run_here(*train_words(reordered, folder, "--allow-changed-settings", updates=UPDATES + 1))
    shutil.copytree(reordered, shorter := tmp_path / "shorter")
    for file in shorter.glob("dict.*"):
        file.write_text("\n".join(file.read_text().splitlines()[:-1]) + "\n")
    with pytest.raises(RuntimeError, match="size mismatch"):
        load(trained("cape"), shorter)


@pytest.mark.slow
def test_checkpoints_without_marks_load(trained, reordered, tmp_path):
    """Such as a stock model's."""
    state = torch.load(trained("cape"), weights_only=True)
    assert state.pop("task_state")["dictionaries"].keys() == {"source", "target"}
    torch.save({**state, "task_state": {}}, tmp_path / "stock.pt")
    model, task = load(tmp_path / "stock.pt", reordered)
    assert len(task.source_dictionary) == model.encoder.embed_tokens.num_embeddings


def test_a_stock_model_counts_as_the_type_that_it_computes(tmp_path):
    """Its training may have gone on as that type."""
    paths = [
        checkpoint(tmp_path / "a.pt", 1, lr=0.1),
        checkpoint(tmp_path / "b.pt", 2, lr=0.2, position_embedding="sinpos"),
        checkpoint(tmp_path / "c.pt", 3, lr=0.3, position_embedding="nopos"),
    ]
    average_checkpoints(paths[:2])
    with pytest.raises(ValueError, match="position_embedding: nopos and sinpos"):
        average_checkpoints(paths[1:])


def test_other_dictionaries_have_no_average(tmp_path):
    paths = [checkpoint(tmp_path / f"{number}.pt", seed=number) for number in range(4)]
    for path, digest in zip(paths, ("aa", "aa", "bb"), strict=False):
        state = torch.load(path, weights_only=True)
        state["task_state"] = {"dictionaries": {"source": [8, digest]}}
        torch.save(state, path)
    average_checkpoints([*paths[:2], paths[3]])
    with pytest.raises(ValueError, match="different dictionaries"):
        average_checkpoints(paths[1:3])


SOUND = {"model": {"a": torch.zeros(1000)}, "args": None}
DAMAGED = [
    (SOUND, lambda data: data[:-500], "it is cut off"),
    (SOUND, lambda data: data[: len(data) // 2], "it is cut off"),
    (SOUND, lambda data: b"", "it is cut off"),
    (SOUND, lambda data: b"hello, this is text", "not a file of torch"),
    ([1, 2], bytes, "the checkpoint has no entry 'model'"),
    ({"x": argparse.ArgumentParser}, bytes, "it holds argparse.ArgumentParser"),
]


@pytest.mark.parametrize(("state", "damage", "reason"), DAMAGED)
def test_damaged_checkpoint_is_named(state, damage, reason, tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save(state, path)
    path.write_bytes(damage(path.read_bytes()))
    message = rf"{path} cannot be read as .*\({reason}.*_best.pt\.$"
    for read in (read_checkpoint, checkpoint_utils.load_checkpoint_to_cpu):
        with pytest.raises(SettingsError, match=message) as error:
            read(str(path))
        assert "miniz" not in str(error.value)


def test_paths_without_a_file_are_named(tmp_path):
    for path, reason in (tmp_path / "gone.pt", "no such file"), (tmp_path, "is a folder"):
        with pytest.raises(SettingsError, match=f"{path}: {reason}; check the path"):
            read_checkpoint(path)


@pytest.mark.parametrize("section", ["model", "task"])
def test_a_checkpoint_of_another_user_directory_is_named(section, tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save({"cfg": {section: {"_name": "theirs"}}, "model": {}}, path)
    with pytest.raises(SettingsError, match="has the .* theirs, .*needs the --user-dir of its"):
        load_trained(path, None)


@pytest.mark.slow
def test_settings_of_both_sides_are_stored_and_compared(tmp_path):
    """The flags are not given again to decode; a resumed training has no others."""
    for split in ("train", "valid"):
        write_manifest(tmp_path, split, durations(8))
    words = train_words(tmp_path, tmp_path / "run", *SPEECH, arch="cape_s2t_transformer_xs")
    words += ["--position-decoder-embedding", "relpos"]
    context = ("--position-decoder-relative-context", 3)
    run_here(*words, *context, "--max-update", 1)
    path = tmp_path / "run/checkpoint_last.pt"
    assert None not in settings(path).values()
    with pytest.raises(SettingsError, match=r"--position-max-global-shift 30.0 \(now 7.0\)"):
        run_here(*words, *context, "--max-update", 2, "--position-max-global-shift", 7)
    with pytest.raises(SettingsError, match=r"--position-decoder-relative-context 3 \(now 150\)"):
        run_here(*words, "--max-update", 2)
    (model,), _ = checkpoint_utils.load_model_ensemble([str(path)])
    config = model.decoder.position_config
    assert (config.type, config.relative_context) == ("relpos", 3)
    stored = torch.load(path, weights_only=True)
    arguments = vars(stored["cfg"]["model"])
    assert None not in arguments["position_decoder"].values()
    assert fairseq_config(arguments, stored["model"], "decoder") == config
