"""Folders that carry their own code, loaded by processes that do not have the package."""

import pytest
import sentencepiece
import torch
from transformers import Wav2Vec2Processor

import hf_models
from hf_models.convert import main
from hf_models.storage.self_contained import make_self_contained
from tests.support.hf import FAMILIES, WITH_STOCK, batch, targets

LOADER = """
import importlib.util, sys, torch
for name in ("cape_plugins", "hf_models"):
    assert importlib.util.find_spec(name) is None, name
import transformers
for line in sys.argv[1:]:
    folder, auto = line.split(":")
    load = getattr(transformers, auto).from_pretrained
    model = load(f"{folder}/cape", trust_remote_code=True).eval()
    if "siglip/" not in f"{folder}/":  # whose AutoModel would have a text side
        transformers.AutoModel.from_pretrained(f"{folder}/cape", trust_remote_code=True)
    torch.save(model(**torch.load(f"{folder}/inputs.pt"))[0], f"{folder}/outputs.pt")
"""


@pytest.fixture(scope="module")
def carried(run_cli, tmp_path_factory, repo_root):
    """Converted folders with their own code, by family, each with inputs and the outputs of the
    model that a process without the package has loaded."""
    root = tmp_path_factory.mktemp("carried")
    folders = {family: root / "elsewhere" / family for family in WITH_STOCK}
    for family, folder in folders.items():
        row = FAMILIES[family]
        row.build_stock(seed=1).save_pretrained(root / family)
        words = [str(root / family), str(folder / "cape"), "--self-contained"]
        assert main([*words, "--position-embedding", row.stock_type]) == 0
        inputs = batch(family)
        if inputs.pop("labels", None) is not None and "decoder_layers" in row.sizes:
            inputs["decoder_input_ids"] = targets() % 30 + 3
        torch.save(inputs, folder / "inputs.pt")
    script = root / "load.py"
    # the interpreter knows the package; hide it
    hide = "import sys\nsys.path = [p for p in sys.path if p not in ({root!r}, '')]\n"
    hide += "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
    script.write_text(hide.format(root=str(repo_root)) + LOADER)
    run_cli(
        "python", script, *(f"{folder}:{FAMILIES[family].auto.__name__}"
                            for family, folder in folders.items()),
        cwd=root, env={"HF_MODULES_CACHE": str(root / "modules"), "PYTHONPATH": ""},
    )  # fmt: skip
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("family", WITH_STOCK)
def test_folder_with_its_own_code_computes_the_same(family, carried):
    folder = carried[family]
    model = FAMILIES[family].model.from_pretrained(folder / "cape").eval()
    with torch.no_grad():
        expected = model(**torch.load(folder / "inputs.pt"))[0]
    torch.testing.assert_close(torch.load(folder / "outputs.pt"), expected)


RECOGNISER = """
import numpy
from transformers import AutoModelForCTC, AutoProcessor, pipeline

processor = AutoProcessor.from_pretrained(sys.argv[1], trust_remote_code=True)
recogniser = pipeline(
    "automatic-speech-recognition", model=sys.argv[1], trust_remote_code=True, device="cpu"
)
print(type(processor.feature_extractor).__module__, type(processor.tokenizer).__name__)
print("text:", recogniser(numpy.tile([0.1, -0.1], 8000))["text"])
"""


@pytest.mark.slow
def test_recogniser_with_its_own_code_computes_the_same(run_cli, tmp_path):
    folder = tmp_path / "recogniser"
    folder.mkdir()
    (tmp_path / "text").write_text("one two three four five\n" * 10)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "spm"), vocab_size=30,
        pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    tokenizer = hf_models.CapeSpeechTokenizer(str(tmp_path / "spm.model"))
    sizes = {"d_model": 16, "encoder_layers": 1, "encoder_ffn_dim": 16}
    config = hf_models.CapeSpeechConfig(**sizes, vocab_size=len(tokenizer))
    hf_models.CapeSpeechForCTC(config).save_pretrained(folder)
    Wav2Vec2Processor(hf_models.CapeSpeechFeatureExtractor(), tokenizer).save_pretrained(folder)
    make_self_contained(folder)
    script = tmp_path / "load.py"
    hide = "import sys\nsys.modules['hf_models'] = sys.modules['cape_plugins'] = None\n"
    script.write_text(hide + RECOGNISER)
    environment = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    output = run_cli("python", script, folder, cwd=tmp_path, env=environment).stdout
    assert "transformers_modules" in output
    assert "CapeSpeechTokenizer" in output
    assert "text:" in output
