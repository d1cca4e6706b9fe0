"""``cape-plugins export stock`` of models trained in fairseq: what the programs of their READMEs
translate in a process in which this package cannot be imported is the same, token for token."""

import argparse
import contextlib
import io
import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import tasks
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch.nn.functional import cross_entropy

from cape_plugins.cli import main
from fairseq_user_dir.serving import stock_checkpoint
from fairseq_user_dir.serving.folding import folded
from tests.support.admin import scatter_omegas
from tests.support.engines import program_of
from tests.support.fairseq_models import (
    EOS,
    FIRST_WORD,
    PAD,
    arguments,
    pad,
)
from tests.support.fairseq_models import lines as interactive_lines
from tests.support.stock import run_without_package
from tests.support.translation_models import save_fairseq, write_corpus

LONGEST = 8  # tokens of a source in training
WORDS = range(FIRST_WORD, 12)
PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")
CAPE = ("--position-embedding", "cape", "--position-source-scale", "1.25")
NO_END, TIED = "--no-decoder-final-norm", "--share-decoder-input-output-embed"
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
        (
            *("--position-embedding", "sinpos", *PRE_NORM, "--layernorm-embedding"),
            *("--no-scale-embedding", "--activation-fn", "gelu", "--decoder-attention-heads", "4"),
        ),
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


def save_trained(corpus, path, *flags, updates=120):
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


def lines_of(data, count=20):
    """Segmented lines, half of them longer than those of training."""
    generator = random.Random(7)
    words = Dictionary.load(str(data / "dict.en.txt"))
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


def scores(checkpoint, source, text):
    """Of each token of a translation, the end included: logarithms of probabilities, float64."""
    (model,), _, task = load_model_ensemble_and_task([str(checkpoint)])
    inputs = task.source_dictionary.encode_line(source, add_if_not_exist=False).long()
    target = task.target_dictionary.encode_line(text, add_if_not_exist=False).long()
    before = torch.cat((torch.tensor([EOS]), target[:-1]))
    with torch.no_grad():
        logits, _ = model.eval()(inputs[None], torch.tensor([len(inputs)]), before[None])
    return logits[0].double().log_softmax(-1).gather(1, target[:, None])[:, 0]


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
    folder, lines = tmp_path_factory.mktemp("exported"), lines_of(corpus / "binary")
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
    # a text that just fits, and one token more
    longest, longer = (" ".join(lines[0].split()[:1] * count) for count in (TABLE - 2, TABLE - 1))
    ends = results["cape"].outs.values()
    programs += [(out, program_of(out), line) for out in ends for line in (longest, longer)]
    language_model = save_language_model(corpus, folder / "lm", lines)
    out = language_model.out
    programs.append((out, program_of(out), "\n".join(lines)))
    printed = iter(run_without_package(programs, folder))
    for result in results.values():
        result.printed = {host: next(printed).splitlines() for host in result.outs}
    results["past the table"] = [next(printed) for _ in range(4)]
    language_model.printed = next(printed)
    return {**results, "lm": language_model}


