#!/bin/bash
# layouts.t: tensor parallelism, alone and with data parallelism, ZeRO, sequence and vocabulary parallelism,
# against one device; sizes that do not divide; what does not fit is refused, naming what would. TAP. A
# pattern chooses among the layouts.
# needs: build/03_tensor_parallel/split_matmul build/03_tensor_parallel/tensor_parallel
# needs: build/03_tensor_parallel/sequence_parallel build/03_tensor_parallel/vocab_parallel
# needs: build/03_tensor_parallel/async_tensor_parallel build/00_single_gpu/train
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/03_tensor_parallel

three="--heads 6 --kv-heads 3 --ffn 39"  # divisible by 3 ranks
quick="--layers 2 --steps 2"
verdict='1 rank splits nothing, and results are as on one device (' passes "split 1" split_matmul --ranks 1
for ranks in 2 3 5 8; do passes "split $ranks" split_matmul --ranks $ranks; done

verdict='1 rank splits nothing, and results are as on one device (' passes "tp 1" tensor_parallel --ranks 1 $quick
verdict='--tp 1 splits nothing, and results are as on one device (' passes "tp 1 on 2 ranks" tensor_parallel --ranks 2 \
    --tp 1 $quick
passes "tp 2" tensor_parallel --ranks 2 $quick
passes "tp 3, tied" tensor_parallel --ranks 3 $three --tied $quick
passes "tp 4, copies of 2 heads" tensor_parallel --ranks 4
prints "tp 4, copies of 2 heads: its tables" "One block and micro-batch, tp 4:" \
    "Two blocks of Llama 3 8B, 4,096 tokens, 2 GPUs per node, on the model clock:" \
    "4 10.019 102201 50.9% -44.0% 4.322 beyond the node"
passes "tp 4, nodes of 4" tensor_parallel --gpus-per-node 4 $quick
prints "tp 4, nodes of 4: the table has these" \
    "Two blocks of Llama 3 8B, 4,096 tokens, 4 GPUs per node, on the model clock:" \
    "4 6.776 151118 75.2% -17.2% 1.078"
passes "tp 8, copies of 1 head, AdamW" tensor_parallel --ranks 8 --kv-heads 1 --optimizer adamw \
    --lr 0.001 $quick
passes "tp 2, dp 3, 3 micro-batches" tensor_parallel --ranks 6 --tp 2 --grad-acc 3 $quick
passes "tp 4, selective" tensor_parallel --recompute selective $quick
passes "tp 2, dp 2, full, copies" tensor_parallel --tp 2 --kv-heads 1 --recompute full $quick
passes "tp 2, f32" tensor_parallel --ranks 2 --dtype f32 $quick

passes "sp 1" sequence_parallel --ranks 1 $quick
verdict='held-out loss' passes "sp 1 trains for real, and its peak is as predicted" sequence_parallel --ranks 1 \
    --no-check --steps 2 --sample 0 --eval-every 0 --recompute full
passes "sp 2, dp 2, tied" sequence_parallel --tp 2 --tied $quick
passes "sp 3, uneven rows" sequence_parallel --ranks 3 $three $quick
passes "sp 4, even rows, full, copies" sequence_parallel --seq 32 --recompute full $quick
prints "sp 4, even rows, full, copies: its tables" \
    "One block and micro-batch, tp 4, beside tensor parallelism without sequence parallelism:" \
    "Shapes on rank 0 in forward, for (b s, h) = (64, 48) and f = 88:" \
    "exit TP: out (64, 48) all_reduce (16, 48) reduce_scatter" \
    "What a block of Llama 3 8B keeps for backward, bf16, s = 2,048, t = 4, in s b h bytes:" \
    "TP with SP 16.500 28.500 34 / t + 5 a s / (h t)"
passes "sp 8, fewer rows than ranks" sequence_parallel --ranks 8 --seq 5 --micro-batch 1 $quick
passes "sp 2, bf16" sequence_parallel --ranks 2 --dtype bf16 --layers 1 --steps 1

wide="--hidden 256 --seq 16 --layers 1 --steps 1 --grad-acc 1"  # the peak of memory is within a block
passes "peak, sp 4, narrow MLP" sequence_parallel $wide --ffn 8
passes "peak, tp 4, wide MLP" tensor_parallel $wide --ffn 800

passes "vocab 4, padded" vocab_parallel $quick
prints "vocab 4, padded: its tables" "The embedding on rank 0, v = 257, for (b s, h) = (62, 48):" \
    "x (62, 48) f64 by all_reduce (16, 48) f64 by reduce_scatter" \
    "maxima and sums 147 kB 0.041 525 MB" "gathered logits 1.58 GB 3.512 2.10 GB" \
    "The loss of 8192 tokens of Llama 3 8B, v = 128256 on 4 ranks, on the model clock of dgx-h100:"
passes "vocab 3, sp, tied, uneven rows" vocab_parallel --ranks 3 $three --sp --tied $quick
passes "vocab 2, dp 2, sp, selective" vocab_parallel --tp 2 --sp --recompute selective $quick
passes "vocab 8, bf16" vocab_parallel --ranks 8 --dtype bf16 --layers 1 --steps 1
passes "async 3, vocab, uneven rows" async_tensor_parallel --ranks 3 $three --vocab-parallel $quick
passes "async 2, and what --tp alone sends" tensor_parallel --ranks 2 --sp --async-tp --layers 1 --steps 1
passes "async 2, and what --tp with --sp sends" sequence_parallel --ranks 2 --async-tp --layers 1 --steps 1

passes "zero 1, tp 2, dp 2, sp" sequence_parallel --tp 2 --zero 1 $quick
passes "zero 1, tp 2, dp 2, copies, AdamW" tensor_parallel --tp 2 --kv-heads 1 --zero 1 --optimizer adamw \
    --lr 0.001 $quick
