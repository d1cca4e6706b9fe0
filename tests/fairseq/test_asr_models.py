"""Speech models in fairseq: batches and their samples, times, stock checkpoints."""

import argparse
from operator import attrgetter

import pytest

pytest.importorskip("soundfile")
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.speech_to_text.s2t_transformer import S2TTransformerModel

from cape_plugins import PositionConfig
from fairseq_user_dir.asr.acoustic_encoder import add_encoder_args
from fairseq_user_dir.asr.criterion import CapeCtcCriterion
from fairseq_user_dir.asr.decoding import CtcGenerator
from fairseq_user_dir.flags import decoder_config_from_args
from tests.support.expected import IN_ATTENTION, types_whose
from tests.support.fairseq_models import note_keys, random_numbers_untouched, step_by_step
from tests.support.fairseq_speech import (
    CTC,
    S2T,
    SEQ2SEQ,
    SIZES,
    TYPES,
    durations,
    make_model,
    make_task,
    part,
    write_manifest,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("speech")
    write_manifest(path, "train", durations(12))
    return path


def batch(folder, *words):
    task = make_task(folder, *words)
    task.load_dataset("train")
    dataset = task.dataset("train")
    return task, dataset.collater([dataset[index] for index in range(4)])


# The encoder is the same; a decoder reads what it gives.
EACH = [(name, CTC) for name in TYPES]
WITH_DECODER = [(name, arch) for name in ("cape", *IN_ATTENTION) for arch in (S2T, SEQ2SEQ)]
EACH += WITH_DECODER


@pytest.mark.parametrize("mode", [(), ("--padding-free",)], ids=["padded", "padding-free"])
@pytest.mark.parametrize(("name", "arch"), EACH)
def test_batch_equals_its_samples(folder, name, arch, mode):
    """Outputs and, by CTC, the loss."""
    task, sample = batch(folder, *mode)
    model = make_model(task, arch, name).eval()
    with torch.no_grad():
        together = model(**sample["net_input"])
        rows = [part(sample, row) for row in range(4)]
        alone = [model(**row["net_input"]) for row in rows]
    logits = together["encoder_out"].transpose(0, 1) if arch == CTC else together[0]
    for row, output in enumerate(alone):
        expected = output["encoder_out"][:, 0] if arch == CTC else output[0][0]
        torch.testing.assert_close(logits[row, : len(expected)], expected, atol=2e-5, rtol=1e-4)
    if arch != CTC:
        return
    assert together["lengths"].tolist() == [len(output["encoder_out"]) for output in alone]
    criterion = CapeCtcCriterion(task)
    loss, size, log = criterion(model, sample)
    losses = [criterion(model, row) for row in rows]
    torch.testing.assert_close(loss, sum(row[0] for row in losses), atol=1e-3, rtol=1e-4)
    assert size == sum(row[1] for row in losses)
    assert log["letters"] == sum(len(text) for text in sample["texts"])
    assert (log["frames"] == log["padding"]) == bool(mode), "no padding frame"


@torch.no_grad()
@pytest.mark.parametrize(("name", "arch"), WITH_DECODER)
def test_step_by_step_equals_one_pass(folder, name, arch):
    task, sample = batch(folder)
    model, inputs = make_model(task, arch, name).eval(), dict(sample["net_input"])
    previous = inputs.pop("prev_output_tokens")[:2].repeat(1, 3)
    words = previous.masked_fill(previous.eq(task.target_dictionary.pad()), 4)
    encoded = model.encoder(**{key: value[:2] for key, value in inputs.items()})
    whole, _ = model.decoder(words, encoder_out=encoded)
    steps, _ = step_by_step(model.decoder, words, encoder_out=encoded)
    torch.testing.assert_close(steps, whole, atol=2e-5, rtol=1e-4)


def test_loss_is_ctc_without_eos(folder):
    task, sample = batch(folder)
    model = make_model(task, CTC).eval()
    loss, size, _ = CapeCtcCriterion(task)(model, sample)
    out = model(**sample["net_input"])
    texts = [task.dataset("train").targets[row] for row in range(4)]
    log_probs, lengths = out["encoder_out"].log_softmax(-1), torch.tensor([*map(len, texts)])
    expected = torch.nn.functional.ctc_loss(
        log_probs, torch.cat(texts), out["lengths"], lengths, reduction="sum"
    )
    torch.testing.assert_close(loss, expected)
    normed, count, _ = CapeCtcCriterion(task, target_norm=True)(model, sample)
    assert count == 4
    assert size == sum(map(len, texts))
    assert normed < loss


def test_what_cannot_be_aligned_does_not_count(folder):
    """A sample with more units than outputs has no loss, and no part in the divisor of the loss."""
    task, sample = batch(folder)
    model = make_model(task, CTC).eval()
    target = torch.full((4, 120), task.target_dictionary.pad())
    target[:, : sample["target"].shape[1]] = sample["target"]
    target[1] = task.targets.encode("abc" * 40, task.target_dictionary)
    loss, size, log = CapeCtcCriterion(task)(model, {**sample, "target": target})
    rows = [CapeCtcCriterion(task)(model, part(sample, row)) for row in (0, 2, 3)]
    torch.testing.assert_close(loss, sum(row[0] for row in rows), atol=1e-3, rtol=1e-4)
    assert size == sum(row[1] for row in rows)
    assert (log["unaligned"], log["recordings"]) == (1, 4)


def test_batch_of_unreadable_recordings_counts_for_nothing(folder):
    task, _ = batch(folder)
    model = make_model(task, CTC).eval()
    empty = task.dataset("train").collater([None, None])
    loss, size, log = CapeCtcCriterion(task)(model, empty)
    assert float(loss) == size == log["words"] == log["word_errors"] == log["nsentences"] == 0
    assert CtcGenerator(task.target_dictionary).generate([model], empty)


def note_encoded(encoding):
    """A list to which each forward appends the coordinates that the encoding takes."""
    seen = []
    for method in ("forward", "grid"):
        stock = getattr(type(encoding), method)
        setattr(encoding, method, lambda c, stock=stock: (seen.append(c), stock(encoding, c))[1])
    return seen


def seen_coordinates(model, inputs):
    """``[B or 1, T]``: what the encoding takes, or the attention of types that act there."""
    encoder = model.encoder
    in_attention = encoder.stack_attention is not None
    seen = note_keys(encoder) if in_attention else note_encoded(encoder.positions.encoding)
    with torch.no_grad():
        model(**inputs)
    return seen[0].reshape(-1, seen[0].shape[-2]) if seen[0].dim() == 3 else seen[0].T


@pytest.mark.parametrize("name", ["sinpos", *types_whose(attrgetter("in_attention"))])
def test_positions_are_true_times(folder, name):
    """Also in half precision."""
    task, sample = batch(folder, "--padding-free")
    inputs = sample["net_input"]
    model = make_model(task, CTC, name).eval()
    first = 0.0125 if name == "sinpos" else 0.0  # in attention distances count, from 0
    times = inputs["frame_nanoseconds"][:, ::3] * 1e-9 - 0.0125 + first
    torch.testing.assert_close(seen_coordinates(model, inputs), times.float())
    # without hops in the batch, 10 ms
    plain = {key: inputs[key] for key in ("src_tokens", "src_lengths")}
    regular = first + 0.03 * torch.arange(times.shape[1])
    torch.testing.assert_close(seen_coordinates(model, plain)[0], regular)
    hops = torch.full((4,), 20_000_000)
    slow = seen_coordinates(model, {**plain, "hop_nanoseconds": hops})
    torch.testing.assert_close(slow[0], first + 0.06 * torch.arange(times.shape[1]))
    half = {**inputs, "src_tokens": inputs["src_tokens"].bfloat16()}
    torch.testing.assert_close(seen_coordinates(model.bfloat16(), half), times.float())


@pytest.mark.parametrize("arch", [CTC, S2T, SEQ2SEQ])
def test_augmentation_is_in_training_only(folder, arch):
    task, sample = batch(folder)
    model = make_model(task, arch, "cape")

    def output():
        out = model.encoder(**{k: v for k, v in sample["net_input"].items() if "prev" not in k})
        return out["encoder_out"] if arch == CTC else out["encoder_out"][0]

    assert not torch.allclose(output(), output())
    torch.manual_seed(5)
    first = output()
    torch.manual_seed(5)
    assert torch.equal(output(), first)
    model.eval()
    with random_numbers_untouched():
        assert torch.equal(output(), output())


def test_unaugmented_speech_to_text_is_the_stock_model(folder):
    """Outputs are equal bit for bit without padding, and the stock checkpoint loads."""
    task, _ = batch(folder)
    stock_args = argparse.Namespace(**{**SIZES, "input_channels": 1, "input_feat_per_channel": 8})
    stock_args.max_source_positions, stock_args.max_target_positions = 1000, 100
    ARCH_CONFIG_REGISTRY["s2t_transformer_xs"](stock_args)
    torch.manual_seed(1)
    stock = S2TTransformerModel.build_model(stock_args, task).eval()
    model = make_model(task, S2T, "sinpos").eval()
    for name, value in stock.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), f"{name} starts alike"
    model.load_state_dict(stock.state_dict())
    features, tokens = torch.randn(2, 60, 8), torch.tensor([[2, 5, 6], [2, 7, 5]])
    lengths = torch.tensor([60, 60])
    with torch.no_grad():
        expected, _ = stock(features, lengths, tokens)
        outputs, _ = model(features, lengths, tokens)
    torch.testing.assert_close(outputs, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["abspos", "cape", *IN_ATTENTION])
