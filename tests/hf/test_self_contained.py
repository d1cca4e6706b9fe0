"""Folders that carry their own code, loaded by processes that do not have the package."""

import pytest
import sentencepiece
import torch
from transformers import Wav2Vec2Processor

import hf_models
from hf_models.convert import main
from hf_models.storage.self_contained import make_self_contained
from tests.support.hf import FAMILIES, STACKS, WITH_STOCK, batch, targets

# each folder has the code of all families
CARRIED = [name for name in WITH_STOCK if name in STACKS]
LOADER = """
import importlib.util, numpy, torch
for name in ("cape_plugins", "hf_models"):
    assert importlib.util.find_spec(name) is None, name
import transformers
recogniser, *lines = sys.argv[1:]
for line in lines:
    folder, auto = line.split(":")
    load = getattr(transformers, auto).from_pretrained
    model = load(f"{folder}/cape", trust_remote_code=True).eval()
    transformers.AutoModel.from_pretrained(f"{folder}/cape", trust_remote_code=True)
    torch.save(model(**torch.load(f"{folder}/inputs.pt"))[0], f"{folder}/outputs.pt")

processor = transformers.AutoProcessor.from_pretrained(recogniser, trust_remote_code=True)
print(type(processor.feature_extractor).__module__, type(processor.tokenizer).__name__)
recognise = transformers.pipeline(
    "automatic-speech-recognition", model=recogniser, trust_remote_code=True, device="cpu"
)
print("text:", recognise(numpy.tile([0.1, -0.1], 8000))["text"])
"""


def make_recogniser(folder):
    """A folder with its own code, of a model that has a processor of ours."""
    folder.mkdir()
    (folder / "text").write_text("one two three four five\n" * 10)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "spm"), vocab_size=30,
        pad_id=0, unk_id=1, bos_id=-1, eos_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    tokenizer = hf_models.CapeSpeechTokenizer(str(folder / "spm.model"))
    sizes = {"d_model": 16, "encoder_layers": 1, "encoder_ffn_dim": 16}
    config = hf_models.CapeSpeechConfig(**sizes, vocab_size=len(tokenizer))
    hf_models.CapeSpeechForCTC(config).save_pretrained(folder)
    Wav2Vec2Processor(hf_models.CapeSpeechFeatureExtractor(), tokenizer).save_pretrained(folder)
    make_self_contained(folder)
    return folder


@pytest.fixture(scope="module")
def carried(run_cli, tmp_path_factory, repo_root):
    """Converted folders with their own code, by family, each with inputs and the outputs of the
    model that a process without the package has loaded; and what the process says of a
    recogniser."""
    root = tmp_path_factory.mktemp("carried")
    folders = {family: root / "elsewhere" / family for family in CARRIED}
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
    done = run_cli(
        "python", script, make_recogniser(root / "recogniser"),
        *(f"{folder}:{FAMILIES[family].auto.__name__}" for family, folder in folders.items()),
        cwd=root, env={"HF_MODULES_CACHE": str(root / "modules"), "PYTHONPATH": ""},
    )  # fmt: skip
    return folders, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("family", CARRIED)
def test_folder_with_its_own_code_computes_the_same(family, carried):
    folder = carried[0][family]
    model = FAMILIES[family].model.from_pretrained(folder / "cape").eval()
    with torch.no_grad():
        expected = model(**torch.load(folder / "inputs.pt"))[0]
    torch.testing.assert_close(torch.load(folder / "outputs.pt"), expected)


@pytest.mark.slow
def test_recogniser_brings_its_processor(carried):
    for word in ("transformers_modules", "CapeSpeechTokenizer", "text:"):
        assert word in carried[1]
