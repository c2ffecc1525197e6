#!/bin/bash
# nccl_on_cpu.t: comm_nccl.cu on emulated GPUs, over nccl_on_cpu.cc, which refuses what NCCL would refuse. TAP.
# needs: OPS=cuda-on-cpu COMM=nccl BUILD=build-nccl-on-cpu build-nccl-on-cpu/tests/test_comm build-nccl-on-cpu/tests/test_lines
# With an argument: only those tests of test_comm, or of test_lines.
cd "$(dirname "$0")/../.." || exit 2
unset OPENBLAS_CORETYPE MAKEFLAGS MAKELEVEL
export OMP_NUM_THREADS=1
nccl=build-nccl-on-cpu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
count=0 failed=0
only=$1

report() {  # report STATUS NAME
    count=$((count + 1))
    if [ "$1" = 0 ]; then echo "ok $count - $2"; else echo "not ok $count - $2"; failed=1; tail -n 12 "$work/out" "$work/err" | sed 's/^/# /'; fi
}
finish() { echo "1..$count"; exit $failed; }

echo '#include <boost/context/detail/fcontext.hpp>' | g++ -fsyntax-only -x c++ - 2>/dev/null ||
    { echo "1..0 # SKIP libboost-context-dev is not installed"; exit 0; }
# A mutant has been built already.
build() {  # build TARGET…
    [ -n "${MUTANT+set}" ] ||
        make -s -j"$(nproc)" OPS=cuda-on-cpu COMM=nccl BUILD=$nccl "${@/#/$nccl/}" >"$work/out" 2>"$work/err" ||
        { report 1 "builds"; finish; }
}

# proves RANKS [PATTERN]: every test of test_comm, or of $program, that the pattern chooses.
proves() {
    timeout -k 5 120 $nccl/tests/$program --ranks "$1" --timeout 20 "${2:-*}" >"$work/out" 2>"$work/err"
    local status=$?
    sed -n 's/^not ok/# not ok/p' "$work/out"
    [ $status = 0 ] && [ "$(grep -c '^ok' "$work/out")" -gt 0 ] &&
        [ "$(grep -c '^ok' "$work/out")" = "$(sed -n 's/^1\.\.//p' "$work/out")" ]
}

program=test_comm
build tests/test_comm tests/test_lines
if [ -n "$only" ]; then
    grep -qE "^static void $(echo "$only" | sed 's/\*/.*/')\(" tests/unit/test_comm.c || program=test_lines
    for ranks in 3 2; do
        proves $ranks "$only"
        report $? "$only on $ranks ranks"
    done
    finish
fi
for program in test_comm test_lines; do
    for ranks in 2 3 4; do
        proves $ranks
        report $? "every test of $program over NCCL on $ranks ranks"
    done
done
timeout -k 5 20 $nccl/tests/test_lines --scenario crossed-late >"$work/out" 2>"$work/err"
[ $? = 2 ] && grep -q 'what two ranks share, both start in one order' "$work/err"
report $? "crossed orders of two communicators: $(cat "$work/err")"

build tests/test_streams 01_data_parallel/collectives 01_data_parallel/ring_all_reduce \
    01_data_parallel/ddp_naive 01_data_parallel/ddp_bucketed corpus.txt
timeout 60 $nccl/tests/test_streams --ranks 2 >"$work/out" 2>"$work/err" && ! grep -q '^not ok' "$work/out"
report $? "streams keep the order of the calls"
passes() {  # passes PROGRAM FLAGS…
    local program=$1
    shift
    timeout -k 5 60 "$nccl/01_data_parallel/$program" "$@" >"$work/out" 2>"$work/err" &&
        grep -q "^PASS $program: " "$work/out"
}
small="--layers 1 --hidden 24 --heads 6 --kv-heads 2 --ffn 20 --seq 13 --steps 1"
passes collectives --sleep 0 && grep -q 'ranks on .*, NCCL 2\..* test mode: ranks share GPUs' "$work/out"
report $? "collectives: every call holds its promise, and the header tells of the test mode"
passes ring_all_reduce --ranks 4
report $? "ring_all_reduce over NCCL"
passes ddp_naive --ranks 3 $small
report $? "ddp_naive over NCCL, 3 ranks"
passes ddp_bucketed --ranks 2 $small --dtype bf16
report $? "ddp_bucketed over NCCL, 2 ranks, bf16"

# refused WORDS COMMAND…: status 2, and one line on stderr, with WORDS.
refused() {
    local words=$1
    shift
    timeout -k 5 20 "$@" >"$work/out" 2>"$work/err"
    [ $? = 2 ] && [ "$(wc -l <"$work/err")" = 1 ] && grep -qF -e "$words" "$work/err"
}
NCCL_ON_CPU_VERSION=21403 refused 'NCCL 2.14.3 is loaded, and this program needs 2.18 or later' $nccl/tests/test_comm --ranks 2
report $? "an old NCCL: $(cat "$work/err")"
blind='[ "$OMPI_COMM_WORLD_RANK" != 1 ] || export CUDA_VISIBLE_DEVICES=; exec "$0"'
refused 'rank 1: no GPU is visible' mpirun --quiet --oversubscribe --allow-run-as-root -n 3 bash -c "$blind" $nccl/tests/test_comm
report $? "a rank whose GPU is missing: $(cat "$work/err")"
for scenario in kind killed late; do
    # late: three ranks say where they wait.
    timeout -k 5 20 $nccl/tests/test_comm --scenario $scenario --timeout 1 >"$work/out" 2>"$work/err"
    [ $? != 0 ] && tail -n 1 "$work/err" | grep -qE 'where rank|has died|waits in barrier\(\), its call 1'
    report $? "$scenario: $(tail -n 1 "$work/err")"
done

finish
