"""Evaluation against counts by hand, with any batch size and number of processes."""

import pytest
import torch
import torch.nn as nn

from vmamba_npu.data import ArrayImages, Preparation
from vmamba_npu.engine.metrics import evaluate
from vmamba_npu.engine.processes import Processes
from vmamba_npu.engine.step import Precision

CLASSES = 7


class Share(Processes):
    """One of several processes, which gathers what the others, run before, gave."""

    def gather(self, value):
        GIVEN.append(value)
        return list(GIVEN)


GIVEN: list = []


def parts() -> tuple[nn.Module, ArrayImages]:
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (23, 1, 4, 4), dtype=torch.uint8)
    labels = torch.randint(0, CLASSES - 1, (23,))  # the last class has no image
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, CLASSES), nn.Dropout(0.5))
    return model, ArrayImages(pixels, labels, Preparation((4, 4), 1, (0.4,), (0.3,)))


@pytest.mark.parametrize("batch_size", [1, 5, 23, 100])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_scores(batch_size, world):
    model, data = parts()
    model.train()
    GIVEN.clear()
    for rank in range(world):
        here = Share(torch.device("cpu"), rank, world)
        scores = evaluate(model, data, CLASSES, batch_size, here, Precision("fp32", here.device))
    assert model.training
    x = (data.images.double() / 255 - 0.4) / 0.3
    logits = x.flatten(1) @ model[1].weight.double().T + model[1].bias.double()
    order = logits.argsort(-1, descending=True)
    assert scores.images == 23
    assert scores.loss == pytest.approx(float(-logits.log_softmax(-1)[range(23), data.labels].mean()), rel=1e-5)
    right = order[:, 0] == data.labels
    assert scores.top1 == int(right.sum()) / 23
    assert (
        scores.top5
        == sum(label in row[:5] for label, row in zip(data.labels.tolist(), order.tolist(), strict=True)) / 23
    )
    confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.long)
    for label, row in zip(data.labels.tolist(), order.tolist(), strict=True):
        confusion[label, row[0]] += 1
    assert torch.equal(scores.confusion, confusion)
    assert [(i, y, p) for i, y, p, _ in scores.wrong] == [
        (i, int(data.labels[i]), int(order[i, 0])) for i in range(23) if not right[i]
    ]
    assert scores.wrong[0][3] == pytest.approx(float(logits.softmax(-1)[scores.wrong[0][0]].max()), rel=1e-5)
    assert scores.per_class[-1] is None
    for label in range(CLASSES - 1):
        mine = data.labels == label
        assert scores.per_class[label] == pytest.approx(float(right[mine].double().mean()))


def test_top5_of_two_classes_is_1():
    model, data = parts()
    model[1] = nn.Linear(16, 2)
    two = ArrayImages(data.images, data.labels % 2, data.prepare)
    here = Processes(torch.device("cpu"))
    scores = evaluate(model, two, 2, 10, here, Precision("fp32", here.device))
    assert scores.top5 == 1.0 and 0 < scores.top1 < 1
    assert scores.row("val") == {"val_loss": scores.loss, "val_top1": scores.top1, "val_top5": 1.0}
