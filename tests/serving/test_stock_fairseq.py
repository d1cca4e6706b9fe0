"""``cape-plugins export stock`` of models trained in fairseq: what the programs of their READMEs
translate in a process in which this package cannot be imported is the same, token for token."""

import argparse
import random
from types import SimpleNamespace

import pytest
import torch
from fairseq import tasks
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data import Dictionary
from torch.nn.functional import cross_entropy

from cape_plugins.cli import main
from tests.support.admin import scatter_omegas
from tests.support.fairseq_models import EOS, FIRST_WORD, PAD, pad
from tests.support.stock import program_of, run_without_package
from tests.support.translation_models import save_fairseq, write_corpus

LONGEST = 8  # tokens of a source in training
WORDS = range(FIRST_WORD, 12)
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


def train(model, updates):
    """Teaches it to write the source backwards."""
    generator = random.Random(1)
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    model.train()
    for _ in range(updates):
        rows = [generator.choices(WORDS, k=generator.randint(2, LONGEST - 1)) for _ in range(32)]
        source = pad([[*row, EOS] for row in rows], left=True)
        target = pad([[*row[::-1], EOS] for row in rows], left=False)
        before = pad([[EOS, *row[::-1]] for row in rows], left=False)
        optimizer.zero_grad()
        logits, _ = model(source, source.ne(PAD).sum(1), before)
        loss = cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)
        loss.backward()
        optimizer.step()


def save_trained(corpus, path, *flags, updates=150):
    save_fairseq(corpus, path, "--dropout", "0", *(flag for flag in flags if flag != ADMIN))
    state = torch.load(path, weights_only=True)
    if ADMIN in flags:  # without a profile, which needs training data
        state["cfg"].model.admin_init = state["cfg"].model.admin_profiled = True
    model = tasks.setup_task(state["cfg"].task).build_model(state["cfg"].model)
    if ADMIN in flags:
        scatter_omegas(model)
    train(model, updates)
    torch.save({**state, "model": model.state_dict()}, path)
    return path


def lines_of(corpus, count=20):
    """Segmented lines, half of them longer than those of training."""
    generator = random.Random(7)
    words = Dictionary.load(str(corpus / "binary" / "dict.en.txt"))
    lengths = [2 + number % (2 * LONGEST - 4) for number in range(count)]
    lines = [
        " ".join(words[index] for index in generator.choices(WORDS, k=length)) for length in lengths
    ]
    return [f"{line} nowhere" if number == 3 else line for number, line in enumerate(lines)]


def translations(checkpoint, lines):
    """By beam search of fairseq with this package."""
    (model,), _, task = load_model_ensemble_and_task([str(checkpoint)])
    limit = argparse.Namespace(beam=5, max_len_b=TABLE - 1)  # that of the stock model
    generator = task.build_generator([model.eval()], limit)
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
    ended = [line for line in exported[name].expected if len(line.split()) < TABLE - 1]
    assert len(set(ended)) > 16


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, layout) in MODELS.items() if layout])
def test_hugging_face_folder_translates_the_same_without_this_package(name, exported):
    result = exported[name]
    config = (result.outs["hugging-face"] / "config.json").read_text()
    assert MODELS[name][1] in config
    assert result.printed["hugging-face"] == result.expected
