#!/bin/bash
# experts_layouts.t: experts over ranks that also share rows (tensor with sequence parallelism), sequences
# (context parallelism), layers (a pipeline) or what they store (ZeRO), against one device: up to 8 ranks.
# TAP. A pattern chooses among the layouts.
# needs: build/06_expert_parallel/expert_parallel build/06_expert_parallel/overlapped_experts
# needs: build/05_pipeline_parallel/schedule
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/06_expert_parallel
verdict='ranks that shard the experts'

# All dimensions differ; 2 x cp and tp divide --seq.
layout() {
    local name=$1 layers="--layers 2"
    shift
    [[ $* != *--layers* ]] || layers=''
    passes "$name" expert_parallel --proof-only $layers --steps 2 --seq 24 "$@"
}

# ---- ranks of tp have their own rows, and store whole experts ----
layout "tp 2, ep 1" --tp 2 --sp --grad-acc 1
layout "tp 2, ep 4 beyond dp, experts of an odd width" --tp 2 --sp --ep 4 --ffn 45
layout "tp 4, ep 2, two copies of each expert" --tp 4 --heads 4 --sp --ep 2 --zero 1
layout "tp 2, cp 2, ep 8, full" --ranks 8 --tp 2 --sp --cp 2 --ep 8 --recompute full
layout "tp 2, dp 4, ep 4, zero 2, vocabulary" --ranks 8 --tp 2 --sp --vocab-parallel --ep 4 --zero 2
layout "tp 2, ep 4, DeepSeek, shared experts" --tp 2 --sp --ep 4 --moe deepseek --shared-experts 1 \
    --expert-groups 4 --groups-kept 2 --recompute selective
if wanted "tp 2, ep 4, no block of Mixtral, which would not be sharded over tp"; then
    run "$build/expert_parallel" --tp 2 --sp --ep 4 --seq 24 --layers 1 --steps 1 &&
        grep -q '^The same where all logits are equal' "$out" && ! grep -q '^A block of Mixtral' "$out"
    report $? "tp 2, ep 4, no block of Mixtral, which would not be sharded over tp"
fi
# ---- ZeRO-3: experts' weights are gathered with their block's ----
layout "zero 3, ep 2" --zero 3
layout "zero 3, ep 2, full, tied, 3 micro-batches" --zero 3 --ep 2 --recompute full --tied --grad-acc 3
layout "zero 3, tp 2, ep 2, AdamW" --zero 3 --ranks 8 --tp 2 --sp --optimizer adamw --lr 0.001
# ---- stages ----
layout "pp 2, ep 2" --pp 2
layout "pp 4, ep 2, tied, 4 layers, full" --ranks 8 --pp 4 --layers 4 --tied --recompute full --grad-acc 4
layout "pp 2, tp 2, ep 4, zero 1" --ranks 8 --pp 2 --tp 2 --sp --ep 4 --zero 1 --grad-acc 3
layout "pp 2, cp 2, ep 4, zero 2, zero bubble" --ranks 8 --pp 2 --cp 2 --ep 4 --zero 2 --schedule zb_h1
layout "DualPipe, ep 2" --pp 2 --schedule dualpipe --grad-acc 4
layout "DualPipe, tp 2, ep 2, zero 3" --ranks 8 --pp 2 --tp 2 --sp --schedule dualpipe --grad-acc 4 --zero 3
layout "interleaved, ep 3 of 6 ranks" --ranks 6 --pp 2 --ep 3 --experts 6 --layers 4 \
    --schedule interleaved --grad-acc 2
# ---- the experts of a token, in f32, are found again wherever the token was ----
layout "f32, tp 2, cp 2, ep 4, striped tokens" --ranks 8 --tp 2 --sp --cp 2 --ep 4 --layout striped \
    --dtype f32
passes "cp 4, zig-zag chunks of 2 and 1 tokens" expert_parallel --proof-only --layers 1 --steps 1 --cp 4 \
    --seq 12 --context zigzag --grad-acc 1
layout "f32, DualPipe, ep 2" --pp 2 --schedule dualpipe --grad-acc 4 --dtype f32

# ---- two micro-batches in flight ----
verdict='two micro-batches in flight change no bit (exact, 0 bits differ;'
overlapped() {
    local name=$1
    shift
    passes "$name" overlapped_experts --proof-only --steps 2 --seq 24 "$@"
}
overlapped "overlapped, ep 2, zero 2, full" --layers 2 --ep 2 --zero 2 --recompute full
verdict='1 rank splits nothing, and results are as on one device; here some may differ, as the tied weight' \
    overlapped "overlapped, tied, 1 rank" --layers 1 --ranks 1 --ep 1 --tied
