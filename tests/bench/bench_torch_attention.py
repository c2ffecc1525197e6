"""PyTorch's fused attention in bf16, with which `make gpu-check PART=kernels` compares chapter 07's.

Prints, for each implementation that this PyTorch has for the shape, the mean of eleven calls in a row, timed
by CUDA events:
    bench torch-attention <flash|cudnn> <full|causal> <forward|backward> <milliseconds> ms
"""
import argparse

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": getattr(SDPBackend, "CUDNN_ATTENTION", None)}


def milliseconds(call, warm_up=2, times=11):
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for i in range(warm_up + times):
        if i == warm_up:
            begin.record()
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def main():
    parser = argparse.ArgumentParser()
    for name, value in (("size", 4096), ("heads", 32), ("kv-heads", 8), ("head-size", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    o = parser.parse_args()
    # A view (b, a, s, d) of a tensor stored as (b, s, a, d), as in chapter 07.
    operand = lambda heads: torch.randn(
        1, o.size, heads, o.head_size, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
    q, k, v = operand(o.heads), operand(o.kv_heads), operand(o.kv_heads)
    gradient = torch.randn_like(q)
    for name, backend in BACKENDS.items():
        for causal in (False, True):
            attention = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
            try:
                with sdpa_kernel([backend]):
                    forward = milliseconds(attention)
                    out = attention()
                    backward = milliseconds(
                        lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
            except (RuntimeError, TypeError, AttributeError):
                continue  # not in this PyTorch, or not for this shape
            mask = "causal" if causal else "full"
            print(f"bench torch-attention {name} {mask} forward {forward:.4g} ms")
            print(f"bench torch-attention {name} {mask} backward {backward:.4g} ms", flush=True)


main()
