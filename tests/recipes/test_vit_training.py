"""Training of images: sizes of UniViT, finetuning at another size, mixed targets, several seeds."""

import json
import re

import pytest

pytest.importorskip("transformers")

import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler

from hf_models import CapeViTConfig, CapeViTForImageClassification
from recipes.lab import hf_checkpoints, hf_training
from recipes.vit import finetune_hf as vit
from recipes.vit.augment import Mix, Mixing, SizeSampler
from recipes.vit.catalog import RECIPES
from tests.support.tables import read_csv

TINY = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 2, "patch_size": 8, "image_size": 16}


@pytest.mark.parametrize(("images", "split"), [(50, False), (50, True), (5, False)])
@pytest.mark.parametrize("drop_last", [False, True])  # as ImageTrainer has it, and as recipe deit
def test_sizes_agree_over_processes_and_micro_batches(images, split, drop_last):
    world, per_device, accumulation = 3, 2, 2
    step = world * per_device
    multiple = 1 if drop_last else step
    sampler = SizeSampler(images, (16, 24, 32, 40), step * accumulation, multiple, seed=7)
    drawn = set()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        # what accelerate gives to each process: steps of requests
        steps = BatchSampler(sampler, per_device * (world if split else 1), drop_last)
        parts = [list(BatchSamplerShard(steps, world, rank, split)) for rank in range(world)]
        assert len({len(steps) for steps in parts}) == 1
        for first in range(0, len(parts[0]), accumulation):
            steps = [step for part in parts for step in part[first : first + accumulation]]
            sizes = {request.size for step in steps for request in step}
            assert len(sizes) == 1
            drawn |= sizes
        seen = [request.index for steps in parts for step in steps for request in step]
        if drop_last:
            assert len(set(seen)) == len(seen) == images // step * step
        else:
            assert set(seen) == set(range(images))
            assert len(seen) == -(-images // step) * step
    assert len(drawn) > (1 if seen else -1)


def test_sizes_are_uniform_and_depend_on_seed_and_epoch():
    def sizes(seed, epoch):
        sampler = SizeSampler(4000, (16, 24, 32, 40), 1, seed=seed)
        sampler.set_epoch(epoch)
        return [request.size for request in sampler]

    first = sizes(1, 0)
    assert all(850 < first.count(size) < 1150 for size in (16, 24, 32, 40))
    assert first == sizes(1, 0)
    assert first != sizes(2, 0) != sizes(1, 1) != first
    order = [request.index for request in SizeSampler(9, (8,), 3)]
    assert order == [request.index for request in SizeSampler(9, (16, 24), 3)]


def test_repeated_augmentation_keeps_the_length_of_the_epoch():
    requests = list(SizeSampler(30, (8,), 5, repeats=3))
    assert len(requests) == 30
    counts = [sum(request.index == index for request in requests) for index in range(30)]
    assert sorted(counts) == [0] * 20 + [3] * 10
    assert len({request.number for request in requests}) == 30  # copies are augmented differently


@pytest.mark.slow
def test_finetuning_at_a_higher_size_and_several_seeds(tmp_path, monkeypatch, capsys):
    """Digits at 16, then at 32 pixels; finished runs are not repeated."""
    monkeypatch.chdir(tmp_path)
    words = "--compare abspos --seeds 4 5 --train-sizes 16 --test-sizes 16 --max_steps 3"
    first = [*words.split(), "--model-config", json.dumps({**TINY, "num_channels": 1})]
    first += ["--output", "first"]
    vit.main(first)
    assert "variant (mean ± sample standard deviation of 2 seeds)" in capsys.readouterr().out
    rows = read_csv(tmp_path / "first/scores.csv")
    assert [(row["variant"], row["seed"]) for row in rows] == [("abspos", "4"), ("abspos", "5")]
    weights = sorted((tmp_path / "first").glob("abspos-seed*/model.safetensors"))
    assert len(weights) == len({path.read_bytes() for path in weights}) == 2
    before = [path.stat().st_mtime_ns for path in weights]
    vit.main(first)
    assert [path.stat().st_mtime_ns for path in weights] == before

    second = "--model first/abspos-seed4 --position-embedding abspos --learning_rate 1e-9 "
    second += "--drop-path 0.1 --train-sizes 32 --test-sizes 32 --max_steps 3 --output second"
    vit.main(second.split())
    model = CapeViTForImageClassification.from_pretrained(tmp_path / "second/abspos")
    assert (model.config.image_size, model.config.drop_path_rate) == (32, 0.1)
    size = json.loads((tmp_path / "second/abspos/preprocessor_config.json").read_text())["size"]
    assert size == {"height": 32, "width": 32}
    start = CapeViTForImageClassification.from_pretrained(tmp_path / "first/abspos-seed4")
    start.vit.resize_images(32, 32)
    for key, value in start.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value, atol=1e-6, rtol=0)


