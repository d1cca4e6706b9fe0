"""Proves which side draws what, and when. Coordinates are read when they are encoded, so these
tests do not depend on the way in which they are passed on."""

import math

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.distributed import utils as distributed_utils
from omegaconf import OmegaConf

from cape_plugins import TYPES, PositionEncoder
from tests.support.expected import MOVED
from tests.support.fairseq_models import (
    ALPHA,
    MOVED_VARIANTS,
    PAD,
    SAMPLED,
    START,
    VARIANTS,
    batch,
    build,
    build_variant,
    decoder_input,
    note_keys,
    pad,
    random_numbers_untouched,
    record,
    sentences,
)
from tests.support.fairseq_speech import S2T, durations, make_model, make_task, write_manifest

SHIFTS = {"max_offset", "max_global_shift"}
ALL = [*VARIANTS, *MOVED_VARIANTS]
RANDOM = [name for name in ALL if build_variant(name).position_config.random]


def note_coordinates(stack):
    """A list to which each forward of a stack appends the coordinates that it uses."""
    return record(stack).seen if stack.stack_attention is None else note_keys(stack)


def noted_calls(owner, method, monkeypatch):
    """A list to which each call of a method appends its result."""
    results, call = [], getattr(owner, method)

    def noted(*args):
        results.append(call(*args))
        return results[-1]

    monkeypatch.setattr(owner, method, noted)
    return results


def coordinates(model, seed=0, left=True, random_seed=3):
    """``[B, S]`` and ``[B, T]`` coordinates of one training forward, and their 0-based indices.

    Padding is nan, so that a mistake in the treatment of padding shows.
    """
    noted = note_coordinates(model.encoder), note_coordinates(model.decoder)
    source, previous = batch(seed, left)
    torch.manual_seed(random_seed)
    model(source, source.ne(PAD).sum(1), previous)
    if model.position_config.source_bos:
        source = pad([[0, *row] for row in sentences(seed)], left)
    result = []
    for seen, tokens in zip(noted, (source, previous), strict=True):
        (coords,) = seen
        real = tokens.ne(PAD)
        index = (real.cumsum(1) - 1).float()
        nan = torch.full_like(index, torch.nan)
        result += [torch.where(real, coords[..., 0], nan), torch.where(real, index, nan)]
    return result


@pytest.mark.parametrize(("left", "bos"), [(True, True), (False, False)])
def test_source_and_target_share_shift_and_scale(left, bos):
    drawn = {"position_max_global_shift": 20, "position_max_global_scale": 3}
    model = build(position_max_local_shift=0, position_source_bos=bos, **drawn)
    source, i, target, j = coordinates(model, left=left)
    # scale * (START + index + shift): read off the target, then expected of the source
    scale = target[:, 1] - target[:, 0]
    shift = target[:, 0] / scale - START
    for values, neutral in ((shift, 0.0), (scale, 1.0)):
        assert values.unique().numel() == 4
        assert (values - neutral).abs().min() > 1e-3
    assert shift.abs().max() <= 20.001
    assert 1 / 3.001 <= scale.min() <= scale.max() <= 3.001
    expected = scale[:, None] * (START + shift[:, None] + j)
    torch.testing.assert_close(target, expected, equal_nan=True)
    expected = scale[:, None] * (START + shift[:, None] + float(ALPHA) * i)
    torch.testing.assert_close(source, expected, equal_nan=True)


def test_local_shifts_are_independent_and_not_scaled_by_alpha():
    model = build(position_max_global_shift=0, position_max_local_shift=0.5)
    source, i, target, j = coordinates(model)
    of_source = source - START - float(ALPHA) * i
    of_target = target - START - j
    for local in (of_source, of_target):
        drawn = local[~local.isnan()]
        assert drawn.abs().max() <= 0.5 + 1e-5
        assert drawn.unique().numel() == drawn.numel()
        assert drawn.std() > 0.2  # U(-0.5, 0.5) has 0.29
    width = min(of_source.shape[1], of_target.shape[1])
    assert ((of_source[:, :width] - of_target[:, :width]).abs() < 1e-3).sum() == 0


