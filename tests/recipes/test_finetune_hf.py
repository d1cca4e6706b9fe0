"""The Hugging Face recipes through their command lines, at a tiny scale."""

import argparse
import contextlib
import json
import re
import shlex
import socket

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

import hf_models
from recipes.asr import finetune_hf as asr
from recipes.asr import whisper
from recipes.lab import hf_checkpoints, hf_training
from recipes.lab.steps import CommandError
from recipes.mt import finetune_hf as mt
from recipes.mt.number_lists import make_number_lists
from recipes.vit import data as vit_data
from recipes.vit import finetune_hf as vit
from tests.support.plots import COLOURS, assert_lines
from tests.support.speech_data import write, write_text
from tests.support.tables import read_scores

QUICK = ("--max_steps", 4, "--save_steps", 2, "--per_device_eval_batch_size", 128)
TINY_MT = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layers": 1}
TINY_VIT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


@pytest.mark.slow
def test_built_in_images_are_classified(run_cli, repo_root, tmp_path):
    command = ("python", repo_root / "recipes/vit/finetune_hf.py", "--output", "out", *QUICK)
    command += ("--model-config", json.dumps(TINY_VIT), "--compare", "cape")
    output = run_cli(*command, cwd=tmp_path).stdout
    assert "| cape | 0." in output
    report = (tmp_path / "out/scores.md").read_text()
    assert f"`{shlex.join(map(str, command))}`" in report  # can be pasted
    scores = read_scores(tmp_path / "out", "accuracy")
    assert list(scores["cape"]) == ["16", "20", "24", "32", "48"]
    assert all(0 <= value <= 1 for value in scores["cape"].values())
    assert_lines(tmp_path / "out/scores.png", COLOURS[:1])
    config = json.loads((tmp_path / "out/cape/config.json").read_text())
    assert config["position_embedding"]["type"] == "cape"


def test_alpha_is_counted_with_and_without_ends_of_sentences():
    """The end of sentence is 0; it is the last token of what is not cut."""
    rows = [{"input_ids": [5, 6, 0], "labels": [7, 0]}, {"input_ids": [5, 6], "labels": [7, 8, 0]}]
    tokenizer = argparse.Namespace(eos_token_id=0)
    assert str(mt.count_alpha(rows, tokenizer, eos=True)) == "5/5"
    assert str(mt.count_alpha(rows, tokenizer, eos=False)) == "3/4"


@pytest.mark.slow
def test_built_in_translation_is_scored_by_length(tmp_path, monkeypatch, capsys):
    """From fewer lists here, because their tokens take longer than the training."""
    fewer = {"train": 300, "valid": 1, "test": 24}
    monkeypatch.setattr(mt, "make_number_lists", lambda seed, _: make_number_lists(seed, fewer))
    words = ["--output", str(tmp_path / "out"), *map(str, QUICK)]
    words += ["--model-config", json.dumps(TINY_MT), "--position-embedding", "cape"]
    mt.main(words)
    alpha = re.search(r"alpha = (\d+/\d+)", capsys.readouterr().out)[1]
    scores = read_scores(tmp_path / "out", "exact_match")
    assert list(scores["cape"]) == [*map(str, range(1, 13)), "all"]
    config = json.loads((tmp_path / "out/cape/config.json").read_text())
    assert config["position_embedding"]["source_scale"] == alpha
    assert (tmp_path / "out/cape/source.spm").exists()


