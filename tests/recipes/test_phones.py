"""Phone classification: model, training with positions in and out, and the command."""

import argparse
from itertools import product
from unittest.mock import Mock

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("soundfile")
from cape_plugins import TYPES
from cape_plugins.pictures.views import similarity, similarity_by_distance
from recipes.lab.steps import CommandError
from recipes.phones import pictures, train
from recipes.phones.analysis import error_rate
from recipes.phones.data import BANDS, Example
from recipes.phones.measure import run_type
from recipes.phones.model import PhoneClassifier
from recipes.phones.report import COUNTS
from recipes.phones.train import CONDITIONS, Training, predict, run_batch, run_model, train_epoch
from tests.support.phones import SIZES, config, make_corpus, make_experiment

# each type with its positions, and a learned encoding and a relative type under each condition
CASES = {(name, "inc"): None for name in TYPES}
CASES |= {(name, key): None for key in CONDITIONS for name in ("abspos", "relpos", "fire")}
DRAWN = ("draw_histories", "draw_confusions", "draw_attention", "draw_class_attention")


def make_model(name="sinpos", seed=1):
    torch.manual_seed(seed)
    return PhoneClassifier(3, config(name), SIZES, 30).eval()


def test_sinpos_is_the_thesis_on_frame_numbers():
    """10000^(-2i/d) radians per frame, i from 0."""
    rows = make_model("sinpos").embed(5)[0]
    phase = torch.arange(5.0)[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    assert torch.allclose(rows[:, 1::2], phase.sin(), atol=1e-5)
    assert torch.allclose(rows[:, ::2], phase.cos(), atol=1e-5)


def test_similarities_of_the_sinusoid_depend_on_the_distance():
    embeddings = make_model().embed(300)[0].numpy()
    maps = similarity(embeddings)
    frequencies = 10000.0 ** (-np.arange(0, 8, 2) / 8)
    for distance in (0, 1, 7):
        expected = np.cos(frequencies * distance).sum()
        dots = similarity_by_distance(maps["dot product"], 10)[distance]
        assert np.allclose(dots, expected, atol=1e-4)
        cosines = similarity_by_distance(maps["cosine"], 10)[distance]
        assert np.allclose(cosines, expected / 4, atol=1e-4)


@pytest.mark.parametrize("name", ["sinpos", "abspos", "shape", "cape"])
def test_positions_are_augmented_in_training_only(name):
    model = make_model(name)
    assert torch.equal(model.embed(5), model.embed(5))
    model.train()
    assert torch.equal(model.embed(5), model.embed(5)) == (name in ("sinpos", "abspos"))


def test_shifts_given_in_seconds_become_frames():
    model = make_model("cape").train()
    shifts = model.positions.draw(1000).shift.abs()
    assert 2900 < shifts.max() <= 3000


@pytest.mark.parametrize("name", TYPES)
def test_without_positions_their_channels_are_zero(name):
    model, features = make_model(name), torch.randn(1, 20, BANDS)
    inputs = []
    model.project.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    without = model(features, positions=False).logits
    assert torch.equal(inputs[0], torch.nn.functional.pad(features, (0, 8)))
    assert torch.equal(without, make_model("nopos")(features).logits)  # the same other weights
    changed = not torch.allclose(without, model(features).logits, atol=1e-4)
    assert changed == (name != "nopos")


@pytest.mark.parametrize("name", TYPES)
def test_frames_that_take_their_positions_along_give_the_same(name):
    """And attend to the same frames; with positions in natural order they do not."""
    model, features = make_model(name), torch.randn(20, BANDS)
    order = torch.randperm(20)
    outputs = {
        key: run_model(model, features, CONDITIONS[key], order, need_weights=True)
        for key in CONDITIONS
    }
    for moved, still in (("inc-scram-both", "inc"), ("exc-scram", "exc")):
        (logits, weights), (expected, expected_weights) = outputs[moved], outputs[still]
        assert torch.allclose(logits, expected[order], atol=1e-5)
        for a, b in zip(weights, expected_weights, strict=True):
            assert torch.allclose(a, b[:, order][..., order], atol=1e-5)
    moved = torch.allclose(outputs["inc-scram"][0], outputs["inc"][0][order], atol=1e-4)
    assert moved == (name == "nopos")


@pytest.mark.parametrize(("name", "condition"), CASES)
def test_padding_changes_nothing(name, condition):
    model, setting = make_model(name), CONDITIONS[condition]
    features = [torch.randn(length, BANDS) for length in (9, 20, 14)]
    orders = [torch.randperm(len(frames)) for frames in features]
    output = run_batch(model, features, setting, orders, need_weights=True)
    without = run_batch(model, features, setting, orders).logits
    for index, (frames, order) in enumerate(zip(features, orders, strict=True)):
        length = len(frames)
        logits, weights = run_model(model, frames, setting, order, need_weights=True)
        assert torch.allclose(output.logits[index, :length], logits, atol=1e-5)
        assert torch.allclose(without[index, :length], logits, atol=1e-5)
        for batch, alone in zip(output.weights, weights, strict=True):
            assert torch.allclose(batch[index, :, :length, :length], alone, atol=1e-5)
            assert (batch[index, :, :length, length:] == 0).all()


def test_predictions_of_scrambled_frames_stand_in_natural_order():
    model, corpus = make_model(), make_corpus()
    utterances = corpus.splits["test"]
    natural = predict(model, utterances, CONDITIONS["exc"])
    scrambled = predict(model, utterances, CONDITIONS["exc-scram"])
    assert all(np.array_equal(a, b) for a, b in zip(natural, scrambled, strict=True))
    assert any(len(set(classes)) > 1 for classes in natural)
    orders, again = ([o.tolist() for o in train.permutations(utterances, 3)] for _ in range(2))
    assert orders == again
    assert orders[0] != orders[1]


def train_for(epochs, model, corpus, condition):
    """Trains the model and returns the mean loss of each epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(1)
    words = (model, corpus.splits["train"], CONDITIONS[condition], optimizer, generator)
    return [float(np.mean([*train_epoch(*words)])) for _ in range(epochs)]


@pytest.mark.parametrize(("name", "condition"), CASES)
def test_every_type_learns_under_every_condition(name, condition):
    corpus = make_corpus()
    model = make_experiment(corpus).build(config(name), 1)
    before = {key: value.clone() for key, value in model.named_parameters()}
    losses = train_for(6, model, corpus, condition)
    assert losses[-1] < 0.8 * losses[0]
    others = dict(make_model("nopos").named_parameters())
    for key, value in model.named_parameters():
        if key.endswith("layer_bias.output.bias"):
            continue  # the same for all keys, so it changes no attention
        used = CONDITIONS[condition].positions or key in others
        assert torch.equal(value, before[key]) != used, key


def test_a_batch_is_one_step_down_the_mean_over_all_of_its_frames():
    experiment = make_experiment(make_corpus(count=(2, 1, 1)))
    first, second = experiment.corpus.splits["train"]
    utterances = [Example("short", first.features[:11], first.labels[:11]), second]
    stepped, expected = (experiment.build(config("sinpos"), 1) for _ in range(2))
    optimizer = torch.optim.SGD(stepped.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(1)
    (loss,) = train_epoch(stepped, utterances, CONDITIONS["inc"], optimizer, generator, 2)
    total = sum(
        torch.nn.functional.cross_entropy(expected(x[None]).logits[0], y, reduction="sum")
        for _, x, y in utterances
    )
    mean = total / (11 + 20)
    mean.backward()
    assert loss == pytest.approx(mean.item(), abs=1e-5)
    for after, before in zip(stepped.parameters(), expected.parameters(), strict=True):
        assert torch.allclose(after, before - 0.5 * before.grad, atol=1e-5)


def test_scrambled_labels_follow_their_frames():
    """In these data a class depends only on its frame, so scrambling does not hinder learning."""
    corpus = make_corpus()
    rates = {}
    for condition in ("exc", "exc-scram"):
        model = make_experiment(corpus).build(config("nopos"), 1)
        train_for(8, model, corpus, condition)
        test = corpus.splits["test"]
        predictions = predict(model, test, CONDITIONS["exc"])
        rates[condition] = error_rate([item.labels.numpy() for item in test], predictions)
    assert rates["exc"] == pytest.approx(rates["exc-scram"], abs=1e-3)
    assert rates["exc"] < 20


def test_the_optimizer_follows_the_learning_rate(tmp_path):
    """A rate of nearly 0 lets the last of eight epochs change nothing."""
    job = ("sinpos", config("sinpos"), "inc", 1)
    _, still = make_experiment(make_corpus(), Training(8, 0.1, 1e-9), tmp_path / "a").trained(*job)
    _, moving = make_experiment(make_corpus(), Training(8, 0.1, 0.1), tmp_path / "b").trained(*job)
    assert still[:7] == moving[:7]
    assert still[7]["near_attention"] == still[6]["near_attention"]
    assert moving[7]["near_attention"] != moving[6]["near_attention"]


@pytest.mark.parametrize("name", train.OPTIMIZERS)
def test_models_after_an_epoch_are_kept_and_trained_by_the_optimizer(tmp_path, name):
    """A loop with torch's optimizer gives the model after the first of two epochs."""
    experiment = make_experiment(make_corpus(), Training(2, 0.01, 0.01, name, 4, (1, 2)), tmp_path)
    job = ("sinpos", config("sinpos"), "inc", 1)
    final, history = experiment.trained(*job)
    models = experiment.at_epochs(*job)
    model = experiment.build(config("sinpos"), 1)
    optimizer_class = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[name]
    optimizer = optimizer_class(model.parameters(), lr=0.01)
    utterances, generator = experiment.corpus.splits["train"], torch.Generator().manual_seed(1)
    losses = [*train_epoch(model, utterances, CONDITIONS["inc"], optimizer, generator, 4)]
    assert len(losses) == 2  # of 4 utterances and of 2
    assert history[0]["train_loss"] == pytest.approx(np.mean(losses), abs=1e-4)
    assert models.keys() == {1, 2}
    pairs = zip(models[1].parameters(), model.parameters(), models[2].parameters(), strict=True)
    for first, expected, second in pairs:
        assert torch.equal(first, expected)
        assert not torch.equal(first, second)
    best = models[min(history, key=lambda row: row["dev_per"])["epoch"]]
    assert all(map(torch.equal, best.parameters(), final.parameters()))


def test_finished_models_are_reused_and_others_refused(tmp_path):
    corpus, job = make_corpus(), ("abspos", config("abspos"), "inc", 1)
    training = Training(3, 0.05, 0.001)
    first, history = make_experiment(corpus, training, tmp_path).trained(*job)
    file = tmp_path / "abspos-inc-seed1" / "model.pt"
    stamp = file.stat().st_mtime_ns
    again, same = make_experiment(corpus, training, tmp_path).trained(*job)
    assert file.stat().st_mtime_ns == stamp
    assert same == history
    assert [row["epoch"] for row in history] == [1, 2, 3]
    anew, _ = make_experiment(corpus, training, tmp_path / "elsewhere").trained(*job)
    for a, b, c in zip(first.parameters(), again.parameters(), anew.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    adamw = make_experiment(corpus, Training(3, 0.05, 0.001, "adamw"), tmp_path)
    with pytest.raises(CommandError, match="optimizer 'sgd', now 'adamw'"):
        adamw.trained(*job)
    with pytest.raises(CommandError, match="other settings .*learning_rate 0.05, now 0.1"):
        make_experiment(corpus, Training(3, 0.1, 0.001), tmp_path).trained(*job)
    with pytest.raises(CommandError, match="other settings .*data"):
        make_experiment(make_corpus(1), training, tmp_path).trained(*job)


def test_a_diverging_training_says_so(tmp_path):
    corpus = make_corpus()
    for utterance in corpus.splits["train"]:
        utterance.features[0] = torch.inf
    job = ("sinpos", config("sinpos"), "inc", 1)
    with pytest.raises(CommandError, match="--learning-rate"):
        make_experiment(corpus, Training(1, 0.05, 0.001), tmp_path).trained(*job)
    assert not (tmp_path / "sinpos-inc-seed1").exists()


def test_positions_put_into_a_model_without():
    corpus = make_corpus()
    without = make_experiment(corpus).build(config("nopos"), 5)
    model = make_experiment(corpus).with_positions(config("abspos"), without, 1)
    features = torch.randn(1, 20, BANDS)
    expected = without.eval()(features).logits
    assert torch.equal(model.eval()(features, positions=False).logits, expected)
    assert not torch.allclose(model(features).logits, expected, atol=1e-4)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Function ``measured(experiment, name, **args)``: the result, and the calls of each picture,
    of which none is drawn."""

    def run(experiment, name, **args):
        drawn = {function: Mock() for function in (*DRAWN, "save")}
        for function, mock in drawn.items():
            monkeypatch.setattr(pictures, function, mock)
        args = argparse.Namespace(**args, output=tmp_path / "o", similarity_length=60)
        return run_type(experiment, name, config(name), args), drawn

    return run


@pytest.mark.parametrize("name", TYPES)
def test_all_measurements_of_a_type(tmp_path, measured, name):
    training = Training(2, 0.05, 0.001, kept_epochs=(1, 2))
    experiment = make_experiment(make_corpus(count=(4, 2, 2)), training, tmp_path / "w")
    models = ("inc", "exc")
    result, drawn = measured(experiment, name, conditions=models, seeds=[1, 2])
    having = name != "nopos"
    tests = set(CONDITIONS) if having else {"exc", "exc-scram"}
    trained = models if having else ("exc",)
    expected = {*product(trained, tests, (1, 2))}
    assert {(row["trained"], row["tested"], row["seed"]) for row in result.rows} == expected
    frames = sum(len(item.labels) for item in experiment.corpus.splits["test"])
    for row in result.rows:
        assert sum(row[name] for name in COUNTS[2:]) == round(row["per"] * frames / 100)
    rates = {(row["trained"], row["tested"]): row["per"] for row in result.rows if row["seed"] == 1}
    assert rates["exc", "exc"] == pytest.approx(rates["exc", "exc-scram"], abs=1e-3)
    if having:
        assert rates["inc", "inc"] == pytest.approx(rates["inc", "inc-scram-both"], abs=1e-3)
    assert len(result.heads) == len(result.confusions) * 2 * 4 * 2
    assert {(*seeds,) for seeds in result.confusions.values()} == {(1, 2)}
    assert bool(result.similarities) == config(name).encoding.adds
    assert drawn["save"].called == bool(result.similarities)
    paths = [call.args[0] for call in drawn["draw_attention"].call_args_list]
    assert len(paths) == len({*paths}) == 2 * len(result.confusions)  # of the first seed alone
    assert (tmp_path / "o" / name / "attention-inc.png" in paths) == having
    assert tmp_path / "o/nopos/attention-exc.png" in paths, "models without positions are shared"
    fitted = {("inc", "inc"), ("exc", "exc"), ("inc", "exc")} if having else {("exc", "exc")}
    assert {*result.fitted} == fitted
    assert {(*seeds,) for seeds in result.fitted.values()} == {(1, 2)}
    assert [row["seed"] for row in result.fitted_rates] == sorted([1, 2] * len(fitted))
    assert len(result.epochs) == 2 * len(result.heads)
    assert len(result.relations) == len(result.heads)


def test_attention_between_classes_covers_the_whole_test(tmp_path, measured):
    """Few utterances have both phones of a pair: here only the last utterance."""
    corpus = make_corpus()
    corpus.classes[:] = ["z", "s", "aa"]
    for utterance, phone in zip(corpus.splits["test"], (2, 2, 1), strict=True):
        utterance.labels[:] = phone
    corpus.splits["test"][-1].labels[:8] = 0
    training = Training(1, 0.05, 0.001, kept_epochs=(1,))
    experiment = make_experiment(corpus, training, tmp_path / "w")
    result, _ = measured(experiment, "nopos", conditions=["exc"], seeds=[1])
    assert len(result.relations) == SIZES.layers * SIZES.heads
    assert all(row["z to s"] > 0 and row["s to z"] > 0 for row in result.relations)
