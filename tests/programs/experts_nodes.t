#!/bin/bash
# experts_nodes.t: tokens in two hops, across nodes and inside, against one device: 4, 6 and 8 ranks in 1 to 4
# nodes, and with techniques that shard rows, layers or storage. TAP. A pattern chooses among the tests.
# needs: build/06_expert_parallel/node_limited_routing
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/06_expert_parallel
verdict='tokens sent in two hops reproduce the single-device step'

passes "4 nodes of 2; bytes; one node gets all; two in flight" node_limited_routing --layers 1 --steps 1
prints "4 nodes of 2; bytes; one node gets all; two in flight: its tables" \
    "A step of all ranks, 4 nodes of 2; a token takes 4 experts in at most 2 nodes:"
if wanted "4 nodes of 2; bytes; one node gets all; two in flight: what two hops save"; then  # in the run above
    awk '/^  plain dispatch/ { plain = $3 } /^  two hops/ { two = $3 } END { exit !(plain > 1.5 * two) }' "$out"
    report $? "4 nodes of 2; bytes; one node gets all; two in flight: what two hops save"
fi
if wanted "4 nodes of 1, two copies"; then
    run "$build/node_limited_routing" --layers 1 --steps 1 --ranks 4 --ep 2 --gpus-per-node 1 \
        --expert-groups 2 &&
        grep -q '^A step of all ranks, 4 nodes of 1; a token takes 4 experts in at most 2 nodes:$' "$out"
    report $? "4 nodes of 1, two copies of each expert: a step of all ranks is one of 4 nodes"
fi
hops() { local name=$1; shift; passes "$name" node_limited_routing --proof-only --layers 2 --steps 2 "$@"; }
of_2="--ep 4 --expert-groups 2"  # nodes of 2
hops "2 nodes of 2, one for each token, AdamW, tied" --ranks 4 $of_2 --groups-kept 1 --optimizer adamw \
    --lr 0.001 --tied
hops "3 nodes of 2, 6 ranks" --ranks 6 --ep 6 --experts 12 --expert-groups 3 --grad-acc 1
hops "2 nodes of 3, full" --ranks 6 --ep 6 --gpus-per-node 3 --experts 12 --expert-groups 2 --recompute full
hops "4 nodes of 1, experts without a token" --ranks 4 --ep 4 --gpus-per-node 1 --experts 64 --top-k 2 \
    --seq 9 --micro-batch 1 --groups-kept 2
hops "one node, two copies, shared experts" --ranks 4 --ep 2 --shared-experts 1 --routed-scale 2.5 \
    --grad-acc 1
hops "2 nodes, two copies, zero 2, full" --ranks 8 $of_2 --zero 2 --recompute full --grad-acc 3
hops "tp 2, ep 8, zero 1" --tp 2 --sp --seq 24 --zero 1
hops "cp 2, zero 3" --ranks 4 $of_2 --cp 2 --seq 32 --zero 3 --context all-gather
verdict='--ep 1 splits nothing' hops "tp 2, ep 1: one node without exchange" --ranks 2 --ep 1 --tp 2 --sp --seq 30 --grad-acc 1
verdict='--ep 1 splits nothing' hops "ep 1 of 2 ranks, full" --ranks 2 --ep 1 --recompute full --grad-acc 1
hops "pp 2, zero 3" --ranks 8 $of_2 --pp 2 --zero 3 --grad-acc 3
hops "f32" --ranks 4 $of_2 --dtype f32 --grad-acc 1
verdict='held-out loss'
passes "2 nodes of 1, an evaluation's rows are not among those sent in a step" node_limited_routing --no-check \
    --layers 1 --steps 2 --eval-every 1 --sample 0 --ranks 2 --ep 2 --gpus-per-node 1
verdict=''
if wanted "4 nodes of 1, one expert for each token, a dry run"; then
    # Of a rank's 64 tokens 48 cross, each once whatever --groups-kept allows:
    # 4 ranks x (48 x (4 h B + 4 k + 2 w k) + 36 B of counts)
    run "$build/node_limited_routing" --dry-run --verbose --layers 1 --grad-acc 1 --ranks 4 --ep 4 \
        --gpus-per-node 1 --seq 32 --experts 8 --top-k 1 --groups-kept 3 &&
        grep -Eq 'all_to_all: bytes, all ranks +predicted +298896 +measured +298896 B' "$out"
    report $? "4 nodes of 1, one expert for each token, a dry run sends it once"
fi

refused "--ep 8 in nodes of --gpus-per-node 3" node_limited_routing --gpus-per-node 3
refused "--ep 3 in nodes of --gpus-per-node 4" node_limited_routing --ranks 6 --ep 3 --gpus-per-node 4 \
    --experts 12 --expert-groups 1 --groups-kept 1
refused "--expert-groups 2 is no multiple of 4 nodes" node_limited_routing --expert-groups 2
refused "--moe deepseek --expert-groups 4 would fit" node_limited_routing --moe mixtral --expert-groups 1 \
    --groups-kept 1
refused "--capacity drops rows" node_limited_routing --capacity 1
finish
