#!/bin/bash
# staged.t: MPI between devices whose memory it cannot access: everything goes through the host, and host code
# that accesses device memory is detected. On emulated GPUs. TAP.
# needs: OPS=cuda-on-cpu BUILD=build-cuda-on-cpu OBJECTS=build build-cuda-on-cpu/tests/test_comm
# A pattern chooses among the tests of test_comm.
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1 ULTRASCALE_GUARD=1
needs_fibers
build=build-cuda-on-cpu
builds OPS=cuda-on-cpu BUILD=$build OBJECTS=build $build/corpus.txt \
    $build/tests/test_{comm,comm_requests,comm_clock,lines,streams} \
    $build/01_data_parallel/{collectives,ring_all_reduce,ddp_{naive,bucketed}}

# On 3 ranks in all dtypes, on others in three of them: emulated GPUs are slow.
while read -r ranks types; do
    chosen=yes
    all_tests $build/tests/test_comm --ranks $ranks $types --timeout 20 "$only"
    report $? "${1:-every test of test_comm} on $ranks ranks"
done <<'RANKS'
3
2 --types 3
1 --types 3
RANKS
only_whole
for program in test_lines test_comm_requests test_comm_clock; do
    all_tests $build/tests/$program --ranks 3 --timeout 20
    report $? "every test of $program on 3 ranks"
done
run $build/tests/test_streams --ranks 2 && ! grep -q '^not ok' "$out"
report $? "streams keep the order of the calls"
build=$build/01_data_parallel
small="--layers 1 --hidden 24 --heads 6 --kv-heads 2 --ffn 20 --seq 13 --steps 1"
passes "collectives: every call holds its promise" collectives --sleep 0
grep -q 'ranks on .*, MPI through host memory' "$out"
report $? "and the header tells of the way"
passes "ring_all_reduce, 4 ranks" ring_all_reduce --ranks 4 --dtype f64
passes "ddp_naive, 3 ranks" ddp_naive --ranks 3 $small
passes "ddp_bucketed, 2 ranks, bf16" ddp_bucketed --ranks 2 $small --dtype bf16
CUDA_VISIBLE_DEVICES= passes "a dry run needs no GPU" ddp_naive --ranks 2 $small --dry-run
finish
