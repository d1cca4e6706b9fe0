"""Proves that models trained by ``fairseq-hydra-train``, or for tasks without one source and one
target language, have their settings in the checkpoint, and that other commands can use them; and
the commands of the README."""

import re
import shlex

import pytest
import torch

from fairseq_user_dir.host.errors import SettingsError
from tests.fairseq.conftest import UPDATES
from tests.support.command_lines import _warm_python, environment, kill
from tests.support.fairseq_models import (
    ROOT,
    TINY,
    TINY_FLAGS,
    USER_DIR,
    generate_words,
    holds,
    lines,
    load,
    parameters,
    run_here,
)
from tests.support.warm_python import FAIRSEQ

pytestmark = pytest.mark.slow


def hydra_words(arch, save_dir, *extra):
    """Called from an empty folder: hydra changes to a run folder there, so paths are absolute."""
    sizes = {k: v for k, v in TINY.items() if "decoder" in k or "lm" not in arch}
    return [
        "fairseq-hydra-train", f"+model._name={arch}",
        *(f"+model.{name}={value}" for name, value in sizes.items()),
        f"common.user_dir={USER_DIR}", "common.cpu=true", "common.no_progress_bar=true",
        f"checkpoint.save_dir={save_dir}", "checkpoint.no_epoch_checkpoints=true",
        "dataset.batch_size=16", "dataset.required_batch_size_multiple=1", "dataset.num_workers=0",
        "optimization.max_update=10", "optimization.lr=[0.005]", "optimizer=adam",
        "+optimizer.lr=[0.005]", "criterion=cross_entropy", *extra,
    ]  # fmt: skip


def hydra_train(words, cwd):
    """Status, stdout and stderr, in a fork of an interpreter that has imported fairseq."""
    python, words = _warm_python(FAIRSEQ, environment()), list(map(str, words))
    status, out, err, _ = python.run(words, cwd, environment(), None, 300.0, kill)
    return status, out, err


SEVEN = ["+model.position_embedding=cape", "+model.position_max_global_shift=7"]


def translation(data):
    return ["task=translation", f"task.data={data}", "task.source_lang=en", "task.target_lang=de"]


def test_translation_model_of_hydra_decodes(corpus, test_data, tmp_path):
    settings = [*SEVEN, "+model.position_relative_context=3", "common.bf16=true"]
    words = hydra_words("cape_transformer_tiny", tmp_path / "run", *settings)
    status, _, err = hydra_train([*words, *translation(corpus.binary)], tmp_path)
    assert status == 0, err
    checkpoint = tmp_path / "run" / "checkpoint_last.pt"
    state = torch.load(checkpoint, weights_only=True)
    assert state["optimizer_history"][-1]["num_updates"] == 10
    assert holds(state["model"]["decoder.layers.0.fc1.weight"], torch.bfloat16)
    output = run_here(*generate_words(test_data, checkpoint, "--beam", 3))
    model, _ = load(checkpoint, test_data)
    config = model.position_config
    assert (config.type, config.max_global_shift, config.relative_context) == ("cape", 7.0, 3)
    target, source = map(int, config.source_scale.split("/"))
    assert 1.0 < target / source < 1.3
    assert len(lines(output, "H")) == 24  # test_commands.py compares their scores


def test_language_model_of_hydra_by_radam_is_scored(corpus, tmp_path):
    settings = ["task=language_modeling", f"task.data={corpus.lm}", "task.tokens_per_sample=32"]
    words = hydra_words("cape_transformer_lm", tmp_path / "run", *settings, *SEVEN)
    words = ["+optimizer._name=radam" if word == "optimizer=adam" else word for word in words]
    status, _, err = hydra_train([*words, "+optimizer.adam_betas=[0.9,0.98]"], tmp_path)
    assert status == 0, err
    checkpoint = tmp_path / "run" / "checkpoint_last.pt"
    output = run_here(
        "fairseq-eval-lm", corpus.lm, "--user-dir", USER_DIR, "--path", checkpoint, "--cpu",
        "--gen-subset", "valid", "--tokens-per-sample", 32, "--batch-size", 8,
        "--required-batch-size-multiple", 1, "--num-workers", 0,
    )  # fmt: skip
    loss = re.search(r"Loss \(base 2\): ([\d.]+)", output)[1]
    state = torch.load(checkpoint, weights_only=True)
    assert float(loss) == pytest.approx(state["extra_state"]["val_loss"], abs=0.01)
    assert state["last_optimizer_state"]["param_groups"][0]["betas"] == (0.9, 0.98)
    config = load(checkpoint, corpus.lm)[0].position_config
    assert (config.type, config.max_global_shift) == ("cape", 7.0)


