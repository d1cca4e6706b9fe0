"""The commands and programs of docs/serving.md: each of them runs, the programs in an environment
that has only the engines, and gives the results of fairseq and transformers."""

import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import transformers
from fairseq.data import Dictionary
from PIL import ExifTags, Image
from transformers import AutoModelForSeq2SeqLM, BitImageProcessor, ViTImageProcessor

from benchmarks.engines import onnx, task
from cape_plugins.cli import main
from fairseq_user_dir.serving.source_checkpoint import load_source
from fairseq_user_dir.serving.source_checkpoint import score as score_by_fairseq
from fairseq_user_dir.serving.source_checkpoint import translate as translate_by_fairseq
from hf_models.convert import convert
from recipes.lab.subwords import SentencePiece
from recipes.vit.data import eight_bits
from tests.support.engines import run_program
from tests.support.fairseq_models import EOS, PAD
from tests.support.hf import VIT
from tests.support.served_fairseq import train
from tests.support.translation_models import (
    SIZES,
    copy_to_hugging_face,
    save_fairseq,
    save_language_model,
)
from tests.support.whisper_full import save_full

for _engine in ("ctranslate2", "faster_whisper", "onnxruntime"):
    pytest.importorskip(_engine)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
SENTENCES = ["three, forty-one.", "seventeen."]


def commands():
    """The lines of the page that export."""
    return re.findall(r"^    cape-plugins (export .*)$", PAGE.read_text("utf-8"), re.MULTILINE)


def program(word):
    """The program of the page that has this word."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)
    (code,) = [block for block in blocks if word in block]
    return code


@pytest.fixture(scope="module")
def page_folder(corpus, tmp_path_factory):
    """A folder with everything that the page names, and what its commands have written."""
    folder = tmp_path_factory.mktemp("serving")
    shutil.copy(corpus.spm, folder / "sentencepiece.model")
    save_models_of_fairseq(corpus, folder)
    (folder / "input.en").write_text("\n".join(SENTENCES) + "\n", encoding="utf-8")
    pieces = SentencePiece(corpus.spm)
    lines = [pieces.encode(source) for source, _ in corpus.pairs[:20]]
    (folder / "test.en").write_text("\n".join(lines) + "\n", encoding="utf-8")
    copy_to_hugging_face(folder, folder / "checkpoint_best.pt", folder / "marian")
    start_with_padding(folder / "marian")
    VIT.build({"type": "cape"}, num_hidden_layers=1).save_pretrained(folder / "vit")
    # the model takes images of any size
    ViTImageProcessor(do_resize=False).save_pretrained(folder / "vit")
    save_full(folder / "whisper-stock")
    convert(str(folder / "whisper-stock"), folder / "whisper", {"type": "sinpos"})
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(256, size=(40, 56, 3), dtype=np.uint8)).save(folder / "image.png")
    soundfile.write(folder / "recording.wav", 0.1 * rng.standard_normal(16000), 16000)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in commands():
            main(shlex.split(command))
    return folder


def save_models_of_fairseq(corpus, folder):
    """A translation model, and a language model whose texts have no symbols that are no words."""
    binary = folder / "binary"
    binary.mkdir()
    dictionary = Dictionary()
    for piece in corpus.pieces:
        dictionary.add_symbol(piece)
    for name in ("dict.en.txt", "dict.de.txt", "dict.txt"):
        dictionary.save(str(binary / name))
    flags = ("--position-embedding", "cape", "--position-source-scale", "1.25", "--dropout", 0)
    flags += ("--encoder-layers", 1, "--decoder-layers", 1)
    path = save_fairseq(folder, folder / "checkpoint_best.pt", *flags)
    state = torch.load(path, weights_only=True)
    torch.save({**state, "model": train(path, folder, updates=100)}, path)
    words = ("--position-embedding", "shape")
    sides = [f"--decoder-{side}-dim={SIZES['embed-dim']}" for side in ("input", "output")]
    path = save_language_model(binary, folder / "language_model.pt", *words, *sides)
    state = torch.load(path, weights_only=True)
    norm = state["model"]["decoder.layers.1.final_layer_norm.bias"]
    for embedding in state["model"]["decoder.output_projection.weight"][:4]:
        norm -= 12 * embedding / embedding.square().sum()
    torch.save(state, path)
    shutil.copytree(binary, folder / "data-bin")


def start_with_padding(folder):
    """Lets a model of fairseq begin targets with padding, as Marian's do, that acts as the EOS with
    which it began them in training."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[PAD] = embeddings[EOS]
    model.generation_config.update(decoder_start_token_id=PAD, bad_words_ids=[[PAD]])
    model.save_pretrained(folder)