passes "zero 2, tp 2, dp 3, tied" tensor_parallel --ranks 6 --tp 2 --zero 2 --tied $quick
passes "zero 2, async 2, dp 2, vocab" async_tensor_parallel --tp 2 --zero 2 --vocab-parallel $quick
passes "zero 3, tp 2, dp 4, sp, vocab, tied" vocab_parallel --ranks 8 --tp 2 --zero 3 --sp --tied $quick
passes "zero 3, tp 2, dp 2, sp, full" sequence_parallel --tp 2 --zero 3 --recompute full $quick
passes "zero 3, tp 2, dp 2, bf16" tensor_parallel --tp 2 --zero 3 --dtype bf16 --layers 1 --steps 1

odd="--layers 1 --hidden 54 --heads 9 --kv-heads 3 --ffn 57 --vocab 259 --seq 17 --micro-batch 1"
odd+=" --grad-acc 3 --steps 2"
passes "odd, tp 3, dp 2" tensor_parallel --ranks 6 --tp 3 $odd
passes "odd, sp 3, dp 2, vocab, tied, zero 2" sequence_parallel --ranks 6 --tp 3 --vocab-parallel --tied \
    --zero 2 $odd

if wanted "resumed"; then
    shape="--layers 2 --hidden 48 --heads 8 --kv-heads 2 --ffn 88 --vocab 256"
    rest="--seq 31 --micro-batch 2 --grad-acc 2 --dtype f64 --optimizer sgd --lr 0.1 --clip 0.5"
    run "$build/../00_single_gpu/train" $shape $rest --steps 2 --sample 0 --eval-every 0 \
        --save "$work/one" &&
        run "$build/sequence_parallel" --resume "$work/one" --steps 4 --save "$work/four" &&
        run "$build/tensor_parallel" --resume "$work/four" --ranks 2 --steps 5
    report $? "resumed from one device on 4 ranks, and from these on 2"
fi
passes "dry run of Llama 3 8B, tp 8" sequence_parallel --ranks 8 --model llama-3-8b --dtype bf16 \
    --micro-batch 1 --dry-run

refused "--tp 3 does not divide --heads 8; --tp 1 would fit" tensor_parallel --ranks 3
refused "--tp 4 does not divide --ffn 90; --tp 1, 2 would fit" sequence_parallel --ffn 90
refused "--tp 4 and --kv-heads 3: one must divide the other; --tp 1 would fit" tensor_parallel \
    --heads 12 \
    --kv-heads 3 --ffn 72
refused "--tp 2 does not divide the 3 ranks; --ranks 4 would fit" tensor_parallel --ranks 3 --tp 2
refused "--dp 3 x --tp 2 needs 6 ranks, and there are 4: --ranks 6 would fit" sequence_parallel --dp 3 \
    --tp 2
refused "--dp 3 does not divide the 4 ranks; --ranks 6 would fit" tensor_parallel --dp 3
if wanted "a picture: each matrix is cut as the chapter says, and covered once"; then
    run "$build/tensor_parallel" --ranks 4 --tp 4 --heads 4 --kv-heads 4 --ffn 8 --layers 1 --steps 1 \
        --svg "$work/split.svg" && tests/programs/legible.py "$work/split.svg" >"$out" && [ ! -s "$out" ] &&
        python3 - "$work/split.svg" >"$out" 2>&1 <<'PYTHON'
import sys, xml.etree.ElementTree as tree
svg = '{http://www.w3.org/2000/svg}'
root = tree.parse(sys.argv[1]).getroot()
sizes = dict(Wq=(1, 1), Wk=(1 / 4, 1), Wv=(1 / 4, 1), Wo=(1, 1), Wgate=(3.5, 1), Wup=(3.5, 1), Wdown=(1, 3.5))
parts, found = [], {}
for mark in root:  # a matrix's parts, by rank, then its name
    if mark.get('class') == 'part':
        parts.append([float(mark.get(k)) for k in ('x', 'y', 'width', 'height')])
    elif mark.tag == svg + 'text' and mark.text in sizes:
        found[mark.text], parts = parts, []
assert set(found) == set(sizes), found
for name, parts in found.items():
    whole = [96 * side ** 0.5 for side in sizes[name]]  # (out, in)
    rows = name in ('Wo', 'Wdown')  # shards of inputs, one above the other
    size = [whole[0], whole[1] / 4] if rows else [whole[0] / 4, whole[1]]
    assert len(parts) == 4, (name, parts)
    for rank, part in enumerate(parts):
        first = [parts[0][0], parts[0][1]]
        first[rows] += rank * size[rows]
        assert all(abs(a - b) < 0.2 for a, b in zip(part, first + size)), (name, rank, part, first + size)
PYTHON
    report $? "a picture: each matrix is cut as the chapter says, and covered once"
fi
if wanted "the page's picture is that of the program"; then
    run "$build/tensor_parallel" --ranks 4 --layers 1 --steps 1 --svg "$work/page.svg" &&
        cmp "$work/page.svg" 03_tensor_parallel/split.svg >"$out" 2>&1
    report $? "the page's picture is that of the program"
fi
refuses "a picture that cannot be drawn is refused before anything runs" \
    "--svg shows a block of Llama 3 8B on 1, 2, 4 or 8 ranks, and --tp is 3" tensor_parallel --ranks 3 $three \
    --svg "$work/tp.svg"
if wanted "a picture that cannot be drawn is refused before anything runs: no line of a step"; then
    ! grep -q '^Rank 0' "$out"
    report $? "a picture that cannot be drawn is refused before anything runs: no line of a step"
fi
finish