def test_bad_value_is_refused(corpus, tmp_path):
    settings = ["+model.position_embedding=cape", "+model.position_max_local_shift=0.9"]
    words = hydra_words("cape_transformer_tiny", tmp_path / "run", *settings)
    status, out, err = hydra_train([*words, *translation(corpus.binary)], tmp_path)
    assert status == 1
    message = "--position-max-local-shift 0.9 is not allowed; allowed: 0 to 0.5 grid steps"
    assert any(line.startswith(message) for line in err.splitlines())
    assert "Traceback" not in out + err
    assert list(tmp_path.rglob("*.pt")) == []


LANGUAGES = ["--lang-pairs", "en-de", "--langs", "en,de", "--decoder-langtok"]
TASKS = {
    "denoising": [
        "--arch", "cape_bart_base", "--mask", 0.3, "--mask-length", "span-poisson",
        "--poisson-lambda", 3, "--replace-length", 1, "--tokens-per-sample", 32,
    ],
    "translation_multi_simple_epoch": [
        "--arch", "cape_transformer_tiny", "--sampling-method", "concat", *LANGUAGES,
    ],
}  # fmt: skip


@pytest.mark.parametrize("task", TASKS)
def test_alpha_is_one_without_a_language_pair(task, corpus, test_data, tmp_path, caplog):
    data = corpus.lm if task == "denoising" else corpus.binary
    words = [
        "fairseq-train", data, "--user-dir", USER_DIR, "--task", task, *TASKS[task], *TINY_FLAGS,
        "--save-dir", tmp_path, "--max-update", 2, "--batch-size", 8, "--optimizer", "adam",
        "--lr", 0.001, "--cpu", "--num-workers", 0, "--no-epoch-checkpoints",
        "--required-batch-size-multiple", 1, "--skip-invalid-size-inputs-valid-test",
    ]  # fmt: skip
    checkpoint = tmp_path / "checkpoint_last.pt"
    with pytest.raises(SettingsError, match="--position-source-scale auto cannot count .* single"):
        run_here(*words, "--position-source-scale", "auto")
    assert not checkpoint.exists()
    caplog.clear()
    run_here(*words)
    assert "alpha = 1; set another alpha by --position-source-scale" in caplog.text
    model = torch.load(checkpoint, weights_only=True)["cfg"]["model"]
    assert model.position_source_scale == "1"
    assert model.position_source_bos
    if task != "denoising":
        languages = ["--task", task, *LANGUAGES, "-s", "en", "-t", "de", "--max-len-b", 3]
        output = run_here(*generate_words(test_data, checkpoint, *languages))
        assert len(lines(output, "H")) == 24


def commands(page, start, end):
    """The words of each command line of a page between two texts."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    section = text.partition(start)[2].partition(end)[0]
    lines = re.findall(r"^ {4}((?:fairseq-|python).*)$", section, re.MULTILINE)
    return [shlex.split(line.removesuffix("...")) for line in lines]


def test_readme_trains_and_generates(run_cli, corpus, tmp_path):
    train, generate = commands("README.md", "\n## fairseq\n", "\n## ")
    assert (train[0], generate[0]) == ("fairseq-train", "fairseq-generate")
    best = tmp_path / "checkpoint_best.pt"
    places = {"data-bin/iwslt14": corpus.binary, "checkpoints/checkpoint_best.pt": best}
    train, generate = ([places.get(word, word) for word in words] for words in (train, generate))
    small = ["--save-dir", tmp_path, "--max-update", 2, "--cpu", *TINY_FLAGS]
    run_cli(*train, *small, cwd=ROOT)
    assert load(best, corpus.binary)[0].position_config.type == "cape"
    output = run_cli(*generate, "--cpu", "--max-len-b", 9, cwd=ROOT).stdout
    assert len(lines(output, "H")) == 24


def test_docs_switch_a_stock_checkpoint(run_cli, corpus, trained, tmp_path):
    """The first command prints how long and at which rate the stock model was trained."""
    read, train = commands("docs/fairseq.md", "\n**Switching your own", "\n**")
    stock = trained("stock")
    read = [word.replace("stock.pt", str(stock)) for word in read]
    updates, rates = run_cli(*read, cwd=ROOT).stdout.split(maxsplit=1)
    assert (int(updates), float(rates.strip("[]\n"))) == (UPDATES, 0.005)
    places = {"data-bin/iwslt14": corpus.binary, "stock.pt": stock}
    train = [places.get(word, word) for word in train]
    small = ["--save-dir", tmp_path, "--max-update", 2, "--cpu", *TINY_FLAGS, "--lr", 0]
    small += ["--dropout", 0, "--warmup-updates", 1, "--total-num-update", 2, "--arch"]
    run_cli(*train, *small, "cape_transformer_tiny", cwd=ROOT)
    start, result = parameters(stock), parameters(tmp_path / "checkpoint_last.pt")
    assert result.keys() == start.keys()
    assert all(torch.equal(start[name], result[name]) for name in start)
    model, _ = load(tmp_path / "checkpoint_last.pt", corpus.binary)
    assert model.position_config.type == "cape"