@pytest.mark.parametrize("name", [n for n, row in TYPES.items() if SHIFTS & row.options.keys()])
@pytest.mark.parametrize("synchronize", [True, False])
def test_synchronize_decides_whether_draws_are_shared(name, synchronize):
    options = TYPES[name].options
    off = {"position_max_local_shift": 0} if "max_local_shift" in options else {}
    model = build(position_embedding=name, position_synchronize=synchronize, **off)
    source, i, target, _ = coordinates(model)
    scaled = TYPES[name].seq2seq.get("source_scale") == "auto"
    alpha = float(ALPHA) if scaled else 1.0
    shifts = source - START - alpha * i
    of_source = shifts.nanmean(1)
    of_target = target[:, 0] - START
    assert (shifts - of_source[:, None]).nan_to_num().abs().max() < 1e-5
    assert of_target.unique().numel() == 4  # each pair has its own
    if "max_offset" in options:
        assert torch.equal(of_source.round(), of_source)
        assert 0 <= of_source.min() <= of_source.max() <= 500
    if synchronize:
        torch.testing.assert_close(of_source, of_target)
    else:
        assert (of_source - of_target).abs().min() > 1e-3


@pytest.mark.parametrize("name", SAMPLED)
def test_source_and_target_share_one_function_of_the_index(name, monkeypatch):
    """Drawn positions: target token j is at f(j), source token i at f(alpha i)."""
    model = build_variant(name, position_max_position=40)
    draws = noted_calls(model.encoder.embed_positions, "draw", monkeypatch)
    source, i, target, j = coordinates(model)
    (draw,) = draws
    for row, order in enumerate(draw.order):
        here, there = (values[row][~values[row].isnan()] for values in (i * float(ALPHA), j))
        count = int(max(here.max().ceil(), there.max())) + 1
        drawn = order[:count].sort().values
        below, above = drawn[here.long()], drawn[(here.long() + 1).clamp(max=count - 1)]
        expected = START + below + (here - here.floor()) * (above - below)
        torch.testing.assert_close(source[row][~source[row].isnan()], expected)
        assert torch.equal(target[row][~target[row].isnan()], START + drawn[there.long()])


def test_an_encoder_that_runs_alone_counts_for_itself():
    """As in a program that calls encoder and decoder separately; the decoder uses at least as many
    positions."""
    model = build_variant("randpos", position_source_scale="1")
    recorders = record(model.encoder), record(model.decoder)
    source, previous = pad(sentences(lengths=(7, 7)), True), decoder_input(lengths=(3, 11))
    encoded = model.encoder(source, None)
    model.decoder(previous, encoder_out=encoded)
    of_source, of_target = (recorder.seen[0][..., 0] - START for recorder in recorders)
    order = encoded["position_draw"][0].order
    assert torch.equal(of_source, order[:, :8].sort().values)
    assert torch.equal(of_target[0, :4], of_source[0, :4])
    assert torch.equal(of_target[1], order[1, :12].sort().values)


SYNCHRONIZED = [name for name in RANDOM if build_variant(name).position_config.synchronize]


@pytest.mark.parametrize("name", SYNCHRONIZED)
def test_decoder_in_training_without_the_encoders_draw_is_refused(name):
    model = build_variant(name)
    source, previous = batch()
    encoded = model.encoder(source, None)
    model.decoder(previous, encoder_out=encoded)
    for incomplete in (
        {key: value for key, value in encoded.items() if key != "position_draw"},
        model.encoder.eval()(source, None),
        None,
    ):
        with pytest.raises(ValueError, match=r"position_draw.*\.eval\(\).*--position-synchronize"):
            model.decoder(previous, encoder_out=incomplete)
    model.eval()
    model.decoder(previous, encoder_out=encoded)


def test_positions_in_training_without_a_draw_are_refused():
    """Also after a forward that failed. Otherwise each step of decoding would move positions that
    earlier steps have used."""
    model = build()
    source, previous = batch()
    encoded = model.encoder(source, source.ne(1).sum(1))
    with pytest.raises(ValueError, match="in training needs a draw"):
        model.decoder(previous, encoded, incremental_state={})
    layer = model.encoder.layers[0]
    model.encoder.layers[0] = torch.nn.Identity()  # takes other arguments: raises
    with pytest.raises(TypeError):
        model(source, None, previous)
    model.encoder.layers[0] = layer
    for stack in (model.encoder, model.decoder):
        with pytest.raises(ValueError, match=r"in training needs a draw.*\.eval\(\)"):
            stack.embed_positions(source)
    model(source, None, previous)


