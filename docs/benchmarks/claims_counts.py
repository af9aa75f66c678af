"""How many elements compressors pick among 2 to 16 ranks, and how many words they send, on made-up gradients.

    python docs/benchmarks/claims_counts.py

Layers have different scales.  Both are given as multiples of k = 500 elements of 50,000, over steps 20 to 39; of words
(4 bytes) also the most that a rank sent in one of these steps.
"""

import torch

import lightning_sparse as ls

N, K, STEPS, SETTLED = 50_000, 500, 40, 20


def main() -> None:
    """Print one line for each number of ranks and compressor."""
    torch.manual_seed(0)
    scale = torch.randn(20).exp().repeat_interleave(N // 20)
    density = K / N
    compressors = [
        ls.MiCRO(density=density),
        ls.ImportancePruning(density=density),
        ls.TopK(density=density),
        ls.OkTopk(density=density, indices="int32"),
        ls.OkTopk(density=density),
    ]
    print("ranks compressor         picked / k   words / k   the most   6 (P - 1) / P")
    for size in (2, 4, 8, 16):
        gradients = torch.randn(STEPS, size, N) * scale
        for compressor in compressors:
            got = ls.simulate(compressor, gradients, scale)
            picked = got.picked[SETTLED:].float().mean() / K
            words = got.sent_bytes[SETTLED:].float() / 4 / K
            indices = getattr(compressor, "indices", "")
            name = f"{type(compressor).__name__} {indices if indices == 'int32' else ''}"
            bound = 6 * (size - 1) / size
            print(f"{size:5} {name:20} {picked:8.2f} {words.mean():11.2f} {words.max():10.2f} {bound:10.2f}")


if __name__ == "__main__":
    main()
