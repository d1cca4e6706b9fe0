"""The example scripts of transformers, unmodified, train models of this package on inputs beyond
the limits of the stock models.

The scripts are not in the packages of transformers. Get them, and name their folder:

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers
    TRANSFORMERS_EXAMPLES=transformers/examples/pytorch pytest tests/hf/test_example_scripts.py

Modules of tests/support/beside_scripts stand in for evaluate, torchvision and torchcodec.
"""

import itertools
import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import transformers
from PIL import Image

from hf_models.convert import convert
from tests.conftest import ROOT
from tests.support.hf import STACK

VARIABLE = "TRANSFORMERS_EXAMPLES"
EXAMPLES = os.environ.get(VARIABLE)
REASON = f"set {VARIABLE} to examples/pytorch of a clone of transformers"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not EXAMPLES, reason=REASON)]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
LIMIT, LONG, SIDE = 12, 24, 32  # tokens of the stock models, of the texts; pixels of images
TEXT = {**STACK, "vocab_size": len(WORDS), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
IMAGES = {**STACK, "patch_size": 8}
RATE = 16000
CAPE, SCALED = {"type": "cape"}, {"type": "cape", "max_global_scale": 2.0}


def save_beside(model, folder, *processors):
    """Saves a stock model, with a tokenizer and an image processor if these are named."""
    model.save_pretrained(folder)
    if "texts" in processors:
        vocabulary = {word: index for index, word in enumerate(WORDS)}
        transformers.BertTokenizer(vocab=vocabulary, model_max_length=LIMIT).save_pretrained(folder)
    if "images" in processors:
        size = {"height": SIDE, "width": SIDE}
        transformers.ViTImageProcessor(size=size).save_pretrained(folder)


def roberta(folder):
    config = transformers.RobertaConfig(**TEXT, max_position_embeddings=LIMIT + 1)
    save_beside(transformers.RobertaForMaskedLM(config), folder, "texts")


def mistral(folder):
    limit = {"max_position_embeddings": LIMIT, "sliding_window": None}
    config = transformers.MistralConfig(**TEXT, **limit, num_key_value_heads=2)
    save_beside(transformers.MistralForCausalLM(config), folder, "texts")
    # the limit of training, which this package leaves alone
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["model_max_length"] = LONG
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def clip(folder):
    texts, images = {**TEXT, "max_position_embeddings": LIMIT}, {**IMAGES, "image_size": SIDE}
    config = transformers.CLIPConfig(text_config=texts, vision_config=images, projection_dim=16)
    save_beside(transformers.CLIPModel(config), folder, "texts", "images")


def spectrograms(folder):
    config = transformers.ASTConfig(**STACK, max_length=64, num_mel_bins=16, num_labels=2)
    transformers.ASTForAudioClassification(config).save_pretrained(folder)
    transformers.ASTFeatureExtractor(num_mel_bins=16, max_length=96).save_pretrained(folder)


def dinov3(folder):
    config = transformers.DINOv3ViTConfig(**IMAGES, image_size=SIDE // 2, num_register_tokens=1)
    save_beside(transformers.DINOv3ViTModel(config), folder, "images")


def write_texts(folder):
    text = "\n".join([" ".join("abcdefghij")] * 40)
    for name in ("train", "validation"):
        (folder / f"{name}.txt").write_text(text)


def write_images(folder):
    """Pictures in a folder for each label."""
    numbers = np.random.default_rng(0)
    for split, label in itertools.product(("train", "validation"), ("bright", "dark")):
        (folder / split / label).mkdir(parents=True)
        for number in range(4):
            pixels = numbers.integers(0, 128, (SIDE, SIDE, 3)) + 127 * (label == "bright")
            path = folder / split / label / f"{number}.png"
            Image.fromarray(pixels.astype(np.uint8)).save(path)


def write_captions(folder):
    """Captions that differ behind the limit of the stock model alone."""
    write_images(folder)
    for split in ("train", "validation"):
        rows = [
            {"image": str(path), "caption": "a " * LIMIT + ("b" if "dark" in str(path) else "c")}
            for path in sorted((folder / split).rglob("*.png"))
        ]
        (folder / f"{split}.json").write_text("\n".join(map(json.dumps, rows)))


def write_sounds(folder):
    times = np.arange(RATE) / RATE
    for split, label in itertools.product(("train", "test"), ("high", "low")):
        part = folder / "sounds" / split / label
        part.mkdir(parents=True)
        for number in range(4):
            pitch = number + {"high": 880, "low": 220}[label]
            soundfile.write(part / f"{number}.wav", 0.3 * np.sin(2 * np.pi * pitch * times), RATE)


def add_classifier(folder):
    """The classifier that docs/huggingface.md has for DINOv3."""
    text = (ROOT / "docs/huggingface.md").read_text(encoding="utf-8")
    section = text[text.index("#### A classifier for DINOv3") :]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    (folder / "classifier.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    entry = re.search(r'`"auto_map": (\{.*?\})`', section.replace("\n", " "))[1]
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": json.loads(entry)}))


FILES = ("--train_file", "DATA/train.txt", "--validation_file", "DATA/validation.txt")
CAPTIONS = ("--train_file", "DATA/train.json", "--validation_file", "DATA/validation.json")
FOLDERS = ("--train_dir", "DATA/train", "--validation_dir", "DATA/validation")
# Script, stock model, position embedding, data, and words of the command.
SCRIPTS = {
    "run_mlm on RoBERTa": (
        "language-modeling/run_mlm.py", roberta, CAPE, write_texts,
        [*FILES, "--max_seq_length", LONG],
    ),
    "run_clm on Mistral": (
        "language-modeling/run_clm.py", mistral, SCALED, write_texts,
        [*FILES, "--block_size", LONG],
    ),
    "run_clip": (
        "contrastive-image-text/run_clip.py", clip, CAPE, write_captions,
        [*CAPTIONS, "--image_column", "image", "--caption_column", "caption",
         "--max_seq_length", LONG, "--remove_unused_columns", "False"],
    ),
    "run_audio_classification on AST": (
        "audio-classification/run_audio_classification.py", spectrograms, CAPE, write_sounds,
        ["--dataset_name", "DATA/sounds", "--train_split_name", "train", "--eval_split_name",
         "test", "--remove_unused_columns", "False", "--freeze_feature_encoder", "False",
         "--attention_mask", "False"],
    ),
    "run_image_classification on DINOv3": (
        "image-classification/run_image_classification.py", dinov3,
        {"type": "rope", "max_global_scale": 2.0}, write_images,
        [*FOLDERS, "--trust_remote_code", "True", "--remove_unused_columns", "False"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_unmodified_scripts_train_and_evaluate(name, run_cli, tmp_path):
    script_name, save_stock, settings, write_data, words = SCRIPTS[name]
    transformers.set_seed(0)
    save_stock(tmp_path / "stock")
    convert(str(tmp_path / "stock"), tmp_path / "cape", settings)
    write_data(tmp_path)
    if save_stock is dinov3:  # transformers has no classifier
        add_classifier(tmp_path / "cape")
    shutil.copytree(ROOT / "tests/support/beside_scripts", tmp_path / "script")
    script = shutil.copy(Path(EXAMPLES) / script_name, tmp_path / "script")
    words = [str(word).replace("DATA/", f"{tmp_path}/") for word in words]
    run_cli(
        *("python", "-m", "hf_models.run", script, "--model_name_or_path", tmp_path / "cape"),
        *(*words, "--do_train", "--do_eval", "--max_steps", 6, "--learning_rate", "1e-3"),
        *("--per_device_train_batch_size", 4, "--use_cpu", "True", "--report_to", "none"),
        *("--output_dir", tmp_path / "out"),
        cwd=tmp_path, fresh=True, env={"HF_HOME": str(tmp_path / "cache")},
    )  # fmt: skip
    results = json.loads((tmp_path / "out" / "eval_results.json").read_text())
    assert math.isfinite(results["eval_loss"])
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == 6
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["model_type"].startswith("cape_")
    assert saved["position_embedding"].items() >= settings.items()
