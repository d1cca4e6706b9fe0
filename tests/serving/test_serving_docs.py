"""The commands and programs of docs/serving.md: every one runs, programs where there is nothing but
the engines, and they give what the hosts give."""

import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from fairseq import options, tasks
from fairseq.data import Dictionary
from fairseq.data.data_utils import collate_tokens
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from PIL import ExifTags, Image
from torch.nn import functional as F
from transformers import (
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BitImageProcessor,
    ViTImageProcessor,
)

from cape_plugins.cli import main
from fairseq_user_dir.serving.source_checkpoint import load_source
from fairseq_user_dir.serving.source_checkpoint import score as score_by_fairseq
from fairseq_user_dir.serving.source_checkpoint import translate as translate_by_fairseq
from hf_models.convert import convert
from recipes.lab.subwords import SentencePiece
from recipes.vit.data import eight_bits
from tests.support import served
from tests.support.engines import engine_python, run_program
from tests.support.fairseq_models import EOS, PAD, encode, load
from tests.support.hf import VIT
from tests.support.translation_models import SIZES, save_fairseq
from tests.support.whisper import save_with_processor

ENGINES = ("ctranslate2", "faster_whisper", "onnxruntime")
for _engine in ENGINES:
    pytest.importorskip(_engine)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
DISTRIBUTIONS = (*(name.replace("_", "-") for name in ENGINES), "sentencepiece", "pillow")
SENTENCES = ["three, forty-one.", "seventeen."]  # of the kind that the models are trained on


def commands():
    """The lines of the page that export."""
    return re.findall(r"^    cape-plugins (export .*)$", PAGE.read_text("utf-8"), re.MULTILINE)


def program(word):
    """The program of the page that has this word."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M)
    (code,) = [block for block in blocks if word in block]
    return code


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with everything that the page names, and what its commands have written."""
    folder = tmp_path_factory.mktemp("serving")
    corpus = served.Corpus(folder)
    shutil.copy(corpus.spm, folder / "sentencepiece.model")
    save_dictionaries(corpus, folder / "binary")
    save_translation(corpus, folder / "checkpoint_best.pt")
    save_language_model(corpus, folder / "binary", folder / "language_model.pt")
    shutil.copytree(folder / "binary", folder / "data-bin")
    (folder / "input.en").write_text("\n".join(SENTENCES) + "\n", encoding="utf-8")
    pieces = SentencePiece(corpus.spm)
    lines = [pieces.encode(source) for source, _ in corpus.train[:5]]
    (folder / "test.en").write_text("\n".join(lines) + "\n", encoding="utf-8")
    save_marian(corpus, folder / "marian")
    save_vit(folder / "vit")
    save_with_processor(folder / "whisper-stock")
    convert(str(folder / "whisper-stock"), folder / "whisper", {"type": "sinpos"})
    rng = np.random.default_rng(0)
    Image.fromarray(rng.integers(256, size=(40, 56, 3), dtype=np.uint8)).save(folder / "image.png")
    soundfile.write(folder / "recording.wav", 0.1 * rng.standard_normal(16000), 16000)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in commands():
            main(shlex.split(command))
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    return engine_python(tmp_path_factory.mktemp("engines") / "venv", *DISTRIBUTIONS)


# ---- models --------------------------------------------------------------------------------------


def save_dictionaries(corpus, folder):
    folder.mkdir()
    dictionary = Dictionary()
    for piece in corpus.pieces:
        dictionary.add_symbol(piece)
    for name in ("dict.en.txt", "dict.de.txt", "dict.txt"):
        dictionary.save(str(folder / name))


def shifted(rows):
    """What a decoder reads before each token."""
    return collate_tokens(rows, PAD, EOS, move_eos_to_beginning=True)


def teach(model, loss):
    """Trains for seconds on batches of 32 rows."""
    optimizer = torch.optim.Adam(model.train().parameters(), 4e-3)
    for step in range(80):
        optimizer.zero_grad()
        loss(range(32 * step, 32 * step + 32)).backward()
        optimizer.step()


def save_translation(corpus, path):
    """Trains for seconds, so that translations end."""
    flags = ("--position-embedding", "cape", "--position-source-scale", "1.25", "--dropout", 0)
    save_fairseq(corpus.folder, path, *flags)
    model, task = load(path, corpus.folder / "binary")
    pieces = SentencePiece(corpus.spm)
    rows = [
        [encode(task.source_dictionary, pieces.encode(text)) for text in pair]
        for pair in corpus.train
    ]

    def loss(numbers):
        batch = [rows[number % len(rows)] for number in numbers]
        source = collate_tokens([row for row, _ in batch], PAD, left_pad=True)
        target = collate_tokens([row for _, row in batch], PAD)
        before = shifted([row for _, row in batch])
        logits, _ = model(source, source.ne(PAD).sum(1), before)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)

    teach(model, loss)
    state = torch.load(path, weights_only=True)
    torch.save({**state, "model": model.state_dict()}, path)