def test_pretrained_encoder_comes_with_its_positions(folder, name, tmp_path, caplog):
    """As in speech translation that begins with the encoder of speech recognition."""
    task, _ = batch(folder)
    pretrained, path = make_model(task, S2T, name), tmp_path / "asr.pt"
    for value in pretrained.parameters():
        torch.nn.init.normal_(value)
    state = {"args": None, "cfg": {"model": {}}, "optimizer_history": [{"best_loss": None}]}
    state["extra_state"] = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}}
    torch.save({**state, "model": pretrained.state_dict()}, path)
    encoder = make_model(task, S2T, name, load_pretrained_encoder_from=str(path)).encoder
    for key, value in encoder.state_dict().items():
        assert torch.equal(value, pretrained.encoder.state_dict()[key]), key
    path.unlink()
    make_model(task, S2T, name, load_pretrained_encoder_from=str(path))
    assert f"{path} does not exist" in caplog.text


def test_stored_settings_of_a_decoder_hold_until_a_flag_says_otherwise():
    for name in TYPES:  # without settings it has the type of its encoder
        args = argparse.Namespace(position_embedding=name)
        assert decoder_config_from_args(args) == PositionConfig(name, "text", "decoder")
    args = argparse.Namespace(position_embedding="cape", position_decoder_max_global_shift=7.0)
    assert decoder_config_from_args(args).max_global_shift == 7.0
    # what a checkpoint says, also after the defaults have changed
    stored = argparse.Namespace(position_embedding="cape", position_decoder=args.position_decoder)
    assert decoder_config_from_args(stored).max_global_shift == 7.0
    # another type begins with its own defaults, and stays when the encoder changes
    stored.position_decoder_embedding = "shape"
    assert decoder_config_from_args(stored) == PositionConfig("shape", "text", "decoder")
    del stored.position_decoder_embedding
    stored.position_embedding = "nopos"
    assert decoder_config_from_args(stored).type == "shape"