@pytest.mark.slow
def test_translator_gives_the_translations_of_fairseq(page_folder):
    printed = run_program(program("translate_batch"), cwd=page_folder).splitlines()
    pieces = SentencePiece(page_folder / "sentencepiece.model")
    source = load_source(page_folder / "checkpoint_best.pt", str(page_folder / "data-bin"))
    lines = [pieces.encode(sentence) for sentence in SENTENCES]
    hypotheses = translate_by_fairseq(source, lines, 200)
    assert all(hypothesis.ended and hypothesis.tokens for hypothesis in hypotheses)
    assert printed == [pieces.decode(" ".join(hypothesis.tokens)) for hypothesis in hypotheses]


@pytest.mark.slow
def test_generator_continues_and_scores_texts(page_folder):
    text, score = run_program(program("generate_batch"), cwd=page_folder).splitlines()
    source = load_source(page_folder / "language_model.pt", str(page_folder / "data-bin"))
    assert text
    (expected,) = score_by_fairseq(source, [text])
    # the engine scores the text without its end
    assert float(score) == pytest.approx(sum(expected[:-1]), abs=1e-4)


@pytest.mark.slow
def test_transcription_has_times_and_text(page_folder):
    printed = run_program(program("faster_whisper"), cwd=page_folder)
    assert re.match(r"\d+\.\d\d \d+\.\d\d ", printed)


@pytest.mark.slow
def test_graphs_translate_as_the_model_does(page_folder):
    code = program("encoder, decoder")
    (sentence,) = re.findall(r'encode\("(.*?)"', code)
    model = AutoModelForSeq2SeqLM.from_pretrained(page_folder / "marian")
    tokenizer = transformers.AutoTokenizer.from_pretrained(page_folder / "marian")
    inputs = tokenizer(sentence, return_tensors="pt")
    tokens = model.generate(**inputs, num_beams=1, do_sample=False, max_new_tokens=256)[0]
    assert 2 < len(tokens) < 256
    assert tokens[-1] == tokenizer.eos_token_id
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert run_program(code, cwd=page_folder).strip() == expected


@pytest.mark.slow
def test_benchmark_translates_with_the_graphs(page_folder, tmp_path, monkeypatch):
    """Each token has the highest score after the tokens before it, except the token that begins
    targets: with this model padding, which has the scores of the end."""
    monkeypatch.setattr(onnx, "EOS", PAD)
    (tmp_path / onnx.FOLDER).symlink_to(page_folder / "graphs")
    (tmp_path / task.SOURCES).write_text(json.dumps([["1", "2", "3"], ["4"], ["5"]]))
    search = task.Search(batch=2, beam=1, length=12, threads=1)
    tokens = torch.from_numpy(onnx.translator(tmp_path, search)())
    assert tokens.shape == (2, 12)
    ids = torch.from_numpy(task.source_ids(tmp_path, search))
    before = torch.cat((torch.full((2, 1), PAD), tokens[:, :-1]), 1)
    model = AutoModelForSeq2SeqLM.from_pretrained(page_folder / "marian")
    with torch.no_grad():
        scores = model(ids, attention_mask=ids.ne(PAD).long(), decoder_input_ids=before).logits
    assert scores.argmax(-1).eq(PAD).any()
    scores[..., PAD] = -torch.inf
    assert torch.equal(scores.argmax(-1), tokens)
    assert len(tokens.unique()) > 1
    with pytest.raises(ValueError, match=r"beam 5 is not implemented.*allowed: 1"):
        onnx.translator(tmp_path, replace(search, beam=5))


