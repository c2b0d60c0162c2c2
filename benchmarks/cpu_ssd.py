"""SSD on a CPU: time of the operator against the batched matrix products of its chunked form alone.

    python -m benchmarks.cpu_ssd [--threads 2] [--save]

The yardstick is what no implementation by matrix products can avoid, each product one `torch.bmm` over all chunks and
heads at once, with the chunk of the case. Forward: C B^T, (C B^T . decay) X, C S, B^T X. Backward, by the closed form:
dY X^T, its two uses, and those with the states and their gradients, eight in all. Peak extra memory is the growth of
the resident set in a fresh process that makes one forward and backward.
"""

import argparse
import multiprocessing
import re
from pathlib import Path

import torch

from vmamba_npu.ops import ssd
from vmamba_npu.testing import error_ratio

from .record import milliseconds, save

# B, L, H, P, N, chunk, G; the last two are the goals for forward and forward + backward.
CASES = {
    "small": ((1, 2048, 8, 64, 64, 64, 1), 2.0, 2.5),
    "large": ((2, 4096, 16, 64, 128, 128, 1), 1.5, 2.2),
}


def draw(B: int, L: int, H: int, P: int, N: int, chunk: int, G: int) -> list[torch.Tensor]:
    torch.manual_seed(20260801)
    x, dt, A = torch.randn(B, L, H, P), 0.01 + 0.1 * torch.rand(B, L, H), -0.1 - 0.4 * torch.rand(H)
    return [x, dt, A, torch.randn(B, L, G, N) / 5, torch.randn(B, L, G, N) / 5]


def products(B: int, L: int, H: int, P: int, N: int, chunk: int, G: int):
    """(forward products, backward products) as calls; G = 1."""
    chunks = B * L // chunk
    b, c = torch.randn(chunks, chunk, N), torch.randn(chunks, chunk, N)
    scores = torch.randn(chunks, chunk, chunk)
    ch = torch.randn(chunks * H, chunk, N)
    mixing, x, states = (
        torch.randn(chunks * H, chunk, chunk),
        torch.randn(chunks * H, chunk, P),
        torch.randn(chunks * H, N, P),
    )

    def forward() -> None:
        torch.bmm(c, b.mT)
        torch.bmm(mixing, x)
        torch.bmm(ch, states)
        torch.bmm(ch.mT, x)

    def backward() -> None:
        torch.bmm(x, x.mT)
        torch.bmm(mixing.mT, x)
        torch.bmm(scores, b)
        torch.bmm(scores.mT, c)
        torch.bmm(x, states.mT)
        torch.bmm(x, states.mT)
        torch.bmm(ch, states)
        torch.bmm(ch.mT, x)

    return forward, backward


def _peak_kilobytes() -> int:
    """Largest resident set of this process so far (Linux)."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def _peak_extra_megabytes(shape: tuple[int, ...], queue) -> None:
    inputs = [t.requires_grad_() for t in draw(*shape)]
    dy = torch.randn_like(inputs[0])
    before = _peak_kilobytes()
    y, _ = ssd(*inputs, shape[5], backend="torch")
    torch.autograd.grad(y, inputs, dy)
    queue.put((_peak_kilobytes() - before) / 1024)


def peak_extra_megabytes(shape: tuple[int, ...]) -> float:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_peak_extra_megabytes, args=(shape, queue))
    process.start()
    result = queue.get()
    process.join()
    return result


def measure(name: str) -> dict[str, object]:
    shape, forward_goal, both_goal = CASES[name]
    inputs = draw(*shape)
    leaves = [t.clone().requires_grad_() for t in inputs]
    y, _ = ssd(*leaves, shape[5], backend="torch")
    dy = torch.randn_like(y)
    forward_products, backward_products = products(*shape)

    def both() -> None:
        torch.autograd.grad(ssd(*leaves, shape[5], backend="torch")[0], leaves, dy)

    t = milliseconds(
        {
            "forward_products": forward_products,
            "forward": lambda: ssd(*inputs, shape[5], backend="torch"),
            "backward_products": backward_products,
            "both": both,
        }
    )
    few = [v[:1, :256] if v.ndim > 1 else v for v in inputs]
    return {
        "case": name,
        "shape_b_l_h_p_n_chunk_g": shape,
        "forward_ms": t["forward"],
        "forward_products_ms": t["forward_products"],
        "forward_ratio": t["forward"] / t["forward_products"],
        "forward_goal": forward_goal,
        "both_ms": t["both"],
        "both_products_ms": t["forward_products"] + t["backward_products"],
        "both_ratio": t["both"] / (t["forward_products"] + t["backward_products"]),
        "both_goal": both_goal,
        "peak_extra_mb": peak_extra_megabytes(shape),
        "error_of_256_tokens": error_ratio(
            ssd(*few, backend="torch")[0], ssd(*(v.double() for v in few), backend="reference")[0]
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="record the rows in benchmarks/results/cpu_ssd.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for name in CASES:
        row = measure(name)
        rows.append(row)
        print(
            f"{name:6} {row['shape_b_l_h_p_n_chunk_g']}  "
            f"forward {row['forward_ms']:.2f} ms = {row['forward_ratio']:.2f} x products (goal {row['forward_goal']})  "
            f"forward+backward {row['both_ms']:7.2f} ms = {row['both_ratio']:.2f} x (goal {row['both_goal']})  "
            f"peak extra {row['peak_extra_mb']:.0f} MB  error {row['error_of_256_tokens']:.1e}",
            flush=True,
        )
    if arguments.save:
        print(save("cpu_ssd", rows, "median of 15 rounds; in each, mean of consecutive calls for about 50 ms"))


if __name__ == "__main__":
    main()