overlapped "overlapped, one micro-batch" --layers 1 --grad-acc 1
passes "overlapped, uneven rows in 3 blocks" overlapped_experts --proof-only --layers 3 --steps 1 --seq 5 \
    --experts 16 --top-k 1 --micro-batch 1 --grad-acc 4 --ep 2
overlapped "overlapped, cp 2, selective" --layers 1 --ep 2 --cp 2 --context ring --recompute selective
overlapped "overlapped, tp 2, sharded logits of both" --layers 1 --ep 2 --tp 2 --sp --vocab-parallel
overlapped "overlapped pairs of DualPipe, tp 2, ep 4, zero 3" --layers 2 --ranks 8 --pp 2 --tp 2 --sp \
    --schedule dualpipe --grad-acc 6 --zero 3
verdict='held-out loss'
real="--ranks 1 --ep 1 --no-check --layers 2 --seq 8 --steps 2 --sample 8"
passes "one rank trains for real, zero 2" expert_parallel $real --zero 2
passes "one rank trains for real, experts drop rows" expert_parallel $real --capacity 1.1
refused "--init and --resume take the model's shape" expert_parallel --init /tmp --moe deepseek
verdict='two micro-batches in flight change no bit (exact, 0 bits differ;'
passes "overlapped, ep 4, on the model clock" overlapped_experts --layers 1 --steps 1 \
    --network-efficiency 0.98
prints "overlapped, ep 4, on the model clock: its tables" \
    "2 blocks of DeepSeek-V3 (8 K/V heads, no MLA), 32 micro-batches of 4096 tokens a rank, ep 4 in a node:" \
    "2 blocks of DeepSeek-V3 (8 K/V heads, no MLA), 32 micro-batches of 4096 tokens a rank, ep 64 over 8 nodes:"
passes "overlapped, a single pair of DualPipe, on the model clock" overlapped_experts --layers 2 --steps 1 \
    --pp 2 --ep 2 --schedule dualpipe --grad-acc 4
if wanted "overlapped, a single pair of DualPipe, the parts of its step"; then  # in the run above
    # exposed all-to-alls, compute and the sum of the copies; messages between stages are below 1%
    awk '/^  pairs together/ { exposed = $4; step = $5 } /compute takes/ { computed = $(NF - 1) }
         /two copies are summed in/ { summed = $(NF - 4) }
         END { parts = exposed + computed + summed; exit !(step > 0 && parts > 0.99 * step && parts < step) }' \
        "$out"
    report $? "overlapped, a single pair of DualPipe, the parts of its step"
    of_two="--layers 2 --steps 1 --pp 2 --ep 2 --grad-acc 4"
    tables() { grep -E 'one after the other|pairs together|are in pairs|are hidden' "$out"; }
    named=$(tables)
    run "$build/../05_pipeline_parallel/schedule" --schedule dualpipe --stages 2 --micro-batches 4 --dump &&
        cp "$out" "$work/dualpipe" &&
        run "$build/overlapped_experts" $of_two --load "$work/dualpipe" && grep -q '^PASS' "$out" &&
        [ -n "$named" ] && [ "$(tables)" = "$named" ]
    report $? "overlapped, a single pair of DualPipe, its schedule loaded: the same tables"
fi
refused "--schedule dualpipe or dualpipe_v would fit" overlapped_experts --pp 2 --ep 2 --schedule afab
run "$build/../05_pipeline_parallel/schedule" --schedule afab --stages 2 --micro-batches 4 --dump &&
    cp "$out" "$work/afab"
refused "a forward and a backward run as a pair; --schedule dualpipe" overlapped_experts --pp 2 --ep 2 \
    --grad-acc 4 --load "$work/afab"
refused "--zero 3 frees a unit's weights after one micro-batch's pass" overlapped_experts --zero 3

refused "experts are not sharded over tp, and ranks that have the same tokens would route them twice" \
    expert_parallel --tp 2
refused "--micro-batch 2 x --seq 31 must be a multiple of it" expert_parallel --tp 4 --sp
refused "--micro-batch 1 x --seq 12 / --cp must be a multiple of it" expert_parallel --ranks 8 --cp 2 \
    --tp 4 --sp --heads 4 --seq 12 --micro-batch 1
refused "--ep 3 does not divide the 4 ranks of --dp x --cp x --tp: --ep 1, 2 would fit" expert_parallel \
    --tp 2 --sp --ep 3 --experts 6 --seq 24
finish
