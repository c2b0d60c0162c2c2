"""Order of the images: a permutation of each epoch, shared between processes, the same from any update on."""

import random

import numpy as np
import pytest
import torch

from vmamba_npu.data import Batches, TrainOrder, share
from vmamba_npu.data.randomness import mix, seed_all, seeded


def keys(order: TrainOrder, epoch: int, start: int = 0) -> list[list[tuple[int, int]]]:
    return list(order.batches(epoch, start))


def test_epoch_is_a_permutation_that_changes_with_epoch_and_seed():
    order = TrainOrder(images=20, batch_size=4)
    seen = [index for batch in keys(order, 7) for _, index in batch]
    assert sorted(seen) == list(range(20)) and seen != list(range(20))
    assert {epoch for batch in keys(order, 7) for epoch, _ in batch} == {7}
    assert seen == [index for batch in keys(order, 7) for _, index in batch]
    for other in (keys(order, 8), keys(TrainOrder(images=20, batch_size=4, seed=1), 7)):
        assert [index for batch in other for _, index in batch] != seen


def test_last_images_that_fill_no_update_are_left_out():
    order = TrainOrder(images=23, batch_size=4)
    assert order.updates == 5 and [len(batch) for batch in keys(order, 0)] == [4] * 5
    assert TrainOrder(images=23, batch_size=4, limit=2).updates == 2


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (1, 3), (2, 3), (3, 2)])
def test_processes_and_parts_share_the_images_of_each_update(world, accumulate):
    alone = keys(TrainOrder(images=50, batch_size=12, seed=5), 1)
    shares = [keys(TrainOrder(50, 12, accumulate, rank, world, seed=5), 1) for rank in range(world)]
    for number, whole in enumerate(alone):
        parts = [own[number * accumulate + part] for own in shares for part in range(accumulate)]
        assert {len(part) for part in parts} == {12 // (world * accumulate)}
        assert sorted(key for part in parts for key in part) == sorted(whole)


def test_order_from_an_update_on_is_the_rest_of_the_epoch():
    order = TrainOrder(images=50, batch_size=12, accumulate=2, rank=1, world=2, seed=5)
    assert keys(order, 3, start=2) == keys(order, 3)[4:]
    assert len(order.batches(3, 2)) == 2 * (order.updates - 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": 50, "batch_size": 10, "accumulate": 2, "world": 2}, "multiple of 4 .*accumulate 2 x 2 processes"),
        ({"images": 50, "batch_size": 0}, "batch_size"),
        ({"images": 5, "batch_size": 6}, "6 images an update, but the training part has 5"),
    ],
)
def test_batch_size_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TrainOrder(**options)


@pytest.mark.parametrize("world", [1, 2, 3, 7])
@pytest.mark.parametrize("images", [1, 6, 7, 8])
def test_each_image_of_an_evaluation_counts_once(images, world):
    shares = [share(images, rank, world) for rank in range(world)]
    assert len({len(indices) for indices, _ in shares}) == 1
    counted = [index for indices, count in shares for index in indices[:count].tolist()]
    assert sorted(counted) == list(range(images))
    assert all(0 <= index < images for indices, _ in shares for index in indices.tolist())


def test_batches_of_rows_give_keys():
    assert list(Batches([torch.tensor([3, 1]), torch.tensor([2])], epoch=4)) == [[(4, 3), (4, 1)], [(4, 2)]]


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_seeded_block_repeats_and_leaves_the_generators_as_they_were():
    seed_all(1)
    expected = draw()
    seed_all(1)
    with seeded(mix(5, 6)):
        inside = draw()
    assert draw() == expected
    with seeded(mix(5, 6)):
        assert draw() == inside
    with seeded(mix(6, 5)):
        assert draw() != inside


def test_mixed_numbers_differ_for_near_arguments():
    numbers = {mix(a, b) for a in range(30) for b in range(30)}
    assert len(numbers) == 900 and all(0 <= number < 2**63 for number in numbers)
