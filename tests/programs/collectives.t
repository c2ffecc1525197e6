#!/bin/bash
# collectives.t: the primitives and the ring on 1 to 8 ranks, with sizes that do not divide, against what
# the playbook prints; and wrong use. TAP.
# needs: build/01_data_parallel/collectives build/01_data_parallel/ring_all_reduce
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/01_data_parallel

# runs COMMAND…: exit status 0 and one PASS verdict, on the last line.
runs() {
    run "$@" && tail -n 1 "$out" | grep -q '^PASS ' &&
        [ "$(grep -c '^PASS' "$out")" = 1 ]
}

# passes NAME PROGRAM FLAGS…
passes() {
    local name=$1 program=$2
    shift 2
    wanted "$name" || return
    runs "$build/$program" "$@"
    report $? "$name"
}

passes "collectives, 3 ranks" collectives --sleep 0.1
prints "reduce and all_reduce end in the playbook's numbers" \
    '0 1 1 1 1 1 -> 6 6 6 6 6' '1 2 2 2 2 2 -> 2 2 2 2 2' \
    '2 3 3 3 3 3 -> 6 6 6 6 6' '0 1 2 3 4 5 -> 6 12 18 24 30'
prints "broadcast, gather, scatter end in the playbook's numbers" '2 0 0 0 0 0 -> 1 2 3 4 5' \
    '0 1 1 1 1 1 -> 1 1 1 1 1 2 2 2 2 2 3 3 3 3 3' '1 2 2 2 2 2 -> -' \
    '0 1 1 1 1 1 2 2 2 2 2 3 3 3 3 3 -> 1 1 1 1 1' '2 - -> 3 3 3 3 3'
prints "reduce_scatter ends in the playbook's numbers" '0 1 2 1 4 1 8 -> 6 12' '1 2 4 4 16 8 64 -> 14 56' \
    '2 3 6 9 36 27 216 -> 36 288'
prints "all_to_all is a transpose; unequal parts arrive whole" \
    '1 10 11 12 -> 1 11 21' '2 20 20 22 -> 12 12 22'
prints "bus bandwidth falls where the node ends, and with each node" \
    'nodes GPUs 1.00 MB 25.0 MB 1.00 GB' '1 8 34.0 302.1 444.6' '2 16 15.7 202.4 390.5' \
    '64 512 0.5 11.4 215.9'
passes "collectives, nodes of one GPU" collectives --ranks 2 --sleep 0.01 --gpus-per-node 1 \
    --network-efficiency 0.7
prints "its bandwidth begins with two nodes" '2 2 20.9 34.1 35.0'
for ranks in 1 2 4 8; do passes "collectives, $ranks ranks" collectives --ranks $ranks --sleep 0.01; done
awk '/^  rank [0-7] slept [0-9.]+ s, and left the barrier/ {
        slept++; if ($4 < 0.01 * $2 || $10 < $4) early++ }
     END { exit early || slept != 8 }' "$out"
report $? "collectives, 8 ranks: each has slept as long as it should, before the barrier"

passes "ring, 4 ranks, f32" ring_all_reduce
prints "its chunks go round" 'reduce-scatter 1 rank 0 0 0 30 0' 'rank 1 1 2301 301 01' \
    'rank 2 1230 2301 3012 0123'
prints "its counts are the formulas, with 30011 elements on 4 ranks" \
    'reduce-scatter, (N - 1) K in all predicted 360132 measured 360132 B equal' \
    'both, 2 (N - 1) K in all predicted 720264 measured 720264 B equal'
grep -Eq '^PASS .* f32 reassociated, [1-9]' "$out"
report $? "ring, 4 ranks, f32: sums of random numbers round, and are others than the library's"
passes "ring, 1 rank, f64" ring_all_reduce --ranks 1 --dtype f64
passes "ring, 2 ranks, bf16, 1 element" ring_all_reduce --ranks 2 --dtype bf16 --elements 1
passes "ring, 3 ranks, f16, 100003 elements" ring_all_reduce --ranks 3 --dtype f16 --elements 100003
passes "ring, 6 ranks, f64, 5 elements" ring_all_reduce --ranks 6 --dtype f64 --elements 5
passes "ring, 8 ranks, bf16" ring_all_reduce --ranks 8 --dtype bf16
passes "ring, 5 ranks, 2 a node, slow links" ring_all_reduce --ranks 5 --gpus-per-node 2 \
    --network-efficiency 0.7 --machine dgx-a100
runs mpirun --allow-run-as-root --oversubscribe -n 2 "$build/ring_all_reduce" --elements 7
report $? "ring, started by mpirun"

refuses "a size below none" '--elements -1' ring_all_reduce --elements -1
refuses "a dtype that it cannot add" '--dtype' ring_all_reduce --dtype e4m3
refuses "half a rank" '--ranks' collectives --ranks 2.5
refuses "a sleep that is no time" '--sleep' collectives --sleep nan
by_mpirun -n 2 "$build/collectives" --ranks 3
one_line $? -F 'mpirun has started 2'
report $? "other ranks than mpirun's"
finish
