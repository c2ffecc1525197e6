#!/bin/bash
# programs.t: every program of one device reaches its verdict in every dtype, and writes the files that it is asked for.
# BUILD=build-asan runs it under the sanitizers. TAP.
. "$(dirname "$0")/tap.sh"
build=$build/00_single_gpu
small="--layers 1 --hidden 24 --heads 6 --kv-heads 2 --ffn 20 --seq 13"

for dtype in f64 f32 bf16 f16; do
    passes "grad_accumulation in $dtype, in 2, 3 and 6 parts" grad_accumulation $small --micro-batch 6 --dtype $dtype \
        --steps 2 --lr 0.01
    passes "recompute in $dtype" recompute $small --dtype $dtype --steps 2
    passes "memory in $dtype" memory --measure $small --dtype $dtype
    passes "profile in $dtype" profile $small --dtype $dtype --steps 2 --svg "$work/m.svg" --trace "$work/t.json"
    passes "train in $dtype" train $small --dtype $dtype --steps 12 --sample 3
done
passes "train with tied embeddings, SGD and recomputation" train $small --tied --optimizer sgd --lr 0.5 --steps 12 \
    --recompute full --sample 0 --grad-acc 2
passes "recompute without a comparison" recompute $small --no-check
for program in train grad_accumulation recompute; do
    passes "$program writes --json and --trace" $program $small --steps 12 --json "$work/$program.json" \
        --trace "$work/$program.trace"
    [ -s "$work/$program.json" ] && [ -s "$work/$program.trace" ]
    report $? "and both are there"
done

# A run that fails leaves an older report alone.
cp "$work/train.json" "$work/before.json"
"$build/train" --json "$work/train.json" --data /no/such/file >"$out" 2>&1
cmp -s "$work/train.json" "$work/before.json"
report $? "a run that fails leaves the report of an earlier one"
finish
