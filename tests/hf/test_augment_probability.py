"""Samples that training leaves as they are, in models of transformers: encoder and decoder alike,
nothing at probability 0, stored with the model, resumed bit for bit."""

import json
import math
import socket

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments

import hf_models
from cape_plugins import PositionEncoder
from tests.hf.test_hosts import Samples
from tests.support.hf import ALPHA, FAMILIES, OF_FAMILY, STACKS, VARIANTS, batch, loss, seam
from tests.support.whisper import LABELS, MASK, RAGGED, make_stock

HALF = {"augment_probability": 0.5}
RANDOM_TYPES = ("shape", "cape", "randpos", "rfs")
RANDOM = [(family, name) for family in STACKS for name in VARIANTS[family] if name in RANDOM_TYPES]
WITH_DECODER = [
    ("marian", {"type": "shape"}),
    ("marian", {"type": "cape", "source_scale": ALPHA, "synchronize": False}),
    ("speech_to_text", {"type": "cape"}),
    ("speech_to_text", {"type": "shape"}),
]


@pytest.fixture
def drawn(monkeypatch):
    """All draws of the test, in order."""
    draws, draw = [], PositionEncoder.draw

    def noted(*args, **kwargs):
        draws.append(draw(*args, **kwargs))
        return draws[-1]

    monkeypatch.setattr(PositionEncoder, "draw", noted)
    return draws


@pytest.mark.parametrize(("family", "settings"), WITH_DECODER)
def test_encoder_and_decoder_that_draw_for_themselves_are_augmented_alike(family, settings, drawn):
    model, inputs = FAMILIES[family].build({**settings, **HALF}).train(), batch(family)
    assert_augmented_alike(model, inputs, drawn)


def test_encoder_and_decoder_of_whisper_are_augmented_alike(drawn):
    cape = {"type": "cape"}
    model = hf_models.switch(make_stock(), {**cape, **HALF}, decoder_position_embedding=cape)
    inputs = {"input_features": RAGGED, "attention_mask": MASK, "labels": LABELS}
    assert_augmented_alike(model.train(), inputs, drawn)


def assert_augmented_alike(model, inputs, drawn):
    """In forwards that draw twice."""
    with torch.no_grad():
        for _ in range(20):
            model(**inputs)
    assert len(drawn) == 40
    for source, target in zip(drawn[::2], drawn[1::2], strict=True):
        assert torch.equal(source.augmented, target.augmented)
        for draw in (source, target):
            number = draw.offset if draw.shift is None else draw.shift
            assert not number[~draw.augmented].any()
    every = torch.cat([draw.augmented.float() for draw in drawn[::2]])
    assert abs(every.mean() - 0.5) < 4 * math.sqrt(0.25 / len(every))


@pytest.mark.parametrize(("family", "name"), RANDOM)
def test_every_stack_leaves_its_share(family, name, drawn):
    settings = {**OF_FAMILY[family][name], **HALF}
    model, inputs = FAMILIES[family].build(settings).train(), batch(family)
    for _ in range(30):
        model(**inputs)
    every = torch.cat([draw.augmented.flatten().float() for draw in drawn])
    assert abs(every.mean() - 0.5) < 4 * math.sqrt(0.25 / (30 * 3))


def outcome(family, settings):
    """Loss and gradients of a forward in training."""
    model, inputs = FAMILIES[family].build(settings).train(), batch(family)
    torch.manual_seed(3)
    value = loss(model(**inputs))
    value.backward()
    return [value, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(("family", "name"), RANDOM)
def test_probability_0_is_the_model_without_augmentation(family, name):
    """Loss and gradients, bit for bit; those of probability 1 are others."""
    plain = {"type": "rope" if "rope" in OF_FAMILY[family] else "sinpos"}
    options, ours, none = {}, {"type": name}, {"augment_probability": 0}
    if family == "marian":
        options = {"source_scale": ALPHA, "source_bos": True}
    if name == "cape" and "speech" in family:
        ours["mean_normalize"] = False
    if name == "cape" and "rope" in OF_FAMILY[family]:
        ours["max_global_scale"] = 2.0
    expected = outcome(family, {**plain, **options})
    actual = outcome(family, {**ours, **options, **none})
    augmented = outcome(family, {**ours, **options})
    assert len(actual) == len(expected) > 5
    assert all(map(torch.equal, actual, expected))
    assert not torch.equal(augmented[0], expected[0])


def test_a_decoder_with_settings_of_its_own_follows_its_encoder():
    """The text side of speech, until it is given a probability."""
    config = hf_models.CapeSpeech2TextConfig(
        position_embedding={"type": "cape", "augment_probability": 0}
    )
    assert config.decoder_position_config.augment_probability == 0
    for own, expected in (({"max_global_shift": 9.0}, 0), ({"augment_probability": 1}, 1)):
        config.decoder_position_embedding = {"type": "cape", **own}
        assert config.decoder_position_config.augment_probability == expected
        copy = hf_models.CapeSpeech2TextConfig.from_dict(config.to_dict())
        assert copy.decoder_position_config == config.decoder_position_config
    config.decoder_position_embedding = {"type": "sinpos"}  # is never augmented
    assert "augment_probability" not in config.decoder_position_embedding


@pytest.mark.parametrize(("family", "name"), RANDOM)
def test_probability_1_is_the_default(family, name):
    settings = OF_FAMILY[family][name]
    expected = outcome(family, settings)
    assert all(map(torch.equal, outcome(family, {**settings, "augment_probability": 1}), expected))


def test_probability_is_stored_where_it_was_given(tmp_path):
    """A model without the option, as all before there was one, has probability 1."""
    family = FAMILIES["marian"]
    for settings, stored in (({"type": "cape", "source_scale": ALPHA}, None), (HALF, 0.5)):
        model = family.build({"type": "cape", "source_scale": ALPHA, **settings})
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "config.json").read_text())["position_embedding"]
        assert saved.get("augment_probability") == stored
        loaded = family.model.from_pretrained(tmp_path)
        assert seam(loaded).config.augment_probability == (stored or 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["marian", "vit"])