def test_mixing_is_that_by_hand():
    images = torch.arange(3.0)[:, None, None, None].expand(3, 2, 4, 5)
    labels = torch.tensor([1, 0, 3])
    mixing = Mixing(0.8, 1.0, classes=4)
    mixed, targets = mixing(images, labels, Mix(0.75))
    assert mixed[:, 0, 0, 0].tolist() == [0.5, 1.0, 1.5]
    assert targets.tolist() == [[0, 0.75, 0, 0.25], [1, 0, 0, 0], [0, 0.25, 0, 0.75]]
    mixed, targets = mixing(images, labels, Mix(0.8, (1, 3, 2, 4)))
    cut = torch.zeros(4, 5, dtype=torch.bool)
    cut[1:3, 2:4] = True
    assert torch.equal(mixed[0, 1], torch.where(cut, 2.0, 0.0))
    assert torch.equal(mixed[2, 0], torch.where(cut, 0.0, 2.0))
    torch.testing.assert_close(targets[0], torch.tensor([0, 0.8, 0, 0.2]))
    assert not images[0].any()


def test_mixes_are_drawn_as_in_deit():
    mixing = Mixing(0.8, 1.0, classes=4)
    draws = [mixing.draw(12, 20) for _ in range(1000)]
    cut = [mix for mix in draws if mix.box]
    assert 430 < len(cut) < 570
    for mix in cut:
        top, bottom, left, right = mix.box
        assert 0 <= top <= bottom <= 12
        assert 0 <= left <= right <= 20
        assert mix.share == 1 - (bottom - top) * (right - left) / 240
    shares = torch.tensor([mix.share for mix in draws if not mix.box])
    assert float(shares.mean()) == pytest.approx(0.5, abs=0.05)
    assert float(shares.var()) == pytest.approx(0.25 / (2 * 0.8 + 1), abs=0.02)  # Beta(0.8, 0.8)
    for always, box in ((Mixing(0.8, 0, 4), False), (Mixing(0, 1.0, 4), True)):
        assert all(bool(always.draw(8, 8).box) == box for _ in range(20))


def make_trainer(tmp_path, name="abspos", **training):
    torch.manual_seed(0)
    config = CapeViTConfig(**TINY, num_labels=4, position_embedding={"type": name})
    how = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", **training}
    args = hf_training.Seq2SeqTrainingArguments(**how)
    return vit.ImageTrainer(CapeViTForImageClassification(config), args)


def test_targets_are_smoothed_as_in_deit(tmp_path):
    """0.9 + 0.1/C and 0.1/C, then mixed; in evaluation nothing is mixed."""
    trainer = make_trainer(tmp_path, label_smoothing_factor=0.1)
    model = trainer.model
    inputs = {"pixel_values": torch.randn(3, 3, 16, 16), "labels": torch.tensor([1, 0, 3])}
    smooth = torch.full((3, 4), 0.025).scatter(1, inputs["labels"][:, None], 0.925)
    loss, outputs = trainer.compute_loss(model.eval(), inputs, return_outputs=True)
    expected = -(smooth * outputs.logits.log_softmax(-1)).sum(1).mean()
    torch.testing.assert_close(loss, expected)

    trainer.mixing = Mixing(0.8, 0, 4)
    torch.testing.assert_close(trainer.compute_loss(model, inputs), expected)
    trainer.mixing.draw = lambda height, width: Mix(0.7)
    loss, outputs = trainer.compute_loss(model.train(), inputs, return_outputs=True)
    mixed = 0.7 * smooth + 0.3 * smooth.flip(0)
    pixels = 0.7 * inputs["pixel_values"] + 0.3 * inputs["pixel_values"].flip(0)
    torch.testing.assert_close(outputs.logits, model.eval()(pixels).logits)
    torch.testing.assert_close(loss, -(mixed * outputs.logits.log_softmax(-1)).sum(1).mean())


def test_weight_decay_leaves_out_what_is_added(tmp_path):
    for name in ("abspos", "relpos", "fire"):
        trainer = make_trainer(tmp_path, name)
        names = dict(trainer.model.named_parameters())
        decayed = set(trainer.get_decay_parameter_names(trainer.model))
        added = {name for name in names if re.search(r"cls_token|position_emb|relative|bias", name)}
        norms = {name for name in names if "norm" in name}
        assert decayed == set(names) - added - norms
        assert len(added) > 15


def test_recipe_gives_defaults_that_flags_win_over():
    words = "--recipe deit --mixup 0 --no-flip --dataset x --output out"
    words += " --per_device_train_batch_size 8 --gradient_accumulation_steps 4"
    for more, rate in (([], 1e-3 * 32 / 1024), (["--learning-rate=0.5"], 0.5)):
        args, training, _ = vit.read_options([*words.split(), *more])
        assert training.learning_rate == pytest.approx(rate)
    assert (args.mixup, args.cutmix, args.flip, args.crop) == (0, 1.0, False, (0.08, 1.0))
    assert training.max_grad_norm == 0
    args, *_ = vit.read_options(["--dataset", "x"])
    assert not any((args.mixup, args.cutmix, args.flip, args.crop, args.rand_augment))


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_understood(name):
    args, training, recipe = vit.read_options(["--recipe", name, "--dataset", "x"])
    sizes = vit.model_sizes(args, recipe)
    hf_checkpoints.make_config(CapeViTConfig, sizes, position_embedding={"type": "cape"})
    assert training.learning_rate > 0


@pytest.mark.parametrize("words", [("--mixup", "-1"), ("--drop-path", "1")])
def test_numbers_out_of_range_are_refused(words, capsys):
    with pytest.raises(SystemExit):
        vit.main(list(words))
    assert f"argument {words[0]}" in capsys.readouterr().err