@pytest.mark.slow
def test_graph_classifies_an_image_as_the_model_does(page_folder, tmp_path):
    """Though it was turned by a camera."""
    image = Image.open(page_folder / "image.png").convert("RGB")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # a quarter to the right
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "image.png", exif=exif)
    processor = transformers.AutoImageProcessor.from_pretrained(page_folder / "vit")
    inputs = processor(image, do_resize=False, return_tensors="pt")
    model = transformers.AutoModelForImageClassification.from_pretrained(page_folder / "vit")
    with torch.no_grad():
        scores = model(**inputs).logits[0]
    best, second = scores.topk(2).values
    assert best - second > 1e-2
    (tmp_path / "classifier").symlink_to(page_folder / "classifier")
    printed = run_program(program("image.png"), cwd=tmp_path)
    assert int(printed) == scores.argmax()


class Session:
    """Stands for a graph; keeps what it is given."""

    def __init__(self, path):
        Session.feeds = None

    def run(self, names, feeds):
        Session.feeds = feeds["pixel_values"]
        return [np.zeros((1, 2))]


SQUARE, TALL, BORDERS = ({"height": h, "width": w} for h, w in ((24, 24), (32, 16), (48, 20)))
PREPARED = {
    "of one size": ViTImageProcessor(size=TALL, resample=Image.Resampling.BICUBIC),
    "of their size": ViTImageProcessor(do_resize=False),
    "not normalised": ViTImageProcessor(size=SQUARE, do_normalize=False),
    "as they come": ViTImageProcessor(do_resize=False, do_rescale=False, do_normalize=False),
    "of another scale": ViTImageProcessor(size=SQUARE, rescale_factor=1 / 127.5),
    "short edge, cut": BitImageProcessor(size={"shortest_edge": 27}, crop_size=SQUARE),
    "cut and padded": BitImageProcessor(size={"shortest_edge": 29}, crop_size=BORDERS),
}


@pytest.mark.parametrize("processor", PREPARED.values(), ids=PREPARED)
def test_images_are_prepared_as_the_image_processor_says(processor, tmp_path, monkeypatch):
    processor.save_pretrained(tmp_path / "classifier")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onnxruntime.InferenceSession", Session)
    rng = np.random.default_rng(0)
    for size in ((40, 57), (57, 40)):
        noise = rng.integers(256, size=(*size, 3), dtype=np.uint8)
        Image.fromarray(noise).save("image.png")
        exec(program("image.png"), {})
        with Image.open("image.png") as image:
            expected = processor(image, return_tensors="np")["pixel_values"]
        assert Session.feeds.shape == expected.shape
        np.testing.assert_allclose(Session.feeds, expected, atol=1e-5)


RAMP = np.arange(240).reshape(12, 20)
WIDE = {
    "16 bits": (RAMP * 257).astype(np.uint16),
    "floats up to 1": (RAMP / 255).astype(np.float32),
    "floats up to 255": RAMP.astype(np.float32),
    "too large": RAMP.astype(np.int32) * 1000,
    "below 0": (RAMP / 255 - 0.5).astype(np.float32),
    "no number": np.where(RAMP > 9, np.nan, RAMP).astype(np.float32),
}


@pytest.mark.parametrize("name", WIDE)
def test_images_of_more_than_8_bits_are_scaled_as_in_the_recipe(name, tmp_path, monkeypatch):
    processor = PREPARED["of one size"]
    processor.save_pretrained(tmp_path / "classifier")
    monkeypatch.chdir(tmp_path)
    Image.fromarray(WIDE[name]).save("image.png", "TIFF")
    monkeypatch.setattr("onnxruntime.InferenceSession", Session)
    with Image.open("image.png") as image:
        try:
            scaled = eight_bits(image).convert("RGB")
        except ValueError:
            with pytest.raises(SystemExit, match=r"image\.png has values of .* to "):
                exec(program("image.png"), {})
            return
    exec(program("image.png"), {})
    expected = processor(scaled, return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(Session.feeds, expected, atol=1e-5)


def test_no_program_cuts_inputs_without_a_word():
    """By its default CTranslate2 does, after 1024 tokens."""
    calls = re.findall(r"\.(?:translate|score)_batch\((.*?)\)\n", PAGE.read_text("utf-8"), re.S)
    assert len(calls) == 2
    assert all("max_input_length=0" in call for call in calls)