def save_language_model(corpus, folder, lines):
    """A checkpoint, the logarithms of the probabilities of lines, and its export."""
    folder.mkdir()
    (folder / "dict.txt").write_bytes((corpus / "binary" / "dict.en.txt").read_bytes())
    args = arguments(
        *("--tokens-per-sample", TABLE, "--position-embedding", "cape"),
        arch="cape_transformer_lm",
        task="language_modeling",
    )
    args.data = str(folder)
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model).eval()
    path = folder / "checkpoint.pt"
    history = [{"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}]
    state = {"args": None, "cfg": cfg, "model": model.state_dict(), "optimizer_history": history}
    torch.save({**state, "extra_state": {"train_iterator": {"epoch": 1}}}, path)
    expected = []
    for line in lines:
        tokens = task.source_dictionary.encode_line(line, add_if_not_exist=False).long()
        before = torch.cat((torch.tensor([EOS]), tokens[:-1]))
        with torch.no_grad():
            logits = model(before[None])[0][0]
        expected.append(logits.log_softmax(-1).gather(1, tokens[:, None]).sum().item())
    out = export(path, folder / "out")
    return SimpleNamespace(checkpoint=path, expected=expected, out=out)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_stock_checkpoint_translates_the_same_without_this_package(name, exported):
    assert exported[name].printed["fairseq"] == exported[name].expected
    ended = [line for line in exported[name].expected if len(line.split()) < TABLE - 1]
    assert len(set(ended)) > 16


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, layout) in MODELS.items() if layout])
def test_hugging_face_folder_translates_the_same_without_this_package(name, exported, corpus):
    result = exported[name]
    config = (result.outs["hugging-face"] / "config.json").read_text()
    assert MODELS[name][1] in config
    generation = json.loads((result.outs["hugging-face"] / "generation_config.json").read_text())
    assert (generation["suppress_tokens"], generation["min_new_tokens"]) == ([PAD], 1)
    printed = result.printed["hugging-face"]
    triples = zip(lines_of(corpus / "binary"), result.expected, printed, strict=True)
    differing = [texts for texts in triples if texts[1] != texts[2]]
    # At the limit both hosts force an end. fairseq counts its score, transformers does not, so that
    # another text of the beam may win: seen in one model, whose training differs by processor.
    assert len(differing) <= 1
    for source, *texts in differing:
        assert [len(text.split()) for text in texts] == [TABLE - 1] * 2
        fairseq, transformers = (scores(result.checkpoint, source, text) for text in texts)
        assert fairseq.sum() > transformers.sum()
        assert fairseq[:-1].sum() < transformers[:-1].sum()


@pytest.mark.slow
def test_command_line_of_the_readme_translates_the_same(exported, tmp_path):
    result = exported["cape"]
    out = result.outs["fairseq"]
    (command,) = re.findall(r"fairseq-interactive .*", (out / "README.md").read_text("utf-8"))
    run = (
        "import sys; sys.modules.update(dict.fromkeys(['cape_plugins', 'fairseq_user_dir']));"
        "from fairseq_cli.interactive import cli_main; cli_main()"
    )
    lines = lines_of(out)[:6]
    done = subprocess.run(
        [sys.executable, "-I", "-c", run, *shlex.split(command)[1:], "--cpu"],
        input="\n".join(f"<s> {line}" for line in lines),
        capture_output=True,
        text=True,
        cwd=out,
    )
    assert done.returncode == 0, done.stderr
    got = [fields[0][1] for _, fields in sorted(interactive_lines(done.stdout, "H").items())]
    assert got == result.expected[:6]


@pytest.mark.slow
def test_ctranslate2_converts_it_with_its_own_command(exported, tmp_path):
    ctranslate2 = pytest.importorskip("ctranslate2")
    result, converted = exported["cape, ADMIN"], tmp_path / "converted"
    out = result.outs["fairseq"]
    command = ["ct2-fairseq-converter", "--model_path", out / "model.pt", "--data_dir", out]
    command[0] = Path(sys.executable).with_name(command[0])
    subprocess.run([*command, "--output_dir", converted], check=True, cwd=tmp_path)
    config = json.loads((converted / "config.json").read_text())
    assert config["add_source_bos"] is False  # as the README says
    (converted / "config.json").write_text(json.dumps({**config, "add_source_bos": True}))
    translator = ctranslate2.Translator(str(converted), intra_threads=1)
    lines = lines_of(out)
    got = translator.translate_batch([line.split() for line in lines], beam_size=5)
    ended = [number for number, line in enumerate(result.expected) if len(line.split()) < TABLE - 1]
    assert len(ended) > 16
    for number in ended:
        assert " ".join(got[number].hypotheses[0]) == result.expected[number]


@pytest.mark.slow
def test_language_model_scores_the_same_without_this_package(exported, tmp_path):
    result = exported["lm"]
    printed = list(map(float, result.printed.split()))
    assert printed == pytest.approx(result.expected, abs=1e-5)
    assert f"Positions: {TABLE}, " in (result.out / "README.md").read_text("utf-8")
    assert "language model" in refusal(result.checkpoint, tmp_path, "--to", "hugging-face")


@pytest.mark.slow
def test_text_past_the_table_is_an_error(exported):
    texts = exported["past the table"]
    assert ["IndexError" in text for text in texts] == [False, True, False, True]


