"""Folders of Hugging Face models that are unusual: what every exporter, and the converter, makes of
them."""

import json
import re
import resource

import pytest
import transformers

from cape_plugins.cli import main
from hf_models import convert
from hf_models.export import make_self_contained
from tests.support.hf import FAMILIES
from tests.support.served import Corpus, build

WRITERS = {
    "stock": ("export", "stock"),
    "ctranslate2": ("export", "ctranslate2"),
    "onnx": ("export", "onnx"),
    "convert": (),
    "convert --stock": ("--stock",),
}
ENGINES = {"ctranslate2": "ctranslate2", "onnx": "onnxruntime"}


@pytest.fixture(params=WRITERS)
def write(request):
    """Writes a folder from another one, by the command of this name."""
    name = request.param
    if name in ENGINES:
        pytest.importorskip(ENGINES[name])

    def run(source, out):
        words = [str(source), str(out)]
        if name.startswith("convert"):
            status = convert.main([*words, *WRITERS[name]])
        else:
            status = main([*WRITERS[name], *words])
        if status:
            raise SystemExit(status)
        return out

    return run


def save_marian(folder):
    """A model with its tokenizer, which all commands take."""
    tokenizer = Corpus(folder.parent).tokenizer("marian")
    build("marian", tokenizer, {"type": "sinpos"}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def codes(folder):
    """Code that the JSON files of a folder name, by file."""
    found = {}
    for path in folder.glob("*.json"):
        saved = json.loads(path.read_text(encoding="utf-8"))
        for settings in (saved, *saved.values()) if isinstance(saved, dict) else ():
            if isinstance(settings, dict) and "auto_map" in settings:
                found[path.name] = settings["auto_map"]
    return found


@pytest.mark.slow
def test_code_that_stays_behind_is_not_named(write, tmp_path):
    """Of this package and of others; that of the hub can still be had."""
    source = save_marian(tmp_path / "model")
    make_self_contained(source)
    path = source / "tokenizer_config.json"
    own = {"AutoTokenizer": ["of_a_user.Tokenizer", None]}
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "auto_map": own}), "utf-8")
    of_hub = {"AutoImageProcessor": "someone/theirs--processing.Processor"}
    processor = {"image_processor": {"auto_map": own}, "auto_map": of_hub}
    (source / "processor_config.json").write_text(json.dumps(processor), "utf-8")
    assert codes(source).keys() == {"config.json", path.name, "processor_config.json"}
    out = write(source, tmp_path / "out")
    assert list(out.glob("*.py")) == []
    assert codes(out) == {"processor_config.json": of_hub}


def test_stock_folder_of_a_self_contained_one_loads_with_remote_code_allowed(tmp_path):
    """As users load it who are used to the folder that it comes from."""
    FAMILIES["bert"].build({"type": "cape"}).save_pretrained(tmp_path / "model")
    make_self_contained(tmp_path / "model")
    main(["export", "stock", str(tmp_path / "model"), str(tmp_path / "out")])
    load = transformers.AutoModelForMaskedLM.from_pretrained
    model = load(tmp_path / "out", trust_remote_code=True)
    assert type(model) is transformers.BertForMaskedLM


@pytest.mark.slow
def test_a_full_disk_leaves_one_line_and_nothing_else(write, tmp_path, capsys):
    """Whichever file is the first that has no room: a limit on the size of files does the same."""
    source = save_marian(tmp_path / "model")
    before = sorted(path.name for path in tmp_path.iterdir())
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (20_000, 100):
        capsys.readouterr()
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        try:
            with pytest.raises(SystemExit, match="2"):
                write(source, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        error = capsys.readouterr().err.splitlines()[-1]
        assert re.match(r"error: (OUT|DST) \S+/out cannot be written \(File too large\); ", error)
        assert sorted(path.name for path in tmp_path.iterdir()) == before
