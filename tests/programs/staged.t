#!/bin/bash
# staged.t: MPI between devices whose memory it cannot reach: everything goes through the host, and host code that
# touches device memory is caught. On emulated GPUs. TAP.
# needs: OPS=cuda-on-cpu BUILD=build-cuda-on-cpu build-cuda-on-cpu/tests/test_comm
# With an argument: only those tests of test_comm.
cd "$(dirname "$0")/../.." || exit 2
unset OPENBLAS_CORETYPE MAKEFLAGS MAKELEVEL
export OMP_NUM_THREADS=1 ULTRASCALE_GUARD=1
folder=build-cuda-on-cpu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
count=0 failed=0

report() {  # report STATUS NAME
    count=$((count + 1))
    if [ "$1" = 0 ]; then echo "ok $count - $2"; else echo "not ok $count - $2"; failed=1; tail -n 12 "$work/out" "$work/err" | sed 's/^/# /'; fi
}
finish() { echo "1..$count"; exit $failed; }

echo '#include <boost/context/detail/fcontext.hpp>' | g++ -fsyntax-only -x c++ - 2>/dev/null ||
    { echo "1..0 # SKIP libboost-context-dev is not installed"; exit 0; }
targets=(tests/test_comm tests/test_lines tests/test_streams 01_data_parallel/{collectives,ring_all_reduce,ddp_naive,ddp_bucketed} corpus.txt)
if [ -z "${MUTANT+set}" ]; then  # a mutant has been built already
    make -s -j"$(nproc)" OPS=cuda-on-cpu BUILD=$folder "${targets[@]/#/$folder/}" >"$work/out" 2>"$work/err" ||
        { report 1 "builds"; finish; }
fi

for ranks in 3 2 1; do
    timeout -k 5 120 $folder/tests/test_comm --ranks $ranks --timeout 20 "${1:-*}" >"$work/out" 2>"$work/err"
    status=$?
    sed -n 's/^not ok/# not ok/p' "$work/out"
    [ $status = 0 ] && [ "$(grep -c '^ok' "$work/out")" -gt 0 ] &&
        [ "$(grep -c '^ok' "$work/out")" = "$(sed -n 's/^1\.\.//p' "$work/out")" ]
    report $? "${1:-every test of test_comm} on $ranks ranks"
done
[ $# = 0 ] || finish
timeout -k 5 120 $folder/tests/test_lines --ranks 3 --timeout 20 >"$work/out" 2>"$work/err" && ! grep -q '^not ok' "$work/out"
report $? "every test of test_lines on 3 ranks"
timeout 60 $folder/tests/test_streams --ranks 2 >"$work/out" 2>"$work/err" && ! grep -q '^not ok' "$work/out"
report $? "streams keep the order of the calls"
passes() {  # passes PROGRAM FLAGS…
    local program=$1
    shift
    timeout -k 5 60 "$folder/01_data_parallel/$program" "$@" >"$work/out" 2>"$work/err" &&
        grep -q "^PASS $program: " "$work/out"
}
small="--layers 1 --hidden 24 --heads 6 --kv-heads 2 --ffn 20 --seq 13 --steps 1"
passes collectives --sleep 0 && grep -q 'ranks on .*, MPI through host memory' "$work/out"
report $? "collectives: every call holds its promise, and the header tells of the way"
passes ring_all_reduce --ranks 4 --dtype f64
report $? "ring_all_reduce, 4 ranks"
passes ddp_naive --ranks 3 $small
report $? "ddp_naive, 3 ranks"
passes ddp_bucketed --ranks 2 $small --dtype bf16
report $? "ddp_bucketed, 2 ranks, bf16"
finish
