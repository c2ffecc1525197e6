#!/bin/bash
# context.t: context parallelism, with each method, alone and with data parallelism, ZeRO, tensor, sequence
# and vocabulary parallelism and recomputation, against one device; documents; what does not fit is refused.
# TAP. With an argument: only the layouts whose names match it.
# needs: build/04_context_parallel/ring_attention build/04_context_parallel/zigzag_ring_attention
# needs: build/04_context_parallel/all_gather_attention build/04_context_parallel/ulysses
# needs: build/00_single_gpu/train
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/04_context_parallel

quick="--layers 2 --steps 2"
one="--layers 1 --steps 1"  # for most layouts

# every method on 1 to 8 ranks; lengths that divide, that do not, and that leave ranks a token or two
while read -r ranks seq; do
    passes "ring $ranks, s $seq" ring_attention --ranks $ranks --seq $seq $one
    passes "zigzag $ranks, s $seq" ring_attention --context zigzag --ranks $ranks --seq $seq $one
    passes "all-gather $ranks, s $seq" all_gather_attention --ranks $ranks --seq $seq $one
    passes "ulysses $ranks, s $seq" ulysses --ranks $ranks --seq $seq --hidden 96 --heads 24 \
        --kv-heads $((ranks == 3 ? 3 : 2)) $one
done <<'LENGTHS'
1 31
2 31
3 31
4 31
4 64
6 64
8 31
LENGTHS
passes "ring 4, SGD over 3 steps" ring_attention
prints "ring 4, SGD over 3 steps: its tables" \
    "Attention of one layer of Llama 3 8B, 1,024 tokens on each of 4 ranks, by the formulas of the file:" \
    "forward of a zig-zag ring, 16384 tokens on each rank: it takes …" \
    "attention in bf16 against f64: on 4 ranks its error is 1.00 times that of one, expected 1.5 or less"
passes "zigzag, with its tables" zigzag_ring_attention $one
prints "zigzag, with its tables: all of them" \
    "Which hop computes a block of scores (rows: queries, columns: keys, 16 chunks of each):" \
    "Attention of one layer of Llama 3 8B, 1,024 tokens on each of 8 ranks, by the formulas of the file:" \
    "rank 7 7 7 6 6 5 5 4 4 3 3 2 2 1 1 0 . rank 1 1 0 7 6 5 4 3 2 2 3 4 5 6 7 0 ." \
    "Score entries of a head, s = 64 on 8 ranks:" "striped 288 232 1.24 288" \
    "ring 118.739 1.00x 116.733 7.783 100.511 134 MB 537 MB" \
    "all-gather 67.439 1.76x 62.258 62.258 4.318 537 MB 1.61 GB" \
    "ulysses 3.866 1.55x 0.146 8.90 GB 28.7 GB" \
    "Attention of one layer of Llama 3 8B, s = 131,072, cp 8, all in one node, forward and backward:" \
    "A step of Llama 3 8B, one such sequence, ZeRO-3 over dp x cp, full recomputation:" \
    "cp 1 29.343 1.63x 0.007 …" \
    "Attention of one layer of Llama 3 8B, s = 131,072, cp 8, one GPU per node, forward and backward:" \
    "Tokens per rank from which the forward of a zig-zag ring hides its hops, 8 ranks:"
passes "zigzag on slow links, with its tables" zigzag_ring_attention --network-efficiency 0.05 $one
grep -q '^  all in one node  *21996 ' "$out" && grep -q '^  one GPU per node  *197806 ' "$out"
report $? "zigzag on slow links, with its tables: a twentieth of the bandwidth takes more tokens to hide"
passes "ring on slow links" ring_attention --network-efficiency 0.02 $one
passes "zigzag 8, with its tables, fewer tokens than chunks" zigzag_ring_attention --seq 13 $one
if wanted memory; then
    passes "memory" all_gather_attention --ranks 8 $one --memory-svg "$work/memory.svg"
    cmp "$work/memory.svg" 04_context_parallel/memory.svg >"$out" 2>&1
    report $? "the page's picture of memory is that of the program"
fi
passes "memory on 3 ranks, which share no power of two evenly" all_gather_attention --ranks 3 $one \
    --memory-svg "$work/three.svg"