@pytest.mark.slow
def test_the_command_writes_a_whole_folder(corpus, tmp_path, run_cli):
    save_fairseq(corpus, tmp_path / "checkpoint.pt", *CAPE)
    command = ("python", "-m", "cape_plugins", "export", "stock", "checkpoint.pt", "out")
    done = run_cli(*command, cwd=tmp_path)
    assert "model.pt: transformer of fairseq, logits on random tokens within " in done.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "model.pt", "dict.en.txt", "dict.de.txt"}


# ---- refusals, and what is folded ----------------------------------------------------------------


def refusal(source, folder, *options):
    out, errors = folder / "refused", io.StringIO()
    with pytest.raises(SystemExit, match="2"), contextlib.redirect_stderr(errors):
        export(source, out, *options)
    assert not out.exists()
    assert list(folder.glob(".refused*")) == []
    return errors.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "options", "told"),
    [
        (("--position-relative-context", "3"), (), "relative attention (context 3)"),
        ((), ("--image-size", 8, 8), "--image-size 8 8 is not allowed"),
        ((), ("--max-tokens", 7), "8 or more"),
        ((), ("--data", "nowhere"), "--data DIR"),
        (("--activation-fn", "linear"), ("--to", "hugging-face"), "activation function is linear"),
        (("--encoder-normalize-before",), ("--to", "hugging-face"), "norms in other places"),
        ((*PRE_NORM, NO_END), ("--to", "hugging-face"), "no norm behind its last layer"),
        ((TIED,), ("--to", "hugging-face"), "source, target and output are not one"),
    ],
)
def test_refusals(flags, options, told, corpus, tmp_path):
    path = save_fairseq(corpus, tmp_path / "checkpoint.pt", *CAPE, *flags, shared=TIED not in flags)
    error = refusal(path, tmp_path, *options)
    assert error.startswith("error: ")
    assert told in error


def test_a_stock_checkpoint_is_refused(corpus, tmp_path):
    path = save_fairseq(corpus, tmp_path / "checkpoint.pt", "--arch", "transformer")
    assert "is a stock TransformerModel already" in refusal(path, tmp_path)


def test_separate_dictionaries_are_no_hugging_face_folder(corpus, tmp_path):
    shutil.copytree(corpus / "binary", tmp_path / "binary")
    with open(tmp_path / "binary" / "dict.de.txt", "a", encoding="utf-8") as file:
        file.write("another 1\n")
    path = save_fairseq(tmp_path, tmp_path / "checkpoint.pt", *CAPE, shared=False)
    told = "no stock class for two dictionaries"
    assert told in refusal(path, tmp_path, "--to", "hugging-face")
    export(path, tmp_path / "out", "--max-tokens", 8)  # of fairseq there is one


def test_a_stock_model_that_computes_otherwise_is_not_written(corpus, tmp_path, monkeypatch):
    def wrong(model, *rows):
        copied = folded(model, *rows)
        with torch.no_grad():
            copied.decoder.embed_positions.weight[4] += 1.0
        return copied

    monkeypatch.setattr(stock_checkpoint, "folded", wrong)
    path = save_fairseq(corpus, tmp_path / "checkpoint.pt", *CAPE)
    assert "gives other logits than the model" in refusal(path, tmp_path)


def test_the_file_holds_only_what_torch_loads_by_default(corpus, tmp_path):
    path = save_fairseq(corpus, tmp_path / "checkpoint.pt", *CAPE)
    state = torch.load(path, weights_only=True)
    state["cfg"] = OmegaConf.create(
        {**state["cfg"], "criterion": argparse.Namespace(_name="legacy")},
        flags={"allow_objects": True},
    )
    state["cfg"].checkpoint.save_dir = str(tmp_path / "run")
    torch.save(state, path)
    assert b"Namespace" in path.read_bytes()
    out = export(path, tmp_path / "out", "--max-tokens", 8)
    written = (out / "model.pt").read_bytes()
    assert not [name for name in (b"Namespace", b"omegaconf", b"position_") if name in written]
    assert str(tmp_path).encode() not in written
