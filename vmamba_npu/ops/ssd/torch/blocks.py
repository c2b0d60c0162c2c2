"""One block of rows and chunks: its tensors in the layouts of the products, and the walk of the state over it."""

import torch
from torch import Tensor

from .chunks import Decays, Plan, Workspace, at_border, block


class Block:
    """The tensors of rows r0 to r1 and chunks c0 to c1, in memory of the workspace.

    b is the flattened (chunk, row, group) axis, h counts the heads of a group. Where a product has one operand per
    group (B and C), the heads of the group lie side by side in the other, so that one product serves them all.
    """

    def __init__(
        self, x: Tensor, B: Tensor, C: Tensor, decays: Decays, p: Plan, rows: slice, c0: int, c1: int, ws: Workspace
    ):
        self.plan, self.rows, self.c0, self.c1, self.ws, self.decays = p, rows, c0, c1, ws, decays
        self.grid = (c1 - c0, rows.stop - rows.start, B.shape[2])
        self.b = self.grid[0] * self.grid[1] * self.grid[2]
        self.size, self.heads, self.P, self.N = p.size, x.shape[2] // B.shape[2], x.shape[3], B.shape[3]
        self.x = self.tokens(x)
        self.B, self.C = self._maps(B), self._maps(C)

    def tokens(self, t: Tensor) -> Tensor:
        """[rows, tokens, H, P] -> view [chunks, rows, G, h, size, P] (a padded copy at the tail)."""
        t = block(t, self.plan, self.rows, self.c0, self.c1)
        return t.unflatten(3, (self.grid[2], -1)).permute(0, 1, 3, 4, 2, 5)

    def _maps(self, t: Tensor) -> Tensor:
        """[rows, tokens, G, N] -> [b, size, N]."""
        return block(t, self.plan, self.rows, self.c0, self.c1).transpose(2, 3).flatten(0, 2).to(self.decays.step.dtype)

    def of(self, decay: Tensor) -> Tensor:
        """A per-token factor of this block: [chunks, rows, G, h, size, 1]."""
        return decay[self.c0 : self.c1, self.rows][..., None]

    def empty_by_head(self, name: str) -> Tensor:
        """Memory [chunks, rows, G, h, size, P]."""
        return self.ws(name, *self.grid, self.heads, self.size, self.P)

    def by_group(self, name: str, t: Tensor, factor: Tensor) -> Tensor:
        """t * factor as [b, size, h * P]."""
        out = self.ws(name, *self.grid, self.size, self.heads, self.P)
        torch.mul(t.transpose(3, 4), factor.transpose(3, 4), out=out)
        return out.flatten(0, 2).flatten(2)

    def heads_of(self, t: Tensor) -> Tensor:
        """[b, size, h * P] -> view [chunks, rows, G, h, size, P]."""
        return t.unflatten(0, self.grid).unflatten(4, (self.heads, self.P)).transpose(3, 4)

    def target(self, name: str, t: Tensor) -> Tensor:
        """Where to compute what `store` will write: a view of t itself, or a buffer if t is narrower or shorter."""
        if t.dtype == self.ws.dtype and self.c1 * self.size <= t.shape[1]:
            return self.tokens(t)
        return self.empty_by_head(name)

    def store(self, target: Tensor, t: Tensor) -> None:
        """Write [chunks, rows, G, (h,) size, last] into target [rows, tokens, G * h, last], dropping the padding."""
        if t.untyped_storage().data_ptr() == target.untyped_storage().data_ptr():
            return
        t = t.permute(1, 0, -2, *range(2, t.ndim - 2), -1)  # [rows, chunks, size, G, (h,) last]
        target = target[self.rows, self.c0 * self.size : self.c1 * self.size]
        if target.shape[1] == t.shape[1] * self.size:
            target.unflatten(2, t.shape[3:-1]).unflatten(1, t.shape[1:3]).copy_(t)
        else:
            target.copy_(t.flatten(3, -2).flatten(1, 2)[:, : target.shape[1]])

    def inside(self) -> tuple[Tensor, Tensor]:
        """C B^T with zeros above the diagonal [b, 1, size, size]; decay [b, h, size, size], 1 above it."""
        size = self.size
        scores = torch.bmm(self.C, self.B.mT, out=self.ws("scores", self.b, size, size)).tril_()
        cs = self.decays.cs[self.c0 : self.c1, self.rows]
        decay = self.ws("decay", *self.grid, self.heads, size, size)
        # Exponents above the diagonal are set to 0 before exp, where they could overflow: never inf * 0.
        torch.sub(cs[..., :, None], cs[..., None, :], out=decay).tril_().exp_()
        return scores[:, None], decay.flatten(0, 2)

    def walk(
        self, adds: Tensor, first: Tensor, initial: Tensor, final: Tensor | None, name: str = "states"
    ) -> tuple[Tensor, Tensor]:
        """States at the start of each chunk [b, N, h * P] and at the end of the block [rows, G, N, h * P].

        adds: [b, N, h * P] what each chunk adds. first: [rows, G, N, h * P] at the start of the block. `initial` is
        read and `final` written where a sequence begins or ends.
        """
        states = self._state_buffer(name)
        states[0] = first
        step_by_step = states.unbind(0)
        each_adds = adds.view(self.grid[0], *first.shape).unbind(0)
        for i, (decay, add) in enumerate(zip(self._whole(), each_adds, strict=True)):
            if self.c0 + i in self.plan.begins:
                rows, sequences = at_border(self.plan.begins[self.c0 + i], self.rows)
                states[i, rows] = initial[sequences]
            torch.addcmul(add, step_by_step[i], decay, out=step_by_step[i + 1])
            if final is not None and self.c0 + i in self.plan.ends:
                rows, sequences = at_border(self.plan.ends[self.c0 + i], self.rows)
                final[sequences] = states[i + 1, rows]
        return states[:-1].flatten(0, 2), states[-1]

    def walk_back(self, adds: Tensor, last: Tensor, d_final: Tensor, d_initial: Tensor) -> tuple[Tensor, Tensor]:
        """As `walk`, for gradients, from the last chunk to the first: those at the end of each chunk, and at the start
        of the block. `d_final` is read where a sequence ends, `d_initial` written where one begins."""
        states = self._state_buffer("d_states")
        states[-1] = last
        step_by_step = states.unbind(0)
        each_adds = adds.view(self.grid[0], *last.shape).unbind(0)
        decays = self._whole()
        for i in reversed(range(self.grid[0])):
            if self.c0 + i in self.plan.ends:
                rows, sequences = at_border(self.plan.ends[self.c0 + i], self.rows)
                states[i + 1, rows] = d_final[sequences]
            torch.addcmul(each_adds[i], step_by_step[i + 1], decays[i], out=step_by_step[i])
            if self.c0 + i in self.plan.begins:
                rows, sequences = at_border(self.plan.begins[self.c0 + i], self.rows)
                d_initial[sequences] = states[i, rows]
        return states[1:].flatten(0, 2), states[0]

    def _state_buffer(self, name: str) -> Tensor:
        chunks, rows, groups = self.grid
        return self.ws(name, chunks + 1, rows, groups, self.N, self.heads * self.P)

    def _whole(self) -> tuple[Tensor, ...]:
        return self.decays.whole[self.c0 : self.c1, self.rows].unbind(0)