def save_language_model(corpus, data, path):
    """Trains for seconds, so that no text has padding or another symbol that is no token."""
    sizes = [f"--decoder-{name}={value}" for name, value in SIZES.items()]
    argv = [str(data), "--arch", "cape_transformer_lm", "--position-embedding", "shape", *sizes]
    parser = options.get_training_parser("language_modeling")
    words = options.parse_args_and_arch(parser, [*argv, "--max-tokens", "100"])
    cfg = convert_namespace_to_omegaconf(words)
    task = tasks.setup_task(cfg.task)
    model, pieces = task.build_model(cfg.model), SentencePiece(corpus.spm)
    rows = [encode(task.dictionary, pieces.encode(text)) for _, text in corpus.train]

    def loss(numbers):
        batch = [rows[number % len(rows)] for number in numbers]
        target = collate_tokens(batch, PAD)
        logits, _ = model(shifted(batch))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD)

    teach(model, loss)
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}
    state = {"args": None, "cfg": cfg, "model": model.state_dict()}
    state["optimizer_history"] = [{**history, "num_updates": 1}]
    torch.save({**state, "extra_state": {"train_iterator": {"epoch": 1}}}, path)


def save_marian(corpus, folder):
    tokenizer = corpus.tokenizer("marian")
    model = served.build("marian", tokenizer, {"type": "cape", "source_scale": 1.25})
    model = served.train(model, tokenizer, corpus.train, 80)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_vit(folder):
    VIT.build({"type": "cape"}).save_pretrained(folder)
    # the model takes images of any size
    ViTImageProcessor(do_resize=False).save_pretrained(folder)


# ---- programs ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_translator_gives_the_translations_of_fairseq(place, python):
    printed = run_program(python, program("translate_batch"), cwd=place).splitlines()
    pieces = SentencePiece(place / "sentencepiece.model")
    source = load_source(place / "checkpoint_best.pt", str(place / "data-bin"))
    lines = [pieces.encode(sentence) for sentence in SENTENCES]
    hypotheses = translate_by_fairseq(source, lines, 200)
    assert all(hypothesis.ended and hypothesis.tokens for hypothesis in hypotheses)
    assert printed == [pieces.decode(" ".join(hypothesis.tokens)) for hypothesis in hypotheses]
    assert printed[0] != printed[1]


@pytest.mark.slow
def test_generator_continues_and_scores_texts(place, python):
    text, score = run_program(python, program("generate_batch"), cwd=place).splitlines()
    source = load_source(place / "language_model.pt", str(place / "data-bin"))
    assert text
    (expected,) = score_by_fairseq(source, [text])
    # the engine scores the text without its end
    assert float(score) == pytest.approx(sum(expected[:-1]), abs=1e-4)


@pytest.mark.slow
def test_transcription_has_times_and_text(place, python):
    printed = run_program(python, program("faster_whisper"), cwd=place)
    assert re.match(r"\d+\.\d\d \d+\.\d\d ", printed)


@pytest.mark.slow
def test_graphs_translate_as_the_model_does(place, python):
    code = program("encoder, decoder")
    (sentence,) = re.findall(r'encode\("(.*?)"', code)
    model = AutoModelForSeq2SeqLM.from_pretrained(place / "marian")
    tokenizer = AutoTokenizer.from_pretrained(place / "marian")
    given = tokenizer(sentence, return_tensors="pt")
    tokens = model.generate(**given, num_beams=1, do_sample=False, max_new_tokens=256)[0]
    assert 2 < len(tokens) < 256
    assert tokens[-1] == tokenizer.eos_token_id
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert run_program(python, code, cwd=place).strip() == expected


def turned(image, path):
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # a quarter to the right
    image.transpose(Image.Transpose.ROTATE_90).save(path, exif=exif)


def wide(image, path):
    Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257).save(path)


def floats(image, path):
    Image.fromarray(np.asarray(image.convert("L")) / np.float32(255)).save(path, "TIFF")