@pytest.mark.slow
def test_translation_of_own_files_from_a_checkpoint(run_cli, repo_root, tmp_path, monkeypatch):
    """Trained from scratch on csv, then its checkpoint switched to another type."""
    rows = [f'"a b c {n}","x y {n}"' for n in range(40)]
    (tmp_path / "train.csv").write_text("\n".join(["en,de", *rows]) + "\n")
    common = ["--train-file", "train.csv", *map(str, QUICK)]
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 1}
    first = ["--model-config", json.dumps({**TINY_MT, **heads}), "--vocab-size", "30"]
    first += ["--position-embedding", "sinpos", "--output", "first"]
    monkeypatch.chdir(tmp_path)
    run_cli("python", repo_root / "recipes/mt/finetune_hf.py", *common, *first)
    second = ["--model", "first/sinpos", "--position-embedding", "cape", "--output", "second"]
    second += ["--switch-updates", "0", "50%", "--switch-scratch", "--seed", "7"]
    mt.main([*common, *second])
    rows = ["cape, 0 updates", "cape, 2 updates", "cape from scratch, 6 updates"]
    stock = [f"sinpos, {number} updates" for number in (0, 2)]
    assert list(read_scores(tmp_path / "second", "bleu")) == [*stock, *rows]
    gain = rf"\n\* {rows[1]}: .*\(against {stock[1]}\), \d+ s of training\n"
    assert re.search(gain, (tmp_path / "second/scores.md").read_text())
    folders = ["first/sinpos", *(f"second/{hf_training.folder_name(row)}" for row in rows)]
    saved = (load_file(f"{folder}/model.safetensors") for folder in folders)
    first, *others = (weights["model.encoder.layers.0.fc1.weight"] for weights in saved)
    moved = [float((other - first).abs().max()) for other in others]
    assert moved[0] == 0 < moved[1] < 0.01 < moved[2]
    assert '"type": "cape"' in (tmp_path / folders[2] / "config.json").read_text()


def test_what_was_stored_in_half_precision_is_trained_in_single(tmp_path):
    model = vit.CapeViTForImageClassification(vit.CapeViTConfig(image_size=32, **TINY_VIT))
    model.bfloat16().save_pretrained(tmp_path)
    again = hf_checkpoints.load_model(type(model), str(tmp_path), {"type": "cape"})
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}


def test_crops_cover_shares_and_places():
    image = torch.arange(40 * 30.0).reshape(1, 40, 30)
    data = vit_data.Images([image] * 200, lambda item: (item, 0), ["a"])
    data.crop = (0.25, 1.0)
    crops = [data[index][0] for index in range(200)]
    shares = [crop[0].numel() / 1200 for crop in crops]
    assert 0.2 < min(shares) < 0.35 < 0.9 < max(shares) <= 1
    for crop in crops[:20]:  # a rectangle of the image
        top, left = divmod(int(crop[0, 0, 0]), 30)
        height, width = crop.shape[1:]
        assert torch.equal(crop, image[:, top : top + height, left : left + width])
    assert len({float(crop[0, 0, 0]) for crop in crops}) > 50


BAD = [
    (vit, ["--no_such_flag", "1"], "unknown option --no_such_flag"),
    (vit, ["--model-config", "{"], "--model-config"),
    (vit, ["--train-sizes", "16", "32"], "--univit"),
    (vit, ["--univit", "--train-sizes", "16"], "--train-sizes 16: --univit needs several sizes"),
    (vit, ["--seeds", "1", "2", "--seed", "3"], "leave --seed out"),
    (vit, ["--per_device_train_batch_size", "0"], "--per_device_train_batch_size 0"),
    (vit, ["--logging_steps", "0"], "--logging_steps 0"),
    (vit, ["--model-config", '{"patch_size": 0}'], "patch_size 0 is not allowed"),
    (vit, ["--crop", "0.5", "0.1"], "--crop 0.5 0.1 is not allowed"),
    (vit, ["--test-sizes", "2"], "size 2 is smaller than a patch"),
    (vit, ["--rand-augment", "strong"], "--rand-augment strong is unknown"),
    (vit, ["--model", "gone", "--preset", "vit_s"], "--preset has no effect"),
    (vit, ["--model", "gone", "--scale-patches"], "--scale-patches has no effect"),
    (vit, ["--train_sampling_strategy", "sequential"], "--train_sampling_strategy sequential"),
    (mt, ["--train-file", "gone.csv"], "gone.csv: no such file"),
    (mt, ["--train-file", __file__], "unknown format"),
]


