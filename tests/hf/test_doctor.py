"""``cape-plugins doctor``: versions, one line for each check, a status that sums them up."""

import json
import re
import warnings
from importlib.metadata import EntryPoint, PackageNotFoundError, version

import pytest
import transformers
from transformers import (
    BeitBackbone,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    BloomForCausalLM,
    MarianMTModel,
    MistralForCausalLM,
    WhisperForConditionalGeneration,
)

import hf_models
from cape_plugins import cli
from cape_plugins.checkpoints.generated import GENERATED
from cape_plugins.doctor import command as doctor
from cape_plugins.doctor.check import Check
from hf_models import doctor as hf_doctor
from hf_models.checks.tiny import tiny_model, tiny_sizes
from hf_models.checks.without_seam import REASONS
from hf_models.seams.rotary import RotaryAngles
from tests.support.generated import without_row


@pytest.fixture(autouse=True)
def _hosts(monkeypatch, repo_root):
    """The entry point of setup.py, whatever is installed."""
    setup = (repo_root / "setup.py").read_text(encoding="utf-8")
    (value,) = re.findall(r'"hugging_face = (hf_models\.doctor:\w+)"', setup)
    points = [EntryPoint("hugging_face", value, doctor.GROUP)]
    monkeypatch.setattr(doctor, "entry_points", lambda group: points)


@pytest.fixture
def marian(tmp_path):
    folder = tmp_path / "marian"
    tiny_model(MarianMTModel).save_pretrained(folder)
    return str(folder)


def run(capsys, *arguments):
    """Exit status, lines of standard output, and standard error."""
    capsys.readouterr()
    try:
        status = cli.main(["doctor", *map(str, arguments)])
    except SystemExit as ended:
        status = ended.code
    output = capsys.readouterr()
    return status, output.out.splitlines(), output.err


# the family of Mistral is made when it is first used
@pytest.mark.parametrize("stock", [BertForMaskedLM, MistralForCausalLM])
def test_a_right_model_gives_versions_one_line_each_and_status_0(stock, tmp_path, capsys):
    tiny_model(stock).save_pretrained(tmp_path)
    status, lines, error = run(capsys, tmp_path)
    assert (status, error) == (0, "")
    assert f"transformers {transformers.__version__}" in lines
    assert "torch " + version("torch") in lines
    assert any(line.startswith("note transformers: release: ") for line in lines)
    checks = [line for line in lines if line.startswith("ok ")]
    assert f"ok   {tmp_path}: logits: relative difference 0, at most 0.0001" in checks
    assert len(checks) > 10
    assert lines[-1].startswith("no difference")


@pytest.fixture
def answered(monkeypatch):
    """The settings that a model is checked with; of two checks one fails, whatever they are."""
    asked = []

    def check(model, settings):
        warnings.warn("`x` goes", FutureWarning, stacklevel=2)
        asked.append(settings)
        return [Check("logits", "ok", "0"), Check("greedy", "FAIL", "1")]

    monkeypatch.setattr(hf_doctor, "check_family", check)
    return asked


def test_a_wrong_model_gives_status_1_a_line_for_each_difference_and_json(marian, capsys, answered):
    status, lines, _ = run(capsys, marian)
    assert status == 1
    assert f"FAIL {marian}: greedy: 1" in lines
    assert lines[-1].startswith("1 of ")
    assert "note transformers: warning: FutureWarning: `x` goes" in lines
    status, lines, _ = run(capsys, marian, "--json")
    report = json.loads("\n".join(lines))
    assert status == 1
    assert report["versions"]["transformers"] == transformers.__version__
    rows = [{"model": marian, "name": "logits", "status": "ok", "text": "0"}]
    rows += [{"model": marian, "name": "greedy", "status": "FAIL", "text": "1"}]
    assert [row for row in report["checks"] if row["model"] == marian] == rows
    run(capsys, marian, "--position-embedding", "shape", "--position-max-offset", "9")
    assert answered[-1] == {"type": "shape", "max_offset": 9.0}


