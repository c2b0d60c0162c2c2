"""The orders in which directional scans visit the tokens of a map, and the way back."""

import torch
from torch import Tensor

DIRECTIONS = ("row", "row reversed", "column", "column reversed")


def to_scans(x: Tensor, directions: int) -> Tensor:
    """The tokens of a map in the order of each of the first directions: [B, H, W, C] -> [B, H*W, directions, C]."""
    rows = x.flatten(1, 2)
    if directions == 1:
        return rows.unsqueeze(2)
    if directions == 2:
        return torch.stack([rows, rows.flip(1)], 2)
    columns = x.transpose(1, 2).flatten(1, 2)
    return torch.stack([rows, rows.flip(1), columns, columns.flip(1)], 2)


def mean_of_scans(y: Tensor, directions: int, height: int, width: int) -> Tensor:
    """The tokens of each scan back in their places, averaged: [B, H*W, directions, C] -> [B, height, width, C]."""
    if directions == 1:
        return y[:, :, 0].unflatten(1, (height, width))
    # scaled before they are added: four half-precision values may have a sum that is out of range
    scale = 1.0 / directions
    rows = torch.add(y[:, :, 0] * scale, y[:, :, 1].flip(1), alpha=scale).unflatten(1, (height, width))
    if directions == 2:
        return rows
    columns = torch.add(y[:, :, 2] * scale, y[:, :, 3].flip(1), alpha=scale).unflatten(1, (width, height))
    return rows + columns.transpose(1, 2)


def scan_order(direction: int, height: int, width: int) -> Tensor:
    """[height * width] int64: row-major number of the token that scan `direction` (0 to 3) visits at each step.

    Made by the function that orders the tokens inside the network, so figures drawn from it show what the network does.
    """
    if not 0 <= direction < len(DIRECTIONS):
        raise ValueError(f"direction: expected 0 to {len(DIRECTIONS) - 1}, got {direction}")
    if height < 1 or width < 1:
        raise ValueError(f"height, width: expected at least 1 x 1, got {height} x {width}")
    tokens = torch.arange(height * width).view(1, height, width, 1)
    return to_scans(tokens, len(DIRECTIONS))[0, :, direction, 0]
