#!/bin/bash
# hybrid_zero.t [PATTERN]: ZeRO-3 inside a node and replicas across nodes, against one device: unequal and
# empty parts, several micro-batches, recomputation, AdamW, f64 and bf16; checkpoints; wrong use. TAP.
# needs: build/02_zero/hybrid_zero build/02_zero/zero3
[ ! -w /dev/shm ] || export TMPDIR=/dev/shm
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/02_zero

passes "1 rank" hybrid_zero --ranks 1 --shard-ranks 0 --layers 1 --steps 2
passes "2 ranks, each alone" hybrid_zero --ranks 2 --shard-ranks 1 --layers 1 --steps 1
passes "2 nodes of 2, AdamW, tied" hybrid_zero --ranks 4 --shard-ranks 2 --optimizer adamw --lr 0.001 \
    --tied --layers 2
passes "3 nodes of 2, 3 micro-batches, full recomputation" hybrid_zero --ranks 6 --shard-ranks 2 \
    --grad-acc 3 --layers 2 --recompute full --steps 2
passes "2 nodes of 3, some of which own nothing of the head" hybrid_zero --ranks 6 --shard-ranks 3 --tied \
    --hidden 4 --heads 2 --kv-heads 1 --ffn 3 --layers 1 --seq 7 --steps 2
passes "replicas alone, bf16" hybrid_zero --ranks 3 --shard-ranks 1 --dtype bf16 --layers 1 --steps 2
grep -q '^Llama 3 8B' "$out"
[ $? = 1 ]
report $? "a node of one rank is no node to compare"
passes "saved by 2 nodes of 2" hybrid_zero --ranks 4 --shard-ranks 2 --layers 1 --steps 2 --no-check \
    --save "$work/saved" --sample 0
passes "and goes on with ZeRO-3 on 2 ranks" zero3 --ranks 2 --resume "$work/saved" --grad-acc 4 --steps 3 \
    --optimizer sgd --lr 0.1
passes "2 nodes of 2, whose links are slow" hybrid_zero --ranks 4 --shard-ranks 2 --layers 1 --steps 1
prints "2 nodes of 2, whose links are slow: the table at full speed" \
    "ZeRO-3 over all 1950.47 916.34 5.50 GB 24.1 GB 93.2 GB 93.2 GB" "by the formulas 93.2 GB 93.2 GB" \
    "ZeRO-3 inside 1260.34 174.66 9.52 GB 48.2 GB 124 GB 16.1 GB" "by the formulas 124 GB 16.1 GB"
across() { awk '/^  ZeRO-3 over all/ { print $4 }' "$out"; }
fast=$(across)
passes "2 nodes of 2, whose links are slow: as typed" hybrid_zero --ranks 4 --shard-ranks 2 --layers 1 \
    --steps 1 --network-efficiency 0.1
awk "BEGIN { exit !($(across) > 5 * $fast) }"
report $? "2 nodes of 2, whose links are slow: a step of Llama 3 8B takes longer, $(across) ms and not $fast"
refused "--shard-ranks 4 does not divide the 6 ranks of --dp x --cp: --shard-ranks 1, 2, 3, 6 would fit" hybrid_zero --ranks 6 --shard-ranks 4
finish