@pytest.mark.parametrize(("program", "words", "message"), BAD, ids=lambda value: str(value)[-40:])
def test_bad_input_is_refused(program, words, message, tmp_path):
    with pytest.raises(CommandError, match=re.escape(message)):
        program.main([*words, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


FOREIGN = [(mt, "M2M100"), (mt, "Llama"), (vit, "DeiT"), (asr, "Wav2Vec2"), (whisper, "Bart")]
ALLOWED = {
    whisper: "whisper",
    mt: "marian, cape_marian",
    vit: "vit, cape_vit",
    asr: "speech_to_text, whisper, cape_speech_ctc, cape_speech_to_text, cape_whisper",
}


@pytest.mark.parametrize(("program", "name"), FOREIGN, ids=lambda value: str(value)[-12:])
def test_models_of_other_types_are_refused(program, name, tmp_path):
    """Refusals come before anything is read or written; the weights would fit in part."""
    config = getattr(transformers, f"{name}Config")()
    config.save_pretrained(tmp_path / "model")
    message = f"is of the type {config.model_type}; allowed: {ALLOWED[program]}"
    with pytest.raises(CommandError, match=re.escape(message)):
        program.main(["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("program", "config", "what"),
    [
        (mt, transformers.MarianConfig(), "tokenizer"),
        (asr, hf_models.CapeSpeechConfig(), "processor"),
    ],
)
def test_model_without_tokenizer_is_refused(program, config, what, tmp_path):
    config.save_pretrained(tmp_path / "model")
    with pytest.raises(CommandError, match=rf"model: has no {what} that can be read .*; put its"):
        program.main(["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize("damage", ["truncated", "other sizes"])
def test_damaged_weights_are_refused(damage, tmp_path):
    model_class = vit.CapeViTForImageClassification
    model = model_class(vit.CapeViTConfig(image_size=16, patch_size=8, **TINY_VIT))
    model.save_pretrained(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:300])
        message = "cannot be loaded: .*header"
    else:
        sizes = json.loads(config.read_text())
        config.write_text(json.dumps({**sizes, "intermediate_size": 32}))
        message = "the shapes of .*mlp.* differ from its config.json"
    args = argparse.Namespace(model=str(tmp_path), drop_path=None)
    with pytest.raises(CommandError, match=f"--model .*{message}"):
        vit.build_model(args, {"type": "nopos"}, {"image_size": 16}, ["a", "b"])


def test_a_trained_model_is_not_taken_for_another(tmp_path, capsys):
    """Neither a model of other sizes, nor a model with a shorter training."""
    words = ["--position-embedding", "nopos", "--test-sizes", "16", "--output", str(tmp_path)]
    words += ["--per_device_train_batch_size", "2", "--max_steps"]
    vit.main([*words, "2"])
    weights = (tmp_path / "nopos/model.safetensors").stat().st_mtime_ns
    with pytest.raises(CommandError, match="model_config.*give another --output"):
        vit.main([*words, "2", "--preset", "vit_ti"])
    with pytest.raises(CommandError, match="data_seed None, now 3"):
        vit.main([*words, "2", "--data_seed", "3"])
    with pytest.raises(CommandError, match="--max_steps 1: the model in .* was trained for 2"):
        vit.main([*words, "1"])
    # the output and what is tested make no other model; nor do options of a newer transformers
    record = tmp_path / "nopos/settings.json"
    settings = json.loads(record.read_text())
    assert settings.pop("adam_beta2") == 0.999
    record.write_text(json.dumps(settings))
    words[words.index("16")] = "20"
    vit.main([*words, "2", "--logging_steps", "1"])
    with pytest.raises(CommandError, match="flip False, now True"):
        vit.main([*words, "2", "--flip"])
    assert (tmp_path / "nopos/model.safetensors").stat().st_mtime_ns == weights


def test_new_options_are_recorded_without_being_named(tmp_path):
    parser = hf_training.make_parser("", "image", (), "out")
    parser.add_argument("--brand-new", type=int, default=0)
    args, training = hf_training.parse(parser, (), ["--brand-new", "7", "--output", str(tmp_path)])
    made_with = hf_training.recorded_options({"type": "nopos"}, args, training)
    assert (made_with["brand_new"], args.defaults["brand_new"]) == (7, 0)
    assert made_with["position_embedding"] == {"type": "nopos"}
    assert made_with.keys() <= {*args.defaults, "position_embedding"}
    hyperparameters = {"learning_rate", "seed", "weight_decay", "warmup_steps", "optim", "fp16"}
    assert hyperparameters | {"model", "model_config"} < made_with.keys()
    assert not {"output", "output_dir", "compare", "max_steps", "defaults"} & made_with.keys()


# Each process imports once; a training is a fork of it, with a port for itself.
SPY = """
import gc, json, os, shutil, sys
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
from hf_models import CapeViTModel
from recipes.asr import finetune_hf as asr
from recipes.lab import hf_training
from recipes.vit import finetune_hf as vit

stock, train, parse, report = CapeViTModel.forward, hf_training.train, vit.parse, vit.report
kept = []

def note(what, *values):
    with open(f"{name}-{what}{os.environ['RANK']}", "a") as file:
        print(*values, file=file)

def forward(self, pixel_values, *args, **kwargs):
    if self.training:
        note("seen", pixel_values.shape[-1], pixel_values.double().sum().item())
    return stock(self, pixel_values, *args, **kwargs)

class Trainer(vit.ImageTrainer):
    def training_step(self, model, *args):
        assert type(model) is DistributedDataParallel
        return super().training_step(model, *args)

def keep(trainer, folder, **options):  # as recipes do that need more than its model
    kept.append(trainer)
    train(trainer, folder, **options)

def parse_and_look(*args):
    options, training = parse(*args)
    assert training.world_size == 2  # what is written by the first process needs it
    return options, training

def count_and_report(*args, **kwargs):
    note("left", sum(type(x) is DistributedDataParallel for x in gc.get_objects()))
    report(*args, **kwargs)

def interrupt():  # as if the training had ended in its second epoch
    again = Path(shutil.copytree("whole", "again"), "cape")
    shutil.rmtree(again / "checkpoint-8")
    for file in ("model.safetensors", "train_results.json"):
        (again / file).unlink()

for name, port, words in json.loads(Path("trainings.json").read_text()):
    if os.fork() == 0:
        break
    if status := os.wait()[1]:
        sys.exit(f"{name}: {status}")
else:
    sys.exit()
os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
sys.argv[1:] = [*words, "--output", name]
if name == "speech":
    asr.main()
else:
    if name == "again" and os.environ["RANK"] == "0":
        interrupt()
    CapeViTModel.forward, hf_training.train = forward, keep
    vit.ImageTrainer, vit.parse, vit.report = Trainer, parse_and_look, count_and_report
    vit.main()
"""


def write_images(folder):
    """20 images of two classes in training, 4 in the test."""
    for split, number in (("train", 20), ("val", 4)):
        for n in range(number):
            target = folder / split / ("dark", "light")[n % 2]
            target.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20 + n, 16), (200 * (n % 2), 10 * n, n)).save(target / f"{n}.png")


def write_recordings(folder):
    for split, count in (("train", 20), ("test", 5)):
        for n in range(count):
            write(folder / split / f"{n:03}.wav", 0.3 + 0.05 * n)
            write_text(folder / split / f"{n:03}.txt", "a b c d e f"[: 3 + 2 * (n % 5)])


SPEECH = ["--dataset", "recordings", "--use_cpu", *map(str, QUICK), "--padding-free", "3"]
SPEECH += ["--position-embedding", "cape", "--bf16", "--vocab-size", "14", "--max-seconds", "1.2"]
SPEECH += ["--gradient_accumulation_steps", "2", "--model-config"]
SPEECH += ['{"d_model": 16, "encoder_layers": 1, "encoder_ffn_dim": 16}']


@pytest.fixture(scope="module")
def together(run_cli, repo_root, tmp_path_factory):
    """The folder in which two processes train images, whole and resumed, and speech."""
    folder = tmp_path_factory.mktemp("together")
    write_images(folder / "images")
    write_recordings(folder / "recordings")
    sizes = {**TINY_VIT, "image_size": 16, "patch_size": 8, "num_attention_heads": 2}
    words = [
        "--dataset", "images", "--position-embedding", "cape", "--use_cpu",
        "--model-config", json.dumps(sizes), "--univit", "--train-sizes", 16, 24, 32, 40, 48,
        "--test-sizes", 16, 24, "--crop", 0.3, 1, "--flip", "--mixup", 0.8, "--cutmix", 1,
        "--drop-path", 0.2, "--random-erasing", 0.5, "--lr_scheduler_type", "constant",
        "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2,
        "--max_steps", 8, "--save_steps", 5, "--save_total_limit", 2, "--seed", 3,
    ]  # fmt: skip
    images = list(map(str, words))
    with contextlib.ExitStack() as free:
        sockets = [free.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        ports = [listener.getsockname()[1] for listener in sockets]
    trainings = zip(("whole", "again", "speech"), ports, (images, images, SPEECH), strict=True)
    (folder / "trainings.json").write_text(json.dumps([*trainings]))
    (folder / "spy.py").write_text(SPY)
    two = repo_root / "recipes/accelerate/cpu_two_processes.yaml"
    how = {"cwd": folder, "env": {"HF_HOME": str(folder / "cache")}}
    run_cli("accelerate", "launch", "--config_file", two, "spy.py", **how)
    return folder


@pytest.mark.slow
def test_two_processes_see_the_same_sizes_also_after_resuming(together):
    """Resumed from the checkpoint in the second epoch, where accelerate does not reach the sampler.
    Three updates per epoch, the last of one micro-batch. Wrappers of several processes go before
    their group: otherwise a program may never end, see recipes.lab.hf_training.train."""

    def noted(name):
        return [(together / f"{name}{rank}").read_text().splitlines() for rank in (0, 1)]

    whole = noted("whole-seen")
    # updates of 2, 2, 1, 2, 2 and then 1, 2, 2 micro-batches
    assert noted("again-seen") == [lines[9:] for lines in whole]
    sizes, contents = ([[line.split()[n] for line in lines] for lines in whole] for n in (0, 1))
    first, second = sizes
    assert first == second
    assert len(first) == 14
    assert (first[0::5], first[2::5]) == (first[1::5], first[3::5])
    assert len(set(first)) > 2
    assert not set(contents[0]) & set(contents[1])
    assert noted("whole-left") == noted("again-left") == [["0"], ["0"]]
    weights = [together / name / "cape/model.safetensors" for name in ("whole", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert list(read_scores(together / "again", "accuracy")["cape"]) == ["16", "24"]


@pytest.mark.slow
def test_two_processes_share_the_evaluation(together, monkeypatch):
    """The same trained model scores alike, whether one process or two recognise; with subwords,
    mixed precision and accumulated gradients."""
    hypotheses = together / "speech/cape/hypotheses.tsv"
    text = hypotheses.read_text()
    assert len(text.splitlines()) == 6
    hypotheses.unlink()
    monkeypatch.chdir(together)
    asr.main([*SPEECH, "--output", "speech"])  # finds the training finished
    assert hypotheses.read_text() == text
    processor = transformers.AutoProcessor.from_pretrained(together / "speech/cape")
    assert type(processor.tokenizer) is hf_models.CapeSpeechTokenizer
    assert len(processor.tokenizer) <= 14
