#!/bin/bash
# zero.t [PATTERN]: ZeRO against DDP on the same ranks, bit for bit, and against one device: tied
# embeddings, unequal and empty parts, accumulation, recomputation, AdamW, f64 and bf16. A pattern chooses
# among the tests' names. TAP.
# needs: build/02_zero/zero1 build/02_zero/zero2 build/02_zero/zero3
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/02_zero
verdict='.*exact, 0 bits'

for program in zero1 zero2 zero3; do
    passes "$program, 3 ranks, SGD, AdamW, forward alone" $program --ranks 3 --layers 2
    passes "$program, 4 ranks, tied, AdamW, 3 micro-batches, full recomputation" $program --ranks 4 --tied \
        --optimizer adamw --lr 0.001 --grad-acc 3 --layers 2 --recompute full --steps 2
    # 16-bit gradients are summed over micro-batches and ranks in f32; with more than one layer, bf16's own
    # error would hide a wrong factor.
    passes "$program, 3 ranks, bf16, 2 micro-batches" $program --ranks 3 --dtype bf16 --grad-acc 2 \
        --layers 1 --steps 2
    # The head's unit is a single norm of 4 elements.
    passes "$program, 6 ranks, some of which own nothing of the head" $program --ranks 6 --tied --hidden 4 \
        --heads 2 \
        --kv-heads 1 --ffn 3 --layers 1 --seq 7 --steps 2
done
refused "--svg shows what the ranks of --dp hold, and there is one" zero3 --ranks 1 --svg "$work/x.svg"
passes "zero3, 3 ranks, nodes of 2" zero3 --ranks 3 --gpus-per-node 2 --layers 1 --steps 1
passes "zero3, 5 ranks, slow compute: one rank's part is smaller" zero3 --ranks 5 --layers 1 --steps 1 \
    --compute-efficiency 0.01
passes "zero3, half the bandwidth" zero3 --ranks 2 --layers 1 --steps 1 --verbose --network-efficiency 0.5
grep -q '^  forward, one GPU per node  *19780 ' "$out"
report $? "zero3, half the bandwidth: twice as many tokens hide what is sent"
passes "zero3, slow compute: one sequence is enough" zero3 --ranks 2 --layers 1 --steps 1 --verbose \
    --compute-efficiency 0.02
passes "zero3, 2 ranks, documents" zero3 --ranks 2 --documents 32 --layers 2 --steps 1
finish
