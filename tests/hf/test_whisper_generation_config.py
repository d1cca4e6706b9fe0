"""Whisper is asked by keyword, by a configuration of generation, or by that of the model."""

import copy

import pytest
import torch

from tests.support.whisper import LENGTHS, MASK, RAGGED, SEGMENT, encoder_sizes, features, switched

PLACES = ["keyword", "argument", "model"]


def generate(place, inputs, mask=None, hop=None, **asked):
    """What a model writes that is `asked` in one of the places."""
    model = switched("cape")
    call = {"attention_mask": mask, "hop_nanoseconds": hop, "language": "en"}
    if place == "keyword":
        return model, lambda: model.generate(inputs, **call, **asked)
    config = copy.deepcopy(model.generation_config) if place == "argument" else None
    for name, value in asked.items():
        setattr(config or model.generation_config, name, value)
    return model, lambda: model.generate(inputs, config, **call)


@pytest.mark.parametrize("place", PLACES)
def test_timestamps_need_frames_of_10_ms(place):
    _, call = generate(place, RAGGED, MASK, hop=5_000_000, return_timestamps=True)
    with pytest.raises(ValueError, match=r"return_timestamps=True.*need frames of 10 ms"):
        call()


@pytest.mark.parametrize("place", PLACES)
def test_without_timestamps_a_recording_is_one_piece(place):
    asked = {"return_timestamps": False, "max_new_tokens": 8}
    model, call = generate(place, features(1, 2 * SEGMENT), **asked)
    assert encoder_sizes(model, call) == [SEGMENT]


@pytest.mark.parametrize("length", [{"max_new_tokens": 30}, {"max_length": 30}])
def test_texts_are_as_long_as_is_asked(length):
    """Beyond the 20 rows of the table."""
    asked = {**length, "min_length": 30, "eos_token_id": None}
    written = [generate(place, RAGGED, MASK, **asked)[1]() for place in PLACES]
    assert written[0].shape[0] == len(LENGTHS)
    assert written[0].shape[1] >= 28
    for other in written[1:]:
        assert torch.equal(other, written[0])
