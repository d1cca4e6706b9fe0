"""``cape-plugins export stock`` of models trained in fairseq: stock checkpoints, run by the programs
of their READMEs in a process in which this package cannot be imported, give the same tokens."""

import argparse
import random
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from fairseq import tasks
from fairseq.checkpoint_utils import load_model_ensemble_and_task

from cape_plugins.cli import main
from fairseq_user_dir.serving import stock
from fairseq_user_dir.serving.folding import folded
from tests.support.admin import scatter_omegas
from tests.support.fairseq_models import batch, build, pad
from tests.support.stock import program_of, run_without_package
from tests.support.translation_models import save_fairseq, write_corpus

LONGEST = 9  # tokens of a source in training
PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")
CAPE = ("--position-embedding", "cape", "--position-source-scale", "1.25")
ADMIN = "admin"
TABLE = 40  # rows of the tables that are written, below the 1024 of the models
# flags, and whether it can become a folder of Hugging Face
MODELS = {
    "cape": (CAPE, "MarianMTModel"),
    "cape, pre-LN": ((*CAPE, *PRE_NORM), "BlenderbotForConditionalGeneration"),
    "shape, norm on embeddings": (
        ("--position-embedding", "shape", "--position-max-offset", "60", "--layernorm-embedding"),
        "BartForConditionalGeneration",
    ),
    "sinpos, both norms": (
        ("--position-embedding", "sinpos", *PRE_NORM, "--layernorm-embedding"),
        "MBartForConditionalGeneration",
    ),
    # 12 rows, and begun anew after the last
    "abspos": (
        (
            *("--position-embedding", "abspos"),
            *("--max-source-positions", "12", "--max-target-positions", "12"),
        ),
        "MarianMTModel",
    ),
    "nopos": (("--position-embedding", "nopos"), "MarianMTModel"),
    "cape, ADMIN": ((*CAPE, ADMIN), None),
}


def train(model, task, updates):
    """Teaches it to write the source backwards, and to stop."""
    symbols = range(task.source_dictionary.nspecial, len(task.source_dictionary))
    generator = random.Random(1)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    model.train()
    for _ in range(updates):
        rows = [
            generator.choices(symbols[:12], k=generator.randint(2, LONGEST - 1)) for _ in range(24)
        ]
        source = pad([[*row, 2] for row in rows], left=True)
        target = pad([[*row[::-1], 2] for row in rows], left=False)
        before = pad([[2, *row[::-1]] for row in rows], left=False)
        optimizer.zero_grad()
        logits, _ = model(source, source.ne(1).sum(1), before)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=1
        )
        loss.backward()
        optimizer.step()
    return loss.item()


def save_trained(corpus, path, *flags, updates=120):
    save_fairseq(corpus, path, *(flag for flag in flags if flag != ADMIN))
    state = torch.load(path, weights_only=True)
    arguments, weights = state["cfg"].model, state["model"]
    if ADMIN in flags:
        arguments.admin_init = arguments.admin_profiled = True
    task = tasks.setup_task(state["cfg"].task)
    model = task.build_model(state["cfg"].model)
    if ADMIN in flags:
        scatter_omegas(model)
    missing, _ = torch.nn.Module.load_state_dict(model, weights, strict=False)
    assert all(".admin." in name for name in missing)
    train(model, task, updates)
    torch.save({**state, "model": model.state_dict()}, path)
    return path


def lines_of(corpus, count=20):
    """Segmented lines, half of them longer than those of training."""
    generator = random.Random(7)
    words = [
        line.split()[0]
        for line in (corpus / "binary" / "dict.en.txt").read_text("utf-8").splitlines()
    ]
    lengths = [2 + number % (2 * LONGEST) for number in range(count)]
    lines = [" ".join(generator.choices(words[:12], k=length)) for length in lengths]
    return [f"{line} nowhere" if number == 3 else line for number, line in enumerate(lines)]


def translations(checkpoint, lines):
    """By beam search of fairseq with this package."""
    (model,), _, task = load_model_ensemble_and_task([str(checkpoint)])
    generator = task.build_generator([model.eval()], argparse.Namespace(beam=5))
    texts = []
    for line in lines:
        tokens = task.source_dictionary.encode_line(line, add_if_not_exist=False).long()
        lengths = torch.tensor([len(tokens)])
        sample = {"net_input": {"src_tokens": tokens[None], "src_lengths": lengths}}
        best = task.inference_step(generator, [model], sample)[0][0]
        texts.append(task.target_dictionary.string(best["tokens"]))
    return texts


def export(source, out, *options):
    main(["export", "stock", str(source), str(out), *map(str, options)])
    return out


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("stock") / "data")


@pytest.fixture(scope="module")
def exported(corpus, tmp_path_factory):
    """For each model: its checkpoint, its translations, and what both exports give without this
    package."""
    folder, lines = tmp_path_factory.mktemp("exported"), lines_of(corpus)
    results, programs = {}, []
    for number, (name, (flags, layout)) in enumerate(MODELS.items()):
        place = folder / str(number)
        checkpoint = save_trained(corpus, place / "checkpoint.pt", *flags)
        before = checkpoint.read_bytes()
        outs = {"fairseq": export(checkpoint, place / "fairseq", "--max-tokens", TABLE)}
        if layout:
            to = ("--to", "hugging-face", "--max-tokens", TABLE)
            outs["hugging-face"] = export(checkpoint, place / "hf", *to)
        assert checkpoint.read_bytes() == before
        results[name] = SimpleNamespace(
            checkpoint=checkpoint, outs=outs, expected=translations(checkpoint, lines)
        )
        programs += [(out, program_of(out), "\n".join(lines)) for out in outs.values()]
    printed = iter(run_without_package(programs, folder))
    for result in results.values():
        result.printed = {host: next(printed).splitlines() for host in result.outs}
    return results


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_stock_checkpoint_translates_the_same_without_this_package(name, exported):
    assert exported[name].printed["fairseq"] == exported[name].expected
    ended = [line for line in exported[name].expected if len(line.split()) < TABLE - 2]
    assert len(set(ended)) > 15


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, layout) in MODELS.items() if layout])
def test_hugging_face_folder_translates_the_same_without_this_package(name, exported):
    result = exported[name]
    config = (result.outs["hugging-face"] / "config.json").read_text()
    assert MODELS[name][1] in config
    assert result.printed["hugging-face"] == result.expected