passes "zigzag 8, fewer tokens than chunks" ring_attention --context zigzag --ranks 8 --seq 9 $one
passes "ring 8, striped, a token each" ring_attention --ranks 8 --layout striped --seq 8 $one
passes "all-gather 3, striped" all_gather_attention --ranks 3 --layout striped $quick
prints "all-gather 3, striped: its table" \
    "Attention of one layer of Llama 3 8B, 1,024 tokens on each of 3 ranks, by the formulas of the file:"
passes "ulysses 16, more ranks than Llama has key heads" ulysses --ranks 16 --heads 16 --hidden 64 $one
passes "ulysses 4, zig-zag tokens" ulysses --layout zigzag $quick
passes "ulysses 4, as many key heads as heads" ulysses --kv-heads 8 $quick
prints "ulysses 4, as many key heads as heads: its table" \
    "Attention of one layer of Llama 3 8B, 1,024 tokens on each of 4 ranks, by the formulas of the file:"

# documents end at line ends, at spaces, nowhere
passes "documents, ring 4" ring_attention --documents 10 --seq 97 $quick
passes "documents, zigzag 8" ring_attention --context zigzag --ranks 8 --documents 32 --seq 97 $one
passes "documents, all-gather 3" all_gather_attention --ranks 3 --documents 32 $quick
passes "documents, ulysses 2, tp 2" ulysses --tp 2 --documents 32 $quick
passes "documents, cp 2, dp 2, all-gather" all_gather_attention --cp 2 --dp 2 --documents 32 $one
passes "documents, ring 2, token 0" ring_attention --ranks 2 --documents 0 $one

# with everything else
passes "cp 3, dp 2, 3 micro-batches, tied" ring_attention --ranks 6 --cp 3 --dp 2 --grad-acc 3 --tied $quick
passes "zero 1, cp 4, AdamW" ring_attention --zero 1 --optimizer adamw --lr 0.001 $quick
passes "zero 1, cp 2, dp 2, all-gather" all_gather_attention --cp 2 --dp 2 --zero 1 $quick
passes "zero 2, cp 2, dp 2, zigzag, tied" ring_attention --context zigzag --cp 2 --dp 2 --zero 2 \
    --tied $quick
passes "zero 2, cp 4, ulysses" ulysses --zero 2 $quick
passes "zero 3, cp 4, full" ring_attention --zero 3 --recompute full $quick
passes "zero 3, cp 4, dp 2, zigzag, selective" ring_attention --context zigzag --ranks 8 --cp 4 --dp 2 \
    --zero 3 --recompute selective $quick
passes "zero 3, cp 2, tp 2, dp 2, tied" all_gather_attention --ranks 8 --cp 2 --tp 2 --dp 2 --zero 3 \
    --tied $one
passes "cp 2, tp 2" ring_attention --cp 2 --tp 2 $quick
passes "cp 2, tp 2, sp" ring_attention --context zigzag --cp 2 --tp 2 --sp $quick
passes "cp 2, tp 2, vocab" all_gather_attention --cp 2 --tp 2 --vocab-parallel $quick
passes "cp 2, tp 2, dp 2, sp, vocab, tied" ring_attention --ranks 8 --cp 2 --tp 2 --dp 2 --sp \
    --vocab-parallel --tied $one
passes "cp 2, tp 4, copies of key heads" ring_attention --ranks 8 --cp 2 --tp 4 --heads 8 --kv-heads 2 $one
passes "ulysses 2, tp 2, sp, full" ulysses --cp 2 --tp 2 --sp --recompute full $quick
passes "ulysses 2, tp 4, copies twice" ulysses --ranks 8 --cp 2 --tp 4 $one
passes "cp 2, tp 3, odd sizes, zero 2" ring_attention --ranks 6 --cp 2 --tp 3 --hidden 54 --heads 9 \
    --kv-heads 3 --ffn 57 --vocab 259 --seq 17 --zero 2 $one
passes "ring 4, selective" ring_attention --recompute selective $quick
passes "zigzag 4, full" ring_attention --context zigzag --recompute full $quick
if wanted "zigzag 4, full: its column says so"; then
    grep -q '^ *one device  *zigzag  *formula$' "$out"
    report $? "zigzag 4, full: its column says so"
fi
passes "ring 4, bf16" ring_attention --dtype bf16 $one
passes "zigzag 8, bf16, zero 3, full" ring_attention --context zigzag --ranks 8 --dtype bf16 --zero 3 \
    --recompute full $one
