"""Training steps of a model like 00_single_gpu/train's in PyTorch on the CPU, in f32, when bench.c asks.

    bench_torch_cpu.py "layers=6 hidden=384 heads=6 ..." THREADS

PyTorch as fast as it gets: scaled_dot_product_attention, q k v in one product and gate up in another, fused
AdamW. Answers with a line about itself once it is ready, and then with a step's tokens/s for each line of
input.
"""
import sys
import time

import torch
import torch.nn.functional as F

from bench_torch import rms_norm, rope


class Block(torch.nn.Module):
    def __init__(self, h, heads, f):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.Parameter(torch.ones(h)), torch.nn.Parameter(torch.ones(h))
        self.qkv, self.o = torch.nn.Linear(h, 3 * h, bias=False), torch.nn.Linear(h, h, bias=False)
        self.gate_up, self.down = torch.nn.Linear(h, 2 * f, bias=False), torch.nn.Linear(f, h, bias=False)

    def forward(self, x, cos, sin):
        b, s, h = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2)
                   for t in self.qkv(rms_norm(x, self.norm1)).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, h))
        gate, up = self.gate_up(rms_norm(x, self.norm2)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(torch.nn.Module):
    def __init__(self, o):
        super().__init__()
        h = o["hidden"]
        self.embedding = torch.nn.Embedding(o["vocab"], h)
        self.blocks = torch.nn.ModuleList(Block(h, o["heads"], o["ffn"]) for _ in range(o["layers"]))
        self.norm = torch.nn.Parameter(torch.ones(h))
        self.head = torch.nn.Linear(h, o["vocab"], bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.02)
        d = h // o["heads"]
        angle = torch.arange(o["seq"])[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)[None, :]
        self.register_buffer("cos", torch.cat((angle, angle), dim=-1).cos())
        self.register_buffer("sin", torch.cat((angle, angle), dim=-1).sin())

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(rms_norm(x, self.norm))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def step(model, optimizer, o):
    text = torch.randint(0, o["vocab"], (o["micro-batch"], o["seq"] + 1))
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = model(text[:, :-1], text[:, 1:])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    loss.item()
    return o["micro-batch"] * o["seq"] / (time.perf_counter() - start)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    o = {name: int(value) for name, value in (word.split("=") for word in sys.argv[1].split())}
    torch.manual_seed(1)
    torch.set_num_threads(int(sys.argv[2]))
    model = Llama(o)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    for _ in range(2):
        step(model, optimizer, o)  # the first steps also allocate
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    for _ in sys.stdin:
        print(step(model, optimizer, o), flush=True)


if __name__ == "__main__":
    main()
