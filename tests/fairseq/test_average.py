"""Averaging: the mean; entries that stay; checkpoints that are chosen or refused; no incomplete
file remains; an averaged model decodes."""

import argparse
import re
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
import torch

from fairseq_user_dir.average import average_checkpoints, main, save_atomically, select_checkpoints
from fairseq_user_dir.host.reading import read_checkpoint
from tests.support.fairseq_models import generate_words, lines, load, run_here, train_words


def parameters(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(7, 4, generator=generator).to(dtype)
    model = {
        "encoder.embed_tokens.weight": embedding,
        "decoder.output_projection.weight": embedding,
        "encoder.scale": torch.tensor(0.1 * seed, dtype=dtype),
        "encoder.version": torch.tensor([3.0]),
        "encoder.counts": torch.tensor([470049, 454234]),
        "encoder.norm.num_batches_tracked": torch.tensor(100 * seed),
        "encoder.mask": torch.tensor([True, False]),
    }
    return OrderedDict(model)


def checkpoint(path, seed, updates=None, model=None, **settings):
    """A file with the entries of fairseq's; `settings` go to cfg.model."""
    state = {
        "args": None,
        "cfg": {
            "model": argparse.Namespace(arch="transformer_tiny", **settings),
            "checkpoint": {"maximize_best_checkpoint_metric": False},
        },
        "model": parameters(seed) if model is None else model,
        "optimizer_history": [{"num_updates": seed if updates is None else updates}],
        "extra_state": {"val_loss": seed, "metrics": np.arange(4)},
        "last_optimizer_state": {"state": torch.zeros(1000)},
    }
    torch.save(state, path)
    return path


@pytest.fixture
def files(tmp_path):
    return [checkpoint(tmp_path / f"checkpoint{i}.pt", seed=i) for i in (1, 2, 3)]


def exact_mean(tensors):
    """Mean in rational numbers, rounded once."""
    columns = zip(*(tensor.double().flatten().tolist() for tensor in tensors), strict=True)
    means = [float(sum(map(Fraction, column)) / len(tensors)) for column in columns]
    return torch.tensor(means, dtype=torch.float64).to(tensors[0].dtype).view(tensors[0].shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_mean_is_exact(tmp_path, dtype):
    models = [parameters(seed, dtype) for seed in range(1, 8)]
    paths = [checkpoint(tmp_path / f"{i}.pt", 1, model=model) for i, model in enumerate(models)]
    result = average_checkpoints(paths)["model"]
    for key, value in result.items():
        if value.is_floating_point():
            expected = exact_mean([model[key] for model in models])
            assert value.dtype == expected.dtype
            tolerance = 1e-14 if dtype == torch.float64 else 0
            torch.testing.assert_close(value, expected, atol=0, rtol=tolerance)
    shuffled = average_checkpoints(paths[::-1])["model"]
    if dtype != torch.float64:
        assert all(torch.equal(result[key], shuffled[key]) for key in result if "num_b" not in key)
    assert not torch.equal(result["encoder.scale"], models[0]["encoder.scale"])


def test_other_entries_come_from_the_longest_training(tmp_path):
    lengths = enumerate((200, 300, 100), start=1)
    paths = [checkpoint(tmp_path / f"{i}.pt", seed=i, updates=updates) for i, updates in lengths]
    result = average_checkpoints(paths)
    assert result["optimizer_history"] == [{"num_updates": 300}]
    assert result["extra_state"]["val_loss"] == 2
    assert result["cfg"]["model"] == argparse.Namespace(arch="transformer_tiny")
    assert result["model"]["encoder.norm.num_batches_tracked"] == 200
    assert torch.equal(result["model"]["encoder.counts"], torch.tensor([470049, 454234]))
    assert "last_optimizer_state" not in result
    assert isinstance(result["model"], OrderedDict)
    assert list(result["model"]) == list(parameters(1))


def test_tied_tensors_stay_tied_in_the_file(files, tmp_path):
    save_atomically(average_checkpoints(files), tmp_path / "average.pt")
    model = read_checkpoint(tmp_path / "average.pt")["model"]
    embedding = model["encoder.embed_tokens.weight"]
    assert model["decoder.output_projection.weight"].data_ptr() == embedding.data_ptr()
    untied = parameters(4)
    untied["decoder.output_projection.weight"] = untied["encoder.embed_tokens.weight"] + 1
    files.insert(0, checkpoint(tmp_path / "untied.pt", seed=1, model=untied))
    model = average_checkpoints(files)["model"]
    difference = model["decoder.output_projection.weight"] - model["encoder.embed_tokens.weight"]
    torch.testing.assert_close(difference, torch.full((7, 4), 0.25))


def test_old_checkpoints_with_args_instead_of_cfg(tmp_path):
    paths = []
    for i in (1, 2):
        state = {"args": argparse.Namespace(position_embedding="x" * i), "model": parameters(i)}
        paths.append(tmp_path / f"{i}.pt")
        torch.save(state, paths[-1])
    assert average_checkpoints(paths[:1])["args"].position_embedding == "x"
    with pytest.raises(ValueError, match="position_embedding: xx and x"):
        average_checkpoints(paths)


def test_last_epochs_and_updates_are_chosen_by_number(tmp_path):
    names = [f"checkpoint{i}.pt" for i in (1, 2, 9, 10, 11)]
    names += [f"checkpoint_{i}_{i * 100}.pt" for i in (2, 9, 10)]
    for name in (*names, "checkpoint_last.pt", "checkpoint_best.pt", "checkpoint9-shard0.pt"):
        (tmp_path / name).touch()

    def chosen(*words):
        return [path.name for path in select_checkpoints(tmp_path, *words)]

    assert chosen("epoch", 2, None) == ["checkpoint10.pt", "checkpoint11.pt"]
    assert chosen("epoch", 3, 10) == ["checkpoint2.pt", "checkpoint9.pt", "checkpoint10.pt"]
    assert chosen("update", 2, None) == ["checkpoint_9_900.pt", "checkpoint_10_1000.pt"]
    assert chosen("update", 1, 999) == ["checkpoint_9_900.pt"]


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("scale", None, r"only one of them has encoder\.scale \(1 such.*one architecture"),
        ("version", torch.ones(2), r"encoder\.version of .* differ: \(2,\) .* and \(1,\)"),
        ("scale", torch.tensor(0.1).half(), r"encoder\.scale of .*16 and \(\) torch\.float32"),
        ("scale", torch.tensor(torch.nan), r"encoder\.scale holds NaN .*leave the file out"),
        ("counts", torch.tensor([470049, 1]), r"encoder\.counts of .* differ, .* same data"),
        ("mask", "text", r"encoder\.mask of .* no tensors"),
    ],
)
def test_models_that_have_no_mean_are_refused(files, tmp_path, entry, value, message):
    model = {**parameters(1), f"encoder.{entry}": value}
    if value is None:
        del model[f"encoder.{entry}"]
    odd = checkpoint(tmp_path / "odd.pt", seed=1, model=model)
    with pytest.raises(ValueError, match=message) as error:
        average_checkpoints([*files, odd])
    assert str(odd) in str(error.value)


