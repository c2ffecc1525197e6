"""The model of 00_single_gpu/train in PyTorch, eager, with scaled_dot_product_attention.

It is the yardstick of `make gpu-check`.

Same shape, same batch, same arithmetic: bf16 weights and activations, sums of gradients, master weights and
AdamW in f32, one norm for clipping, the loss read every step. Prints the median over the steps after the
first three:
    bench torch-train <tokens per second> tokens/s
"""
import argparse
import math
import statistics
import time

import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps=1e-5):
    return F.rms_norm(x, weight.shape, weight, eps)


def rope(x, cos, sin):  # (b, a, s, d), half-split as in Hugging Face
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class Block(torch.nn.Module):
    def __init__(self, h, a, kv, f):
        super().__init__()
        self.a, self.kv, self.d = a, kv, h // a
        self.norm1, self.norm2 = torch.nn.Parameter(torch.ones(h)), torch.nn.Parameter(torch.ones(h))
        linear = lambda rows, columns: torch.nn.Linear(columns, rows, bias=False)
        self.q, self.k, self.v = linear(h, h), linear(kv * self.d, h), linear(kv * self.d, h)
        self.o = linear(h, h)
        self.gate, self.up, self.down = linear(f, h), linear(f, h), linear(h, f)

    def forward(self, x, cos, sin):
        b, s, h = x.shape
        y = rms_norm(x, self.norm1)
        heads = lambda t, n: t.view(b, s, n, self.d).transpose(1, 2)
        q, k = rope(heads(self.q(y), self.a), cos, sin), rope(heads(self.k(y), self.kv), cos, sin)
        y = F.scaled_dot_product_attention(q, k, heads(self.v(y), self.kv), is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, h))
        y = rms_norm(x, self.norm2)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(torch.nn.Module):
    def __init__(self, o):
        super().__init__()
        self.embedding = torch.nn.Embedding(o.vocab, o.hidden)
        self.blocks = torch.nn.ModuleList(
            Block(o.hidden, o.heads, o.kv_heads, o.ffn) for _ in range(o.layers))
        self.norm = torch.nn.Parameter(torch.ones(o.hidden))
        self.head = torch.nn.Linear(o.hidden, o.vocab, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                torch.nn.init.normal_(p, std=0.02)
        d = o.hidden // o.heads
        angle = torch.arange(o.seq)[:, None] * 10000.0 ** (-torch.arange(0, d, 2) / d)[None, :]
        self.register_buffer("cos", torch.cat((angle, angle), dim=-1).cos())
        self.register_buffer("sin", torch.cat((angle, angle), dim=-1).sin())

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(rms_norm(x, self.norm))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, standard in (("layers", 16), ("hidden", 2048), ("heads", 32), ("kv-heads", 8), ("ffn", 8192),
                           ("vocab", 32000), ("seq", 2048), ("micro-batch", 8), ("steps", 13)):
        parser.add_argument("--" + name, type=int, default=standard)
    o = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)
    model = Llama(o).to(device=device, dtype=torch.bfloat16)
    values = list(model.parameters())
    masters = [p.detach().float().requires_grad_() for p in values]
    for master in masters:
        master.grad = torch.zeros_like(master)
    matrices, norms = [m for m in masters if m.dim() > 1], [m for m in masters if m.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=device == "cuda")
    parameters = sum(p.numel() for p in values)
    seconds, loss = [], math.nan
    for step in range(o.steps):
        text = torch.randint(0, o.vocab, (o.micro_batch, o.seq + 1))
        start = time.perf_counter()
        text = text.to(device)
        loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        torch._foreach_copy_([m.grad for m in masters], [p.grad for p in values])
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        torch._foreach_copy_([p.detach() for p in values], [m.detach() for m in masters])
        for p in values:
            p.grad = None
        loss = loss.item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    tokens = o.micro_batch * o.seq / statistics.median(seconds[3:] or seconds)
    memory = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    print(f"torch {torch.__version__} on {where}, {parameters / 1e9:.3f} B parameters, "
          f"loss {loss:.3f}, peak {memory:.1f} GB")
    print(f"bench torch-train {tokens:.6g} tokens/s")
    if not math.isfinite(loss):
        raise SystemExit("the loss is not finite")


if __name__ == "__main__":
    main()