@pytest.mark.parametrize("name", ALL)
def test_evaluation_is_deterministic_and_draws_nothing(name):
    model = build_variant(name, dropout=0.1).eval()
    source, previous = batch()
    with random_numbers_untouched():
        first, second = (model(source, None, previous)[0] for _ in range(2))
    assert torch.equal(first, second)
    model.train()
    assert not torch.equal(*(model(source, None, previous)[0] for _ in range(2)))


@pytest.mark.parametrize("name", RANDOM)
def test_retained_dropout_brings_back_no_augmentation(name):
    """Dropout at inference draws the same numbers as in a model without augmentation."""
    options = {"dropout": 0.3}
    if name in MOVED:
        plain = build(position_embedding=MOVED[name]["type"], **options)
    else:
        options |= {"position_source_bos": True, "position_source_scale": ALPHA}
        relative = {k: v for k, v in VARIANTS[name].items() if "relative" in k}
        plain = build(position_embedding="sinpos", **options, **relative)
    results = []
    for model in (build_variant(name, **options), plain):
        cfg = OmegaConf.structured(FairseqConfig)
        cfg.generation.retain_dropout = True
        model.prepare_for_inference_(cfg)
        source, previous = batch()
        torch.manual_seed(8)
        results.append([model(source, None, previous)[0] for _ in range(2)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    assert not torch.equal(*results[0])  # dropout is at work


HALF = {"position_augment_probability": 0.5}


def assert_share(augmented, share=0.5):
    """Within four standard deviations of a binomial share."""
    deviation = math.sqrt(share * (1 - share) / len(augmented))
    assert abs(augmented.float().mean() - share) < 4 * deviation


@pytest.mark.parametrize("name", RANDOM)
def test_source_and_target_of_a_pair_are_augmented_alike(name):
    """Also if each side draws separately."""
    options = {"position_max_offset": 10_000} if name == "shape" else {}  # not 0 by chance
    first, alpha = (0, "1") if name in MOVED else (START, ALPHA)  # or only distances count
    model = build_variant(name, position_source_scale=alpha, **HALF, **options)
    rows = []
    for seed in range(20):
        source, i, target, j = coordinates(model, random_seed=seed)
        moved = ((source - first - float(alpha) * i).abs() > 1e-5).any(1)  # padding is nan
        assert torch.equal(moved, ((target - first - j).abs() > 1e-5).any(1))
        rows.append(moved)
    assert_share(torch.cat(rows))


# also with local shifts alone, which attention draws later, and with scales alone
LESS = ({}, {"position_max_global_scale": 1}, {"position_max_local_shift": 0})
APART = [(name, off) for name in RANDOM for off in (LESS if name in MOVED else LESS[:1])]


@pytest.mark.parametrize(("name", "options"), APART)
def test_ranks_draw_apart(name, options, monkeypatch):
    """From the random numbers that all ranks have alike at the start of an update."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    model = build_variant(name, **options)
    noted, rank = note_coordinates(model.encoder), "get_data_parallel_rank"
    source, previous = batch()
    for number in (0, 0, 1):
        monkeypatch.setattr(distributed_utils, rank, lambda number=number: number)
        torch.manual_seed(3)
        model(source, None, previous)
    assert torch.equal(noted[0], noted[1])
    assert not torch.equal(noted[0], noted[2])


def test_encoder_and_decoder_of_speech_are_augmented_alike(tmp_path, monkeypatch):
    """They have different settings: seconds and tokens."""
    write_manifest(tmp_path, "train", durations(8))
    task = make_task(tmp_path)
    task.load_dataset("train")
    data = task.dataset("train")
    sample = data.collater([data[index] for index in range(8)])
    model = make_model(task, S2T, "cape", **HALF).train()
    drawn = noted_calls(PositionEncoder, "draw", monkeypatch)
    for _ in range(20):
        model(**sample["net_input"])
    for source, target in zip(drawn[::2], drawn[1::2], strict=True):
        assert torch.equal(source.augmented, target.augmented)
        assert torch.equal(target.shift != 0, source.augmented)
        assert not (target.shift == source.shift)[source.augmented].any()
    assert_share(torch.cat([source.augmented.flatten() for source in drawn[::2]]))
