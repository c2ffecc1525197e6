#!/bin/bash
# async_tensor_parallel.t: rows in flight while others are multiplied reproduce the single-device step, and a
# shorter one on the model clock. TAP.
# needs: build/03_tensor_parallel/async_tensor_parallel
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/03_tensor_parallel

passes "3 ranks, whose rows are 21, 21 and 20" async_tensor_parallel --ranks 3 --heads 6 --kv-heads 3 \
    --ffn 90
passes "4 ranks, the vocabulary sharded, tied" async_tensor_parallel --ranks 4 --vocab-parallel --tied
prints "4 ranks, the vocabulary sharded, tied: the table" "async tp 170.281 39.751 7.840 48109 84.4 GB" \
    "dp 626.672 107.805 8.052 52289 337 GB"
passes "2 ranks, the vocabulary sharded, 3 micro-batches, AdamW" async_tensor_parallel --ranks 2 \
    --vocab-parallel --grad-acc 3 --optimizer adamw \
    --lr 0.001 --layers 2
passes "2 x 2 ranks, recomputing" async_tensor_parallel --ranks 4 --dp 2 --tp 2 --recompute full --layers 2
passes "one rank: nothing is sent" async_tensor_parallel --ranks 1 --steps 1
passes "2 ranks in bf16" async_tensor_parallel --ranks 2 --dtype bf16 --layers 1 --steps 1
passes "3 ranks in f32" async_tensor_parallel --ranks 3 --heads 6 --kv-heads 3 --ffn 90 --dtype f32 \
    --layers 1

# At 8 ranks the program itself demands 30 % less exposed communication, and a shorter step, of Llama 3 8B.
few="--ranks 8 --seq 1 --micro-batch 1 --grad-acc 1 --vocab-parallel --layers 1 --steps 2"
table() { grep -E '^  (tp|tp \+ sp|async tp|dp) +[0-9]+\.' "$out"; }
passes "8 ranks and one token, so that most have no row" async_tensor_parallel $few
table >"$work/table"
[ "$(wc -l <"$work/table")" = 4 ]
report $? "show four layouts of Llama 3 8B"
run "$build/async_tensor_parallel" $few
table | cmp -s - "$work/table"
report $? "and the same digits again"
passes "two nodes of two: no faster, and no failure" async_tensor_parallel --ranks 4 --gpus-per-node 2 \
    --layers 1 --steps 1
passes "half the bandwidth" async_tensor_parallel --ranks 4 --layers 1 --steps 1 --network-efficiency 0.5
grep -q 'hides behind .* from h = 13187 on by formula A3 in bytes, from 17[56]' "$out"
report $? "half the bandwidth: rows hide behind a product of twice the width"
passes "slow compute" async_tensor_parallel --ranks 4 --layers 1 --steps 1 --compute-efficiency 0.02
run "$build/async_tensor_parallel" --ranks 4 --timeline --layers 1 --steps 1 &&
    grep -A 2 '^async tp *compute' "$out" | grep -q ' tp .*[Tt][Tt]'
report $? "the time line shows rows in flight"
finish
