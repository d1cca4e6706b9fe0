"""Checkpoints whose files name no class of tokenizer or processor, as many on the hub: transformers
then chooses the class by the configuration, and must choose the same class for our models as for
the stock models."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoFeatureExtractor, AutoImageProcessor, AutoProcessor, AutoTokenizer

from hf_models.convert import main
from tests.support.hf import FAMILIES

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two")


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def words(folder):
    (folder / "vocab.txt").write_text("\n".join(WORDS))


def misnamed(folder):
    """A class that transformers knows to be wrong for models of this type."""
    Tokenizer(BPE({"o": 0, "n": 1}, [])).save(str(folder / "tokenizer.json"))
    write(folder, tokenizer_config={"tokenizer_class": "LlamaTokenizerFast"})


def images(folder):
    write(folder, preprocessor_config={"do_resize": True, "size": 24, "image_mean": [0.5] * 3})


def frames(folder):
    write(folder, preprocessor_config={"num_mel_bins": 8})


FILES = {
    "vocabulary": ("bert", AutoTokenizer, words),
    "misnamed": ("qwen2", AutoTokenizer, misnamed),
    "images": ("vit", AutoImageProcessor, images),
    "frames": ("speech_to_text", AutoFeatureExtractor, frames),
}


@pytest.fixture(scope="module", params=FILES)
def stock(request, tmp_path_factory):
    """A stock checkpoint with files that name no class, its family, and what they load as."""
    folder = tmp_path_factory.mktemp(request.param)
    family, auto, add_files = FILES[request.param]
    FAMILIES[family].build_stock().save_pretrained(folder)
    add_files(folder)
    return folder, family, auto


def test_converted_folder_loads_what_the_stock_one_does(stock, tmp_path):
    source, family, auto = stock
    folder, flags = tmp_path / "cape", ["--position-embedding", FAMILIES[family].stock_type]
    assert main([str(source), str(folder), *flags]) == 0
    expected, actual = auto.from_pretrained(source), auto.from_pretrained(folder)
    assert type(actual) is type(expected)
    if auto is AutoTokenizer:
        assert actual("one two").input_ids == expected("one two").input_ids
        assert actual.special_tokens_map == expected.special_tokens_map
        assert type(AutoProcessor.from_pretrained(folder)) is type(expected)
    else:
        assert actual.to_dict() == expected.to_dict()
