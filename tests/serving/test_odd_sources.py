"""Unusual folders of Hugging Face models, in every exporter and in the converter."""

import json
import math
import re
import resource

import pytest
import torch
import transformers

from hf_models import convert
from hf_models.storage.self_contained import make_self_contained
from tests.support.engines import export
from tests.support.hf import FAMILIES
from tests.support.served import build
from tests.support.whisper import save_with_processor

ENGINES = {"ctranslate2": "ctranslate2", "onnx": "onnxruntime"}
WRITERS = ("stock", *ENGINES, "convert", "convert --stock")


def write(command, source, out):
    """Writes a folder from another one, by the command of this name."""
    if command in ENGINES:
        pytest.importorskip(ENGINES[command])
    if not command.startswith("convert"):
        return export(command, source, out)
    if status := convert.main([str(source), str(out), *command.split()[1:]]):
        raise SystemExit(status)
    return out


def refusal(command, source, capsys):
    """The line with which a command refuses a folder, with nothing written."""
    capsys.readouterr()
    before = sorted(source.parent.iterdir())
    with pytest.raises(SystemExit, match="2"):
        write(command, source, source.parent / "out")
    assert sorted(source.parent.iterdir()) == before
    return capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def saved(corpus, tmp_path):
    """A model with its tokenizer, which all commands take."""
    folder = tmp_path / "model"
    tokenizer = corpus.tokenizer("marian")
    model = build("marian", tokenizer, {"type": "sinpos"}, encoder_layers=1, decoder_layers=1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def codes(folder):
    """Code that the JSON files of a folder name, by file."""
    named = {}
    for path in folder.glob("*.json"):
        saved = json.loads(path.read_text(encoding="utf-8"))
        for settings in (saved, *saved.values()) if isinstance(saved, dict) else ():
            if isinstance(settings, dict) and "auto_map" in settings:
                named[path.name] = settings["auto_map"]
    return named


@pytest.mark.parametrize("command", WRITERS)
def test_code_that_stays_behind_is_not_named(command, saved, tmp_path, monkeypatch):
    """Of this package and of others; code of the hub can still be had."""
    make_self_contained(saved)
    if command == "onnx":  # without the graphs, which take long and name nothing
        from hf_models.serving import onnx

        monkeypatch.setattr(onnx, "graphs", lambda model: [])
        monkeypatch.setattr(onnx, "readme", lambda *arguments: "")
    path = saved / "tokenizer_config.json"
    auto_map = {"AutoTokenizer": ["of_a_user.Tokenizer", None]}
    settings = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**settings, "auto_map": auto_map}), "utf-8")
    of_hub = {"AutoImageProcessor": "someone/theirs--processing.Processor"}
    processor = {"image_processor": {"auto_map": auto_map}, "auto_map": of_hub}
    (saved / "processor_config.json").write_text(json.dumps(processor), "utf-8")
    assert codes(saved).keys() == {"config.json", path.name, "processor_config.json"}
    out = write(command, saved, tmp_path / "out")
    assert list(out.glob("*.py")) == []
    assert codes(out) == {"processor_config.json": of_hub}


def test_stock_folder_of_a_self_contained_one_loads_with_remote_code_allowed(tmp_path, export_of):
    """As users load it who are used to the folder that it comes from."""
    FAMILIES["bert"].build({"type": "cape"}).save_pretrained(tmp_path / "model")
    make_self_contained(tmp_path / "model")
    load = transformers.AutoModelForMaskedLM.from_pretrained
    model = load(export_of("stock", tmp_path / "model"), trust_remote_code=True)
    assert type(model) is transformers.BertForMaskedLM


@pytest.mark.parametrize("command", ["stock", "ctranslate2", "convert"])
def test_a_full_disk_leaves_one_line_and_nothing_else(command, saved, capsys):
    """Whichever file is the first that has no room: a limit on the size of files does the same."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (20_000, 100):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        try:
            error = refusal(command, saved, capsys)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert re.match(r"error: (OUT|DST) \S+/out cannot be written \(File too large\); ", error)


@pytest.mark.parametrize("command", ["stock", "ctranslate2", "onnx"])
def test_a_configuration_that_names_no_class(command, tmp_path, capsys):
    source = tmp_path / "model"
    FAMILIES["bart"].build({"type": "sinpos"}).save_pretrained(source)
    saved = json.loads((source / "config.json").read_text("utf-8"))
    del saved["architectures"]
    (source / "config.json").write_text(json.dumps(saved), "utf-8")
    assert "holds a model without architecture" in refusal(command, source, capsys)


class Foreign:
    """An object that no file of weights has, and that torch refuses to load."""

    def __reduce__(self):
        return print, ("run",)


def test_files_that_cannot_be_read(tmp_path, capsys):
    """One line of ours: no advice to load whatever it is, nothing of the insides of torch."""
    source = tmp_path / "model"
    FAMILIES["bert"].build({"type": "cape"}).save_pretrained(source)
    (source / "tokenizer_config.json").write_text("{", encoding="utf-8")
    assert "tokenizer_config.json holds no JSON object" in refusal("stock", source, capsys)
    (source / "tokenizer_config.json").unlink()
    (source / "model.safetensors").unlink()
    weights = source / "pytorch_model.bin"
    for spoil in (
        lambda: torch.save({"weight": Foreign()}, weights),
        lambda: weights.write_text("import os"),
    ):
        spoil()
        told = refusal("stock", source, capsys)
        assert re.match(rf"error: the weights of {source} cannot be read \([^.;]+\); they ", told)
        assert not any(word in told for word in ("weights_only", "miniz", "arbitrary"))


@pytest.mark.parametrize(("command", "number"), [("stock", math.nan), ("convert", math.inf)])
def test_weights_that_are_no_numbers(command, number, tmp_path, capsys):
    model = FAMILIES["marian"].build({"type": "sinpos"})
    with torch.no_grad():
        model.model.decoder.layers[1].fc1.weight[3, 4] = number
    model.save_pretrained(tmp_path / "model")
    told = refusal(command, tmp_path / "model", capsys)
    assert f"the weights of {tmp_path}/model are not all finite" in told
    assert "model.decoder.layers.1.fc1.weight has NaN or infinity" in told


@pytest.mark.parametrize(
    ("family", "command", "flag"),
    [
        ("marian", "ctranslate2", "--max-target-tokens"),
        ("whisper", "ctranslate2", "--max-source-tokens"),
        ("bert", "stock", "--max-tokens"),
        ("siglip_vision_model", "stock", "--image-size"),
    ],
)
def test_tables_that_no_memory_holds_are_refused(
    family, command, flag, saved, tmp_path, refusal_of
):
    """By the largest length that is allowed, before anything of that length is made."""
    source = saved if family == "marian" else tmp_path / "other"
    if family == "whisper":
        save_with_processor(tmp_path / "stock")
        convert.convert(str(tmp_path / "stock"), source, {"type": "sinpos"})
    elif family != "marian":
        FAMILIES[family].build({"type": "cape"}).save_pretrained(source)
    sizes = [str(10**12)] * (2 if family == "siglip_vision_model" else 1)
    told = refusal_of(command, source, flag, *sizes)
    assert f"error: {flag} asks for a table of 1" in told
    assert re.search(r"allowed: up to \d+ with the \d+ channels of this model \(1 GiB\)", told)