@pytest.mark.parametrize("has_stock", [True, False])
def test_a_checkpoint_of_this_package_is_checked_itself_and_by_its_stock_model(
    has_stock, tmp_path, capsys
):
    config = hf_models.CapeSpeechConfig
    if has_stock:
        settings = {"type": "cape", "source_scale": 1.2, "relative_context": 2}
        model = hf_models.switch(tiny_model(MarianMTModel), settings)
    else:
        model = hf_models.CapeSpeechForCTC(config(**tiny_sizes(config), position_embedding={}))
    model.save_pretrained(tmp_path)
    status, lines, _ = run(capsys, tmp_path)
    assert status == 0
    assert any("cape of the checkpoint: one training step" in line for line in lines)
    assert any(line.startswith(f"ok   {tmp_path}: logits:") for line in lines) == has_stock


@pytest.mark.parametrize("stock", [BeitBackbone, WhisperForConditionalGeneration])
def test_large_models_are_cut_to_their_first_layers(stock, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hf_doctor, "LARGE", -1)
    sizes = tiny_sizes(stock.config_class)
    deep = {name: 5 for name in sizes if name.endswith("layers")}
    stock(stock.config_class(**{**sizes, **deep})).save_pretrained(tmp_path)
    built = []
    check = hf_doctor.check_family
    monkeypatch.setattr(hf_doctor, "check_family", lambda m, s: built.append(m) or check(m, s))
    status, lines, _ = run(capsys, tmp_path)
    assert status == 0
    assert any(f"{tmp_path}: layers: the first 2 of each stack" in line for line in lines)
    assert built[0].config.num_hidden_layers == 2


def test_a_model_type_is_proved_and_told_apart_from_a_checkpoint(capsys, monkeypatch):
    status, lines, _ = run(capsys, "mistral", "--position-embedding", "rope")
    assert status == 0
    assert any(line.startswith("note mistral: model type: a tiny model of this") for line in lines)
    assert "ok   mistral: outputs: 1 equal" in lines
    assert any(line.startswith("ok   mistral: rope: one training step") for line in lines)
    assert not any(": family: " in line for line in lines)
    monkeypatch.setattr(RotaryAngles, "forward", lambda self, x, position_ids: None)
    status, lines, _ = run(capsys, "mistral")
    assert status == 1
    assert any(line.startswith("FAIL mistral: outputs: ") for line in lines)


def test_a_model_type_without_a_row_gets_the_row_to_add_or_the_reason(capsys):
    with without_row("mixtral") as row:
        status, lines, _ = run(capsys, "mixtral")
    assert status == 0
    assert any(f"add_generated_row('mixtral', {row})" in line for line in lines)
    status, (*_, reason, last), _ = run(capsys, "wav2vec2")
    assert status == 0
    assert reason == f"skip wav2vec2: seam: {REASONS['wav2vec2']}"
    assert re.match("nothing was compared.* docs/families.md lists the model types", last)


def test_without_a_model_every_family_is_checked(capsys, monkeypatch):
    """What the checks say is tested in test_check_family.py. Of the generated families, of which
    some may be made in this process, a few stand for all."""
    monkeypatch.setattr(hf_doctor, "check_family", lambda *_: [Check("logits", "ok", "")])
    status, lines, _ = run(capsys)
    assert status == 0
    names = [line[5:].partition(":")[0] for line in lines if line.startswith("ok ")]
    unchecked = {f"cape_{name}" for name, row in GENERATED.items() if not row.checked}
    model_types = {config.model_type for config in hf_models.AUTO_CLASSES}
    assert sorted(names) == sorted(model_types - unchecked)
    assert {"cape_llama", "cape_bert", "cape_whisper"} <= set(names)


def only_families(monkeypatch, *model_types):
    """The built-in models are of these families alone."""
    autos = hf_models.AUTO_CLASSES
    chosen = {config: autos[config] for config in autos if config.model_type in model_types}
    monkeypatch.setattr(hf_models, "AUTO_CLASSES", chosen)


