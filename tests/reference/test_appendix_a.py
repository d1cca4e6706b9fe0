"""The references against numbers that can be worked out by hand."""

import math

import numpy as np

from tests.reference.appendix_a import (
    augment_positions_1d,
    cape_2d,
    patch_grid,
    relative_attention,
    sinusoids_1d,
)

NAN = math.nan


def test_augmentation_shifts_before_it_scales() -> None:
    positions = np.array([[0.0, 1.0, 2.0], [NAN, 0.0, 1.0]])
    result = augment_positions_1d(
        positions,
        mean_normalize=True,
        global_shift=np.array([10.0, -1.0]),
        local_shift=np.array([[0.0, 0.5, 0.0], [0.0, 0.0, 0.25]]),
        log_scale=np.log([2.0, 1.0]),
    )
    np.testing.assert_allclose(result, [[18.0, 21.0, 22.0], [NAN, -1.5, -0.25]])
    np.testing.assert_array_equal(positions, [[0.0, 1.0, 2.0], [NAN, 0.0, 1.0]])


def test_sinusoids_have_frequencies_one_hundredth_and_one_ten_thousandth() -> None:
    embedding = sinusoids_1d(np.array([[100.0, NAN]]), channels=4)
    expected = [0.540302, 0.841471, 0.999950, 0.0099998]  # cos 1, sin 1, cos 0.01, sin 0.01
    np.testing.assert_allclose(embedding[0, 0], expected, atol=1e-6)
    np.testing.assert_array_equal(embedding[0, 1], 0)
    audio = sinusoids_1d(np.array([[100 / 30]]), channels=4, factor=30)
    np.testing.assert_allclose(audio[0, 0], expected, atol=1e-6)


def test_image_embedding_of_corner_and_centre() -> None:
    x, y = patch_grid(3, 2)
    np.testing.assert_array_equal(x, [[-1, -1], [0, 0], [1, 1]])
    np.testing.assert_array_equal(y, [[-1, 1]] * 3)
    still = np.zeros((1, 2)), np.zeros((1, 3, 3, 2)), np.zeros(1)
    embedding = cape_2d(3, 3, 4, *still)
    np.testing.assert_allclose(embedding[0, 1, 1], [1, 1, 0, 0])
    # k = 1: radius sqrt(10), along x only; at x = 1 the phase is pi * sqrt(10)
    np.testing.assert_allclose(embedding[0, 2, 1, 0], math.cos(math.pi * math.sqrt(10)))
    np.testing.assert_allclose(embedding[0, 2, 1, 2], math.sin(math.pi * math.sqrt(10)))
    # with the angles of Eq. 4 the first component is turned by one radian
    turned = cape_2d(3, 3, 4, *still, first_angle=1)
    np.testing.assert_allclose(
        turned[0, 2, 1, 0], math.cos(math.pi * math.sqrt(10) * math.cos(1.0))
    )
    # a shift of the whole grid by one step moves the embedding by one row
    shifted = cape_2d(3, 3, 4, np.array([[1.0, 0.0]]), *still[1:])
    np.testing.assert_allclose(shifted[0, :2], embedding[0, 1:])


def test_relative_attention_uses_distance_clip_zero_mask_and_offset() -> None:
    query = np.full((1, 1, 1, 1), 1.0)
    key = value = np.zeros((1, 1, 4, 1))
    table = np.log(np.array([[1.0], [2.0], [3.0]]))  # distances -1, 0, 1
    value_table = np.array([[10.0], [20.0], [30.0]])

    def weights(**options: object) -> list[float]:
        return relative_attention(query, key, value, table, value_table, **options)[1].ravel()

    np.testing.assert_allclose(weights(), np.array([2, 3, 3, 3]) / 11)
    np.testing.assert_allclose(weights(beyond="zero"), np.array([2, 3, 1, 1]) / 7)
    np.testing.assert_allclose(weights(query_offset=3), np.array([1, 1, 1, 2]) / 5)
    mask = np.array([True, False, True, True])
    np.testing.assert_allclose(weights(allowed=mask), np.array([2, 0, 3, 3]) / 8)
    output, _ = relative_attention(query, key, value, table, value_table)
    np.testing.assert_allclose(output.ravel(), [(2 * 20 + 9 * 30) / 11])
    per_head = relative_attention(query, key, value, table[None], value_table[None])[0]
    np.testing.assert_allclose(per_head, output)