def test_sizes_equal_the_papers_sizes_and_smaller():
    def sizes(arch, side="encoder"):
        args = argparse.Namespace(arch=arch)
        ARCH_CONFIG_REGISTRY[arch](args)
        return tuple(getattr(args, f"{side}_{name}", None) for name in ("layers", "embed_dim"))

    assert sizes(CTC) == sizes("cape_seq2seq_transformer") == (36, 768)
    assert sizes("cape_seq2seq_transformer", "decoder") == (6, 256)
    assert sizes(f"{CTC}_tiny") == (3, 96)


def test_ensemble_is_the_mean_of_probabilities(folder):
    task, sample = batch(folder)
    models = [make_model(task, CTC, name).eval() for name in ("sinpos", "nopos")]
    generate = CtcGenerator(task.target_dictionary).generate
    first, both = (generate(group, sample)[0][0]["score"] for group in (models[:1], models))
    assert first != both
    outputs = [model(**sample["net_input"]) for model in models]
    probs = [m.get_normalized_probs(out, False) for m, out in zip(models, outputs, strict=True)]
    mean = sum(probs)[: int(outputs[0]["lengths"][0]), 0] / 2
    assert both == pytest.approx(float(mean.max(-1).values.log().sum()), rel=1e-4)


def test_models_of_both_kinds_are_not_averaged(folder):
    task, _ = batch(folder)
    models = [make_model(task, arch) for arch in (CTC, S2T)]
    with pytest.raises(ValueError, match="CTC models and models with decoder"):
        task.build_generator(models, None)
    task.args.ctc_beam = 5
    with pytest.raises(ValueError, match="--ctc-beam, --ctc-lm and --ctc-lexicon are for CTC"):
        task.build_generator(models[1:], None)


SINPOS_DECODER = {"position_decoder_embedding": "sinpos", "position_decoder_max_global_shift": 3.0}
BAD = [
    (CTC, {"position_synchronize": "true"}, "--position-synchronize true"),
    (CTC, {"conv_kernel_size": 4}, "kernel size 4"),
    (S2T, SINPOS_DECODER, r"--position-decoder-max-global-shift 3\.0 .*no effect"),
    (S2T, {"conv_version": "convtransformer", "conv_out_channels": 4}, "--conv-version convtrans"),
]


@pytest.mark.parametrize(("arch", "settings", "message"), BAD, ids=[row[-1] for row in BAD])
def test_bad_settings_are_refused(folder, arch, settings, message):
    with pytest.raises(ValueError, match=message):
        make_model(make_task(folder), arch, "cape", **settings)


@pytest.mark.parametrize("words", ["--conv-stride 0", "--conv-kernel-size 4", "--dropout 2"])
def test_sizes_out_of_range_are_refused_by_their_flags(words, capsys):
    parser = argparse.ArgumentParser()
    add_encoder_args(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(words.split())
    assert f"argument {words.split()[0]}: " in capsys.readouterr().err