passes "all-gather 4, f16" all_gather_attention --dtype f16 $one
passes "ring 8, 16 bits" ring_attention --ranks 8 --seq 128 --dtype bf16 $one
passes "ring 3, f32" ring_attention --ranks 3 --dtype f32 $quick
passes "dry run of Llama 3 8B, cp 8" ring_attention --ranks 8 --model llama-3-8b --dtype bf16 \
    --micro-batch 1 --zero 3 --dry-run

if wanted resumed; then
    shape="--layers 2 --hidden 48 --heads 6 --kv-heads 2 --ffn 88 --vocab 256"
    rest="--seq 61 --micro-batch 2 --grad-acc 2 --dtype f64 --optimizer sgd --lr 0.1 --clip 0.5"
    run "$build/../00_single_gpu/train" $shape $rest --steps 2 --sample 0 --eval-every 0 \
        --save "$work/one" &&
        run "$build/ring_attention" --resume "$work/one" --steps 4 --zero 1 --save "$work/four" &&
        run "$build/all_gather_attention" --resume "$work/four" --ranks 3 --steps 5
    report $? "resumed from one device on 4 ranks of a ring, and from these on 3 that gather"
fi
if wanted real; then
    small="--layers 2 --hidden 48 --heads 6 --kv-heads 2 --ffn 88 --seq 64 --dtype f32"
    small+=" --optimizer adamw --lr 0.003 --steps 12 --sample 20 --eval-every 5"
    held_out() { grep -o 'held-out loss [0-9.]* -> [0-9.]* nats in .* steps' "$out"; }
    run "$build/../00_single_gpu/train" $small --micro-batch 2 --grad-acc 2 --clip 0.5
    alone=$(held_out)
    run "$build/ring_attention" --no-check $small && [ -n "$alone" ] && [ "$alone" = "$(held_out)" ]
    report $? "trained for real: the held-out loss of one device, evaluated on 4 ranks"
fi
for program in ring_attention all_gather_attention ulysses; do
    passes "one rank for real, by the FLOPs of one device: $program" $program --ranks 1 --no-check $one \
        --seq 32 --recompute selective --sample 0 --eval-every 0
done
if wanted flash; then
    for flags in "" "--recompute selective" "--recompute full" "--documents 10"; do
        run "$build/../00_single_gpu/train" --attention flash --steps 2 --seq 64 --sample 0 $flags
        report $? "one device, flash attention $flags"
    done
fi

refused "a token that attends to itself alone" zigzag_ring_attention --ranks 1 --seq 1 --dtype f32
refused "--layout is an option of ring_attention, which has nothing to do here: leave it out, or give --cp 2" \
    ring_attention --ranks 2 --cp 1 --layout striped
for program in zigzag_ring_attention all_gather_attention; do
    refused "$program shows --context " $program --context ring
done
refused "ulysses shows --context ulysses alone: leave out --context, or run ring_attention" ulysses \
    --context all-gather
refused "--context zigzag always uses --layout zigzag" ring_attention --context zigzag \
    --layout striped
refused "--cp 4 is more ranks than --seq 3 has tokens: --cp 1, 2 would fit" ring_attention --seq 3
refused "--cp 4 is more ranks than --seq 2 has tokens: --cp 1, 2 would fit" ring_attention --seq 2
refused "--cp 4 is more ranks than --seq 3 has tokens: --cp 1, 2 would fit" zigzag_ring_attention --dp 2 \
    --cp 4 --seq 3
refused "which has nothing to do here: leave it out, or give --cp 3" ring_attention --ranks 3 --cp 1 \
    --layout striped
# The program ulysses has no other --context, so what would fit are other degrees.
refused "--cp 4 x --tp 1 must divide --heads 6; --cp 1, 2 would fit, or ring attention" ulysses --heads 6
refused "3 key/value heads on each rank of --tp: one must divide the other; --cp 1 would fit, or ring" \
    ulysses --heads 12 --kv-heads 3
refused "--cp 3 and the 2 key/value heads on each rank of --tp: one must divide the other" ulysses --ranks 6 \
    --cp 3 --tp 2 --heads 12 --kv-heads 4
refused "leave out --layout, or run ring_attention, which takes any" zigzag_ring_attention --layout striped
refused "--cp 3 does not divide the 4 ranks; --ranks 6 would fit" ring_attention --cp 3
refused "--dp 3 does not divide the 4 ranks; --ranks 6 would fit" ring_attention --dp 3
refused "--tp 4 does not divide --heads 6" ring_attention --tp 4
finish
