#!/bin/bash
# ddp.t: data parallelism on 3 ranks against one device: tied, unequal labels, clipping, f64 and bf16. TAP.
# needs: build/01_data_parallel/ddp_naive build/01_data_parallel/ddp_overlap
# needs: build/01_data_parallel/ddp_bucketed build/01_data_parallel/ddp_no_sync
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/01_data_parallel

for program in ddp_naive ddp_overlap ddp_bucketed ddp_no_sync; do
    passes "$program, 3 ranks, SGD" $program --ranks 3
    passes "$program, 3 ranks, tied, AdamW, 3 micro-batches" $program --ranks 3 --tied --optimizer adamw \
        --lr 0.001 \
        --grad-acc 3 --layers 2
    # 16-bit gradients are summed over micro-batches and ranks in f32; one layer, or bf16's own error hides
    # a factor.
    passes "$program, 2 ranks, bf16" $program --ranks 2 --dtype bf16 --layers 1 --steps 1
done
finish