def test_a_file_counts_once(files, tmp_path):
    (tmp_path / "link.pt").symlink_to(files[1])
    with pytest.raises(ValueError, match="given twice"):
        average_checkpoints([*files, tmp_path / "link.pt"])
    with pytest.raises(ValueError, match="no checkpoint given"):
        average_checkpoints([])


REFUSED = {
    "bound": (". --num-epoch-checkpoints 3 --checkpoint-upper-bound 2",
              r"has 2 such checkpoints up to --checkpoint-upper-bound 2 .*checkpoint3\.pt"),
    "bound alone": ("checkpoint1.pt --checkpoint-upper-bound 2", "bounds nothing here"),
    "folder alone": (".", r"is a folder; add --num-epoch-checkpoints"),
    "number of files": ("checkpoint1.pt --num-epoch-checkpoints 1", "is not one folder"),
    "missing": ("checkpoint1.pt checkpoint7.pt", r"checkpoint7\.pt: no such file"),
    "output is input": ("checkpoint1.pt --output checkpoint1.pt", "never overwritten"),
    "output in no folder": ("checkpoint1.pt --output no/avg.pt", "does not exist; create it"),
    "output is folder": ("checkpoint1.pt --output .", "is a folder; name a file"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_command_refuses_and_leaves_the_files_alone(
    files, tmp_path, monkeypatch, capsys, options, message
):
    monkeypatch.chdir(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    output = [] if "--output" in options else ["--output", "average.pt"]
    with pytest.raises(SystemExit) as stop:
        main(["--inputs", *options.split(), *output])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert re.search(message, error.split("error: ")[1]), error
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_command_writes_the_average_or_nothing(files, tmp_path, monkeypatch):
    """How a file is replaced is tested in tests/core/test_files.py."""
    monkeypatch.chdir(tmp_path)

    def fail(*_):
        raise RuntimeError("what torch says of a full disk")

    with monkeypatch.context() as full:
        full.setattr(torch, "save", fail)
        with pytest.raises(SystemExit, match="2"):
            main(["--inputs", *map(str, files), "--output", "average.pt"])
    assert sorted(tmp_path.iterdir()) == files
    main(["--inputs", ".", "--num-epoch-checkpoints", "2", "--output", "average.pt"])
    result = read_checkpoint("average.pt")["model"]
    torch.testing.assert_close(result["encoder.scale"], torch.tensor(0.25))
    assert sorted(tmp_path.iterdir()) == [tmp_path / "average.pt", *files]
    # once more, over the old result, which is no input
    main(["--inputs", *map(str, files), "--output", "average.pt"])
    result = read_checkpoint("average.pt")["model"]
    torch.testing.assert_close(result["encoder.scale"], torch.tensor(0.2))


@pytest.mark.slow
def test_averaged_checkpoint_decodes(run_cli, corpus, test_data, trained, tmp_path):
    run_here(*train_words(corpus.binary, tmp_path, "--save-interval-updates", 2, updates=4))
    average = tmp_path / "average.pt"
    run_cli(
        "python", "-m", "fairseq_user_dir.average", "--inputs", tmp_path,
        "--num-update-checkpoints", 2, "--output", average,
    )  # fmt: skip
    output = run_here(*generate_words(test_data, average))
    assert len(lines(output, "H")) == 24
    model, _ = load(average, test_data)
    assert model.position_config == load(trained("cape"), test_data)[0].position_config