def test_a_family_that_passes_is_one_line_with_the_number_of_its_checks(capsys, monkeypatch):
    only_families(monkeypatch, "cape_vit")
    rows = [Check(name, "ok", "") for name in ("logits", "greedy")]
    monkeypatch.setattr(hf_doctor, "check_family", lambda *_: rows)
    _, each, _ = run(capsys, "--all")
    expected = ["ok   cape_vit: logits: ", "ok   cape_vit: greedy: "]
    assert [line for line in each if "cape_vit" in line] == expected
    status, lines, _ = run(capsys)
    assert status == 0
    assert "ok   cape_vit: 2 checks" in lines


def test_families_that_cannot_have_the_wished_type_are_left_out(capsys, monkeypatch):
    only_families(monkeypatch, "cape_llama", "cape_bert")
    status, lines, _ = run(capsys, *RELPOS, "--all")
    assert status == 0
    assert any(line.startswith("skip cape_llama: settings: ") for line in lines)
    assert any(line.startswith("ok   cape_bert: relpos: one training step") for line in lines)


RELPOS = ("--position-embedding", "relpos")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["./missing"], "./missing: no such folder"),
        (["bloom"], "no cape counterpart; allowed: the model types"),
        (["bert", "--position-embedding", "sinpos"], "dimension 33 is not"),
        (["empty"], "config.json"),
        (["marian", *RELPOS, "--position-relative-context", "0"], "-relative-context 0 leaves"),
        (["marian", "--position-gamma", "-1"], "--position-gamma"),
        (["marian", "--data", "x"], "--data x is not allowed"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(arguments, told, marian, tmp_path, capsys):
    bloom = BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=9)
    BloomForCausalLM(bloom).save_pretrained(tmp_path / "bloom")
    sizes = {**tiny_sizes(BertConfig), "hidden_size": 33, "num_attention_heads": 3}
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    (tmp_path / "empty").mkdir()
    name, *rest = arguments
    path = name if name.startswith(".") else tmp_path / name
    status, _, error = run(capsys, path, *rest)
    assert status == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert told in error


def only_missing(monkeypatch, *packages):
    """Hides installed packages from the doctor."""
    installed = doctor.version

    def version(package):
        if package in packages:
            raise PackageNotFoundError(package)
        return installed(package)

    monkeypatch.setattr(doctor, "version", version)


def stop_import(monkeypatch, error):
    """An import of the host ends with this error."""

    def load(point):
        raise error

    monkeypatch.setattr(EntryPoint, "load", load)


def test_a_missing_host_is_named_with_the_way_to_install_it(capsys, monkeypatch):
    only_missing(monkeypatch, "transformers")
    stop_import(monkeypatch, ImportError("No module named 'transformers'"))
    status, _, error = run(capsys)
    assert status == 2
    assert error.startswith("error: transformers is not installed")
    assert "install it: pip install 'cape-plugins[hf]'" in error


@pytest.mark.parametrize("error", [ImportError("no name x"), TypeError("z")])
def test_an_installed_host_that_cannot_be_imported_is_a_difference(error, capsys, monkeypatch):
    stop_import(monkeypatch, error)
    status, lines, _ = run(capsys)
    (failed,) = (line for line in lines if line.startswith("FAIL "))
    assert status == 1
    assert failed.startswith("FAIL hugging_face: host: transformers is installed, but")
    assert f"({type(error).__name__}: {error})" in failed


def test_one_missing_host_of_two_is_skipped(capsys, monkeypatch):
    points = [
        EntryPoint("fairseq", "fairseq_user_dir.doctor:doctor", doctor.GROUP),
        EntryPoint("hugging_face", "hf_models.doctor:doctor", doctor.GROUP),
    ]
    monkeypatch.setattr(doctor, "entry_points", lambda group: points)
    monkeypatch.setattr(hf_models, "AUTO_CLASSES", {})
    only_missing(monkeypatch, "fairseq", "fairseq-fixed")
    status, lines, _ = run(capsys)
    assert status == 0
    assert any(line.startswith("skip fairseq: host: fairseq is not installed") for line in lines)
