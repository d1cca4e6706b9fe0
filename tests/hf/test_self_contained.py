"""Folders that carry their own code, loaded by processes that do not have the package."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import sentencepiece
import torch
import transformers
from transformers import Wav2Vec2Processor

import hf_models
from hf_models.convert import main
from hf_models.storage.self_contained import make_self_contained
from tests.hf import test_rows, test_sinusoids, test_spectrograms, test_video
from tests.support.generated import mistral
from tests.support.hf import FAMILIES, STACKS, WITH_STOCK, batch, targets

IDS = {"input_ids": torch.arange(5, 17).view(2, 6)}


class Carried(NamedTuple):
    """A stock model, the type that it is converted to, the Auto class that loads it, and inputs."""

    stock: Callable[[], Any]
    type: str
    auto: str
    inputs: Callable[[], dict[str, Any]]


def inputs_of(family):
    inputs = batch(family)
    if inputs.pop("labels", None) is not None and "decoder_layers" in FAMILIES[family].sizes:
        inputs["decoder_input_ids"] = targets() % 30 + 3
    return inputs


# each folder has the code of all families
CARRIED = {
    name: Carried(
        partial(row.build_stock, seed=1),
        row.stock_type,
        row.auto.__name__,
        partial(inputs_of, name),
    )
    for name, row in FAMILIES.items()
    if name in WITH_STOCK and name in STACKS
}
# generated families, each with another kind of seam
CARRIED |= {
    "mistral": Carried(mistral, "cape", "AutoModelForCausalLM", lambda: IDS),
    "roberta": Carried(
        partial(test_rows.build, "roberta"), "cape", "AutoModelForMaskedLM", lambda: IDS
    ),
    "xglm": Carried(
        partial(test_sinusoids.build, "xglm"), "cape", "AutoModelForCausalLM", lambda: IDS
    ),
    "audio-spectrogram-transformer": Carried(
        test_spectrograms.build,
        "cape",
        "AutoModelForAudioClassification",
        lambda: {"input_values": torch.ones(2, test_spectrograms.FRAMES, test_spectrograms.BANDS)},
    ),
    "videomae": Carried(
        partial(test_video.build, "videomae"),
        "cape",
        "AutoModelForVideoClassification",
        lambda: {"pixel_values": test_video.videos()},
    ),
}
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
        row = CARRIED[family]
        row.stock().save_pretrained(root / family)
        words = [str(root / family), str(folder / "cape"), "--self-contained"]
        assert main([*words, "--position-embedding", row.type]) == 0
        torch.save(row.inputs(), folder / "inputs.pt")
    script = root / "load.py"
    # the interpreter knows the package; hide it
    hide = "import sys\nsys.path = [p for p in sys.path if p not in ({root!r}, '')]\n"
    hide += "sys.meta_path = [f for f in sys.meta_path if 'editable' not in str(f).lower()]\n"
    script.write_text(hide.format(root=str(repo_root)) + LOADER)
    done = run_cli(
        "python", script, make_recogniser(root / "recogniser"),
        *(f"{folder}:{CARRIED[family].auto}" for family, folder in folders.items()),
        cwd=root, env={"HF_MODULES_CACHE": str(root / "modules"), "PYTHONPATH": ""},
    )  # fmt: skip
    return folders, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("family", CARRIED)
def test_folder_with_its_own_code_computes_the_same(family, carried):
    folder = carried[0][family]
    auto = getattr(transformers, CARRIED[family].auto)
    model = auto.from_pretrained(folder / "cape", trust_remote_code=False).eval()
    assert type(model).__module__.startswith("hf_models.")
    with torch.no_grad():
        expected = model(**torch.load(folder / "inputs.pt"))[0]
    torch.testing.assert_close(torch.load(folder / "outputs.pt"), expected)


@pytest.mark.slow
def test_recogniser_brings_its_processor(carried):
    for word in ("transformers_modules", "CapeSpeechTokenizer", "text:"):
        assert word in carried[1]