def test_trainer_resumes_bit_for_bit(family, tmp_path, drawn):
    settings = {**OF_FAMILY[family]["cape"], **HALF}

    def train(folder, resume=None):
        drawn.clear()
        arguments = TrainingArguments(
            folder, max_steps=6, save_steps=3, per_device_train_batch_size=3, learning_rate=1e-3,
            report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        model = FAMILIES[family].build(settings)
        trainer = Trainer(model, arguments, train_dataset=Samples(family))
        trainer.train(resume_from_checkpoint=resume)
        chances = torch.stack([draw.chance.flatten() for draw in drawn])
        return trainer.model.state_dict(), chances

    whole, chances = train(tmp_path / "whole")
    resumed, others = train(tmp_path / "again", str(tmp_path / "whole" / "checkpoint-3"))
    assert torch.equal(chances[3:], others)
    assert 0 < (chances < 1).sum() < chances.numel()
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


KILLED = """
import json, os, signal, sys, torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from cape_plugins import PositionEncoder
from tests.hf.test_hosts import Samples
from tests.support.hf import FAMILIES, OF_FAMILY

chances, common = [], []
stock = PositionEncoder.draw

def noted(*args, **kwargs):
    draw = stock(*args, **kwargs)
    chances.append(draw.chance.flatten().tolist())
    return draw

class Notes(TrainerCallback):
    def on_step_end(self, arguments, state, *args, **kwargs):
        common.append(torch.get_rng_state().sum().item())
        with open(f"{note}.{arguments.process_index}", "w") as file:
            json.dump({"chances": chances, "common": common}, file)
        if note == "killed" and state.global_step == 3:
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

def train(folder, resume):
    training = TrainingArguments(
        folder, max_steps=4, save_steps=2, use_cpu=True, report_to="none", disable_tqdm=True,
        per_device_train_batch_size=3, learning_rate=1e-3,
    )
    settings = {**OF_FAMILY["marian"]["cape"], "synchronize": False, "augment_probability": 0.5}
    model = FAMILIES["marian"].build(settings)
    trainer = Trainer(model, training, train_dataset=Samples("marian"), callbacks=[Notes()])
    trainer.train(resume_from_checkpoint=resume)
    trainer.accelerator.end_training()
    os._exit(0)  # on a busy machine threads of gloo may outlive the interpreter, which aborts it

PositionEncoder.draw = noted
# each rank of each training is a process of its own, a fork: imports take longest
for note, port in map(str.split, sys.argv[1:]):
    os.environ |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = []
    for rank in ("0", "1"):
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
        ranks.append(os.fork())
        if not ranks[-1]:
            train("to_end" if note == "whole" else "again", resume=note == "resumed")
    statuses = [os.waitpid(rank, 0)[1] for rank in ranks]
    assert statuses == [0, 0] or note == "killed", (note, statuses)
"""


TRAININGS = ("whole", "killed", "resumed")


@pytest.fixture(scope="module")
def trained_on_ranks(run_cli, tmp_path_factory):
    """A folder with trainings on two ranks, one that was left alone and one that was killed after
    its checkpoint and started again, and what each rank drew. Source and target draw apart."""
    folder = tmp_path_factory.mktemp("ranks")
    words = [f"{name} {free_port()}" for name in TRAININGS]
    (folder / "script.py").write_text(KILLED)
    run_cli("python", folder / "script.py", *words, cwd=folder)
    return folder


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def notes(folder, name):
    """What each rank noted of a training."""
    return [json.loads((folder / f"{name}.{rank}").read_text()) for rank in (0, 1)]


@pytest.mark.slow
def test_ranks_leave_out_samples_of_their_own(trained_on_ranks):
    first, second = notes(trained_on_ranks, "whole")
    assert first["common"] == second["common"]  # the Trainer seeds all ranks alike
    kept = [[chance < 1 for row in rank["chances"] for chance in row] for rank in (first, second)]
    assert kept[0] != kept[1]
    assert all(any(choice) and not all(choice) for choice in kept)


@pytest.mark.slow
def test_ranks_that_were_killed_resume_bit_for_bit(trained_on_ranks):
    """Draws of each rank; then the model, its optimizer and the random numbers to come."""
    of_ranks = zip(*(notes(trained_on_ranks, name) for name in TRAININGS), strict=True)
    for whole, before, after in of_ranks:
        for name, size in (("chances", 2), ("common", 1)):  # entries a step: two sides draw
            assert len(whole[name]) == 4 * size
            assert before[name] == whole[name][: 3 * size]  # the third step was lost
            assert after[name] == whole[name][2 * size :]
    places = ("again/checkpoint-2", "again/checkpoint-4", "to_end/checkpoint-4")
    begun, actual, expected = (end_of(trained_on_ranks / place) for place in places)
    assert len(expected) == len(actual) > 50
    for name, value in expected.items():
        assert torch.equal(actual[name], value), name
    assert any(not torch.equal(begun[name], value) for name, value in expected.items())


def end_of(checkpoint):
    """All tensors of a checkpoint: parameters, moments, states of the ranks' random numbers."""
    tensors = load_file(checkpoint / "model.safetensors")
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
    for number, moments in optimizer.items():
        tensors |= {f"{number} {name}": value for name, value in moments.items()}
    for rank in (0, 1):
        states = torch.load(checkpoint / f"rng_state_{rank}.pth", weights_only=False)
        tensors[f"rank {rank}"] = states["cpu"]
    return tensors