WRITERS = {
    "8 bits": (lambda image, path: image.save(path), "RGB"),
    "turned by EXIF": (turned, "RGB"),
    "16 bits": (wide, "L"),
    "floats": (floats, "L"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_graph_classifies_an_image_as_the_model_does(place, python, name, tmp_path):
    write, mode = WRITERS[name]
    image = Image.open(place / "image.png").convert("RGB")
    write(image, tmp_path / "image.png")
    processor = AutoImageProcessor.from_pretrained(place / "vit")
    seen = image.convert(mode).convert("RGB")
    given = processor(seen, do_resize=False, return_tensors="pt")
    with torch.no_grad():
        scores = AutoModelForImageClassification.from_pretrained(place / "vit")(**given).logits[0]
    best, second = scores.topk(2).values
    assert best - second > 1e-2
    (tmp_path / "classifier").symlink_to(place / "classifier")
    printed = run_program(python, program("image.png"), cwd=tmp_path)
    assert int(printed) == scores.argmax()


class Session:
    """Stands for a graph; keeps what it is given."""

    def __init__(self, path):
        Session.given = None

    def run(self, names, given):
        Session.given = given["pixel_values"]
        return [np.zeros((1, 2))]


SQUARE, BORDERS = {"height": 24, "width": 24}, {"height": 48, "width": 20}
PREPARED = {
    "of one size": ViTImageProcessor(size={"height": 32, "width": 16}),
    "bicubic": ViTImageProcessor(size=SQUARE, resample=Image.Resampling.BICUBIC),
    "of their size": ViTImageProcessor(do_resize=False),
    "not normalised": ViTImageProcessor(size=SQUARE, do_normalize=False),
    "not scaled": ViTImageProcessor(size=SQUARE, do_rescale=False),
    "as they come": ViTImageProcessor(do_resize=False, do_rescale=False, do_normalize=False),
    "of another scale": ViTImageProcessor(size=SQUARE, rescale_factor=1 / 127.5),
    "short edge, cut": BitImageProcessor(size={"shortest_edge": 27}, crop_size=SQUARE),
    "cut and padded": BitImageProcessor(size={"shortest_edge": 29}, crop_size=BORDERS),
    "cut alone": BitImageProcessor(do_resize=False, crop_size=SQUARE),
}


@pytest.mark.parametrize("processor", PREPARED.values(), ids=PREPARED)
def test_images_are_prepared_as_the_image_processor_says(processor, tmp_path, monkeypatch):
    (tmp_path / "classifier").mkdir()
    processor.save_pretrained(tmp_path / "classifier")
    rng = np.random.default_rng(0)
    for size in ((40, 57), (57, 40)):
        noise = rng.integers(256, size=(*size, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "image.png")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("onnxruntime.InferenceSession", Session)
        exec(program("image.png"), {})
        with Image.open("image.png") as image:
            expected = processor(image, return_tensors="np")["pixel_values"]
        assert Session.given.shape == expected.shape
        np.testing.assert_allclose(Session.given, expected, atol=1e-5)


RAMP = np.arange(240).reshape(12, 20)
WIDE = {
    "16 bits": (RAMP * 257).astype(np.uint16),
    "32 bits": (RAMP * 257).astype(np.int32),
    "floats up to 1": (RAMP / 255).astype(np.float32),
    "floats up to 255": RAMP.astype(np.float32),
    "too large": RAMP.astype(np.int32) * 1000,
    "too large, floats": RAMP.astype(np.float32) * 257,
    "below 0": (RAMP / 255 - 0.5).astype(np.float32),
    "no number": np.where(RAMP > 9, np.nan, RAMP).astype(np.float32),
}


@pytest.mark.parametrize("name", WIDE)
def test_images_of_more_than_8_bits_are_scaled_as_in_the_recipe(name, tmp_path, monkeypatch):
    processor = PREPARED["of one size"]
    (tmp_path / "classifier").mkdir()
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
    np.testing.assert_allclose(Session.given, expected, atol=1e-5)


@pytest.mark.slow
def test_every_command_has_written_a_folder_with_its_readme(place):
    folders = [shlex.split(command)[3] for command in commands()]
    assert len({*folders}) == len(folders) >= 8
    assert all((place / folder / "README.md").is_file() for folder in folders)


def test_no_program_cuts_inputs_without_a_word():
    """By its default CTranslate2 does, after 1024 tokens."""
    calls = re.findall(r"\.(?:translate|score)_batch\((.*?)\)\n", PAGE.read_text("utf-8"), re.S)
    assert len(calls) == 2
    assert all("max_input_length=0" in call for call in calls)
