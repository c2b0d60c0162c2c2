"""How tokens are laid out in chunks, steps and decays per chunk, and reused working memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from threading import local

import torch
import torch.nn.functional as F
from torch import Tensor

from ....backends.tensors import at_least_float32

# Tokens per chunk: the in-chunk work grows with it, the work on states shrinks; the argument `chunk_size` does not
# enter, since the result does not depend on it (benchmarks/results/cpu_ssd.json was measured with this value).
CHUNK = 64
# Elements of a block's [tokens x tokens] matrices: on a CPU few enough to stay in its caches.
BLOCK_ELEMENTS = {"cpu": 1 << 20}
BLOCK_ELEMENTS_ELSEWHERE = 1 << 27

Borders = dict[int, list[tuple[int, int]]]  # chunk -> (row, sequence) pairs; sequence -1 stands for a zero state


@dataclass(frozen=True)
class Plan:
    """Chunks of `size` tokens, `count` of them in each of `rows` rows; no chunk holds tokens of two sequences.

    begins, ends: the sequences whose first / last chunk a chunk is.
    index: None if row r is batch row r in order; else [rows, count * size] positions in the flattened tokens, where
        the position B * L stands for padding.
    """

    size: int
    count: int
    rows: int
    begins: Borders
    ends: Borders
    index: Tensor | None = None

    def blocks(self, heads: int, device: torch.device) -> Iterator[tuple[slice, list[tuple[int, int]]]]:
        """(rows, [(first chunk, end chunk), ...]) such that a block's matrices fit the cache."""
        budget = BLOCK_ELEMENTS.get(device.type, BLOCK_ELEMENTS_ELSEWHERE)
        chunks = max(1, budget // max(1, heads * self.size * self.size))
        rows = max(1, chunks // max(1, self.count))
        spans = [(c, min(c + chunks, self.count)) for c in range(0, self.count, chunks)]
        for r in range(0, self.rows, rows):
            yield slice(r, min(r + rows, self.rows)), spans

    def untouched(self, sequences: int) -> list[int]:
        """Sequences without a token: their final state is their initial one."""
        ended = {s for pairs in self.ends.values() for _, s in pairs}
        return [s for s in range(sequences) if s not in ended]


def plan(x: Tensor, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> Plan:
    batch, L = x.shape[:2]
    if seq_idx is None and cu_seqlens is None:
        count = -(-L // CHUNK)
        size = max(1, -(-L // max(count, 1)))  # chunks of equal length: 196 tokens are 4 x 49, not 3 x 64 + 4
        rows = [(r, r) for r in range(batch)] if L else []
        return Plan(size, count, batch, {0: rows}, {count - 1: rows})
    return _packed(_segments(batch, L, seq_idx, cu_seqlens), batch * L, x.device)


def _segments(
    batch: int, L: int, seq_idx: Tensor | None, cu_seqlens: Tensor | None
) -> list[list[tuple[int, int, int, int]]]:
    """Each row's runs of one sequence: (first token, end, sequence whose state it starts from, sequence it ends)."""
    if cu_seqlens is not None:
        borders = cu_seqlens.tolist()
        return [[(a, b, i, i) for i, (a, b) in enumerate(pairwise(borders)) if a < b]]
    assert seq_idx is not None
    changes = F.pad(seq_idx[:, :-1], (1, 0)) != seq_idx
    rows = []
    for r in range(batch):
        starts = changes[r].nonzero()[:, 0].tolist()
        fresh = starts[:1] == [0]  # the first token is not of sequence 0: the initial state is dropped
        borders = ([] if fresh else [0]) + starts + [L]
        runs = list(pairwise(borders)) if L else []
        last = len(runs) - 1
        rows.append(
            [(r * L + a, r * L + b, -1 if i or fresh else r, r if i == last else -1) for i, (a, b) in enumerate(runs)]
        )
    return rows


def _packed(segments: list[list[tuple[int, int, int, int]]], padding: int, device: torch.device) -> Plan:
    size = min(CHUNK, max((b - a for row in segments for a, b, _, _ in row), default=1))
    begins: Borders = {}
    ends: Borders = {}
    pieces = []
    for r, row in enumerate(segments):
        chunk, tokens = 0, []
        for a, b, first, last in row:
            begins.setdefault(chunk, []).append((r, first))
            chunk += -(-(b - a) // size)
            ends.setdefault(chunk - 1, []).append((r, last))
            tokens += [torch.arange(a, b), torch.full((-(b - a) % size,), padding)]
        pieces.append(torch.cat(tokens) if tokens else torch.empty(0, dtype=torch.long))
    count = max(len(p) for p in pieces) // size
    index = torch.stack([F.pad(p, (0, count * size - len(p)), value=padding) for p in pieces])
    return Plan(size, count, len(segments), begins, ends, index.to(device))


def gather(t: Tensor, index: Tensor | None) -> Tensor:
    """Tokens [B, L, ...] in the order of the plan: [rows, count * size, ...], zeros at padding."""
    if index is None:
        return t
    flat = F.pad(t.flatten(0, 1), (0, 0) * (t.ndim - 2) + (0, 1))
    return flat[index]


def scatter(t: Tensor, index: Tensor | None, like: Tensor) -> Tensor:
    """The inverse of `gather`: [B, L, ...] of the tokens that `like` has."""
    if index is None:
        return t
    flat = t.new_empty(like.shape[0] * like.shape[1] + 1, *t.shape[2:])
    flat[index.flatten()] = t.flatten(0, 1)
    return flat[:-1].unflatten(0, like.shape[:2])


# Fresh memory pages cost more on a CPU than the arithmetic on them, so each thread keeps this much from call to call.
KEPT_BYTES = 96 << 20
_THREAD = local()


class Workspace:
    """Named buffers that keep their memory from block to block."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.device, self.dtype = device, dtype
        self._buffers: dict[str, Tensor] = {}
        self._views: dict[tuple[str | int, ...], Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        key: tuple[str | int, ...] = (name, *shape)
        view = self._views.get(key)
        if view is None:
            size = prod(shape)
            if name not in self._buffers or self._buffers[name].numel() < size:
                self._buffers[name] = torch.empty(size, dtype=self.dtype, device=self.device)
                self._views = {k: t for k, t in self._views.items() if k[0] != name}
            view = self._views[key] = self._buffers[name][:size].view(shape)
        return view

    def __len__(self) -> int:
        return len(self._views)

    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())


@contextmanager
def workspace(device: torch.device, dtype: torch.dtype) -> Iterator[Workspace]:
    """Working memory of a call: on a CPU what this thread has kept; elsewhere allocators cache, so new buffers."""
    ws = _THREAD.__dict__.pop(str(dtype), None) if device.type == "cpu" else None
    ws = Workspace(device, dtype) if ws is None else ws
    yield ws
    if device.type == "cpu" and ws.bytes() <= KEPT_BYTES and len(ws) <= 1000:
        _THREAD.__dict__[str(dtype)] = ws


def block(t: Tensor, p: Plan, rows: slice, c0: int, c1: int) -> Tensor:
    """Tokens of the block as [chunks, rows, size, ...]: a view, unless the last chunk needs padding with zeros."""
    t = t[rows, c0 * p.size : c1 * p.size]
    missing = (c1 - c0) * p.size - t.shape[1]
    if missing:
        t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, missing))
    return t.unflatten(1, (c1 - c0, p.size)).transpose(0, 1)


def steps(dt: Tensor, dt_bias: Tensor | None, softplus: bool, low: float, high: float, acc: torch.dtype) -> Tensor:
    """Effective steps [B, L, H]."""
    raw = dt.to(acc) if dt_bias is None else dt.to(acc) + dt_bias.to(acc)
    return (torch.logaddexp(raw, raw.new_zeros(())) if softplus else raw).clamp(low, high)


def step_slope(dt: Tensor, dt_bias: Tensor | None, softplus: bool, low: float, high: float, acc: torch.dtype) -> Tensor:
    """Derivative of the effective steps by the raw ones [B, L, H]; 0 where the clamp acts."""
    raw = dt.to(acc) if dt_bias is None else dt.to(acc) + dt_bias.to(acc)
    inside = torch.logaddexp(raw, raw.new_zeros(())) if softplus else raw
    slope = torch.sigmoid(raw) if softplus else torch.ones_like(raw)
    return slope.masked_fill((inside < low) | (inside > high), 0)


class Decays:
    """Steps and decays of every chunk, [chunks, rows, G, heads of a group, size] each, float32 or float64.

    step: effective steps, 0 at padding.      cs: sum of step * A inside the chunk up to each token.
    into: exp(cs), what reaches a token of the state before the chunk.
    out: exp(cs_last - cs), what a token's term has left at the end of the chunk.
    weight: step * out.      whole: exp(cs_last), once for each column of the state.
    """

    def __init__(self, step: Tensor, A: Tensor, groups: int, P: int, p: Plan):
        chunked = block(gather(step, p.index), p, slice(None), 0, p.count)  # [chunks, rows, size, H]
        chunked = chunked.unflatten(-1, (groups, -1)).permute(0, 1, 3, 4, 2).contiguous()
        self.step = chunked
        self.cs = (chunked * A.to(step.dtype).view(groups, -1, 1)).cumsum(-1)
        self.into = self.cs.exp()
        self.out = (self.cs[..., -1:] - self.cs).exp()
        self.weight = self.step * self.out
        # [chunks, rows, G, 1, h * P]: a factor for every column of a state, so that carrying it is one long loop.
        self.whole = self.into[..., -1, None].expand(*self.into.shape[:-1], P).flatten(3)[..., None, :]


def to_group_states(states: Tensor, groups: int, acc: torch.dtype) -> Tensor:
    """[sequences, H, P, N] -> [sequences + 1, G, N, heads of a group * P]; the added last one is zero."""
    states = states.to(acc).unflatten(1, (groups, -1)).permute(0, 1, 4, 2, 3).flatten(3)
    return F.pad(states, (0, 0, 0, 0, 0, 0, 0, 1)).contiguous()


def from_group_states(states: Tensor, P: int) -> Tensor:
    """The inverse of `to_group_states`, without the added zero state."""
    return states[:-1].unflatten(3, (-1, P)).permute(0, 1, 3, 4, 2).flatten(1, 2).contiguous()


def initial_group_states(x: Tensor, B: Tensor, initial_states: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    acc = at_least_float32(x.dtype)
    if initial_states is not None:
        return to_group_states(initial_states, B.shape[2], acc)
    sequences = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    G, N = B.shape[2:]
    return torch.zeros(sequences + 1, G, N, x.shape[2] // G * x.shape[3], dtype=acc, device=x.device)


def at_border(pairs: list[tuple[int, int]], rows: slice) -> tuple[slice | list[int], slice | list[int]]:
    """Rows of the block (relative to its first) and sequences, of the (row, sequence) pairs at one chunk."""
    here = [(r - rows.start, s) for r, s in pairs if rows.start <= r < rows.stop]
    if all(s == r + rows.start for r, s in here) and len(here) == rows.stop - rows.start:
        return slice(None), rows
    return [r for r, _ in here], [s for _, s in here]


def to_skip(D: Tensor | None, groups: int, acc: torch.dtype) -> Tensor | None:
    """D, [H] or [H, P], as [G, heads of a group, 1, P or 1]."""
    return None if D is None else D.to(acc).reshape(groups, D.shape[0] // groups, 1, -1)


def unchunk(t: Tensor, p: Plan, like: Tensor) -> Tensor:
    """[chunks, rows, G, h, size] -> [B, L, H] for the tokens of `like` [B, L, ...]."""
    t = t.permute(1, 0, 4, 2, 3).flatten(3).flatten(1, 2)
    return scatter(t if p.index is not None else t[:, : like.shape[1]], p.index, like)
