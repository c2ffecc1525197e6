"""Training steps of 00_single_gpu/train beside PyTorch's on the CPU, same shapes, f32, in turns.

PyTorch with what makes it fast: scaled_dot_product_attention, q k v in one product and gate up in another,
fused AdamW. `make bench` runs it where PyTorch is installed. A round is a step of each, and who is first
alternates; the median over rounds of the ratio of tokens per second is printed:
    bench torch-<shape> <ratio> x-torch target <value> ok|short   quartiles <low> <high>
and, where it is short, what our step takes beyond its FLOPs at SGEMM's rate (figures.h).
"""
import argparse
import os
import re
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F

from bench_torch import rms_norm, rope

SHAPES = (  # name, target, rounds
    ("L6-h384", 1.4, 9, dict(layers=6, hidden=384, heads=6, ffn=1024, vocab=256, seq=256, micro_batch=8)),
    ("L12-h768", 1.3, 5,
     dict(layers=12, hidden=768, heads=12, ffn=2048, vocab=32000, seq=256, micro_batch=4)),
)


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


class Torch:
    def __init__(self, o):
        self.o, self.model = o, Llama(o)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)

        self.tokens_per_second()  # the first steps also allocate
        self.tokens_per_second()

    def tokens_per_second(self):
        o = self.o
        text = torch.randint(0, o["vocab"], (o["micro_batch"], o["seq"] + 1))
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model(text[:, :-1], text[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        loss.item()
        return o["micro_batch"] * o["seq"] / (time.perf_counter() - start)


class Ours:
    def __init__(self, build, o, threads):
        shape = ",".join(f"{name.replace('_', '-')}={value}" for name, value in o.items())
        self.process = subprocess.Popen([f"{build}/tests/bench", "--tokens-per-second", shape],
                                        env=dict(os.environ, OMP_NUM_THREADS=str(threads)),
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.answer("ready")

    def answer(self, pattern):
        line = self.process.stdout.readline()
        found = re.search(pattern, line)
        if not found:
            sys.exit(f"{' '.join(self.process.args)} says '{line.rstrip()}', not '{pattern}'")
        return found

    def tokens_per_second(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.answer("([0-9.e+]+) tokens/s").group(1))

    def end(self):
        self.process.stdin.close()
        missing = self.answer("  missing.*").group()
        self.process.wait()
        return missing


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", help="the folder in which the benchmarks are built")
    build, threads = parser.parse_args().build, len(os.sched_getaffinity(0))
    torch.manual_seed(1)
    torch.set_num_threads(threads)
    print(f"PyTorch {torch.__version__}, {threads} threads")
    for name, target, rounds, shape in SHAPES:
        peer, book, ratios, rates = Torch(shape), Ours(build, shape, threads), [], []
        for i in range(rounds):
            if i % 2:
                ours, theirs = book.tokens_per_second(), peer.tokens_per_second()
            else:
                theirs, ours = peer.tokens_per_second(), book.tokens_per_second()
            rates.append(theirs)
            ratios.append(ours / theirs)
        missing = book.end()
        ratios.sort()
        ratio = statistics.median(ratios)
        short = ratio < target
        print(f"bench torch-{name} {ratio:.4g} x-torch target {target} {'short' if short else 'ok'}"
              f"   quartiles {ratios[rounds // 4]:.4g} {ratios[-1 - rounds // 4]:.4g}")
        print(f"  PyTorch: {statistics.median(rates):.0f} tokens/s", flush=True)
        if short:
            print(missing, flush=True)


if __name__ == "__main__":
    main()
