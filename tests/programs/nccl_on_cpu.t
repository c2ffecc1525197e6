#!/bin/bash
# nccl_on_cpu.t: comm_nccl.cu on emulated GPUs, over nccl_on_cpu.cc, which refuses what NCCL would refuse.
# TAP.
# needs: OPS=cuda-on-cpu COMM=nccl BUILD=build-nccl-on-cpu OBJECTS=build
# needs: build-nccl-on-cpu/tests/test_comm build-nccl-on-cpu/tests/test_comm_requests
# needs: build-nccl-on-cpu/tests/test_comm_clock build-nccl-on-cpu/tests/test_lines
# needs: build-nccl-on-cpu/tests/test_streams build-nccl-on-cpu/02_zero/zero_r build-nccl-on-cpu/corpus.txt
# A pattern chooses among the tests of these programs.
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
needs_fibers
nccl=build-nccl-on-cpu build=build-nccl-on-cpu/01_data_parallel
builds OPS=cuda-on-cpu COMM=nccl BUILD=$nccl OBJECTS=build \
    $nccl/{tests/test_{comm,comm_requests,comm_clock,lines,streams,waits},corpus.txt} \
    $build/{collectives,ring_all_reduce,ddp_naive,ddp_bucketed} $nccl/02_zero/zero_r \
    $nccl/08_mixed_precision/train_5d

# A rank that is lost unnoticed: it has announced its call, and the other rank is inside NCCL.
for lost in KILL STOP; do
    wanted "a rank lost inside NCCL: SIG$lost" || continue
    NCCL_ON_CPU_LOST=1:$(kill -l $lost) limit=20 run $nccl/tests/test_comm --ranks 2 --types 1 --timeout 1
    [ $status != 0 ] && [ $status != 124 ] &&
        one_line 2 -E 'rank 1 has died|rank 0: NCCL waits for a rank that does not come'
    report $? "a rank lost inside NCCL: SIG$lost: $(cat "$err")"
done
if wanted "a slow start"; then
    NCCL_ON_CPU_SLOW=5 all_tests $nccl/tests/test_comm --ranks 2 --types 1 --timeout 2 'a_rank_may*'
    report $? "a slow start of NCCL is no rank that does not come: $(cat "$err")"
fi
# Tensors have left NCCL less than it needs for its buffers.
if wanted "NCCL without memory"; then
    CUDA_ON_CPU_MEMORY=80000000 NCCL_ON_CPU_BUFFERS=100000000 run $nccl/tests/test_comm --ranks 2 'a_sum*'
    one_line $? -E 'calloc 100000000 bytes; only [0-9.]+ MB of the GPU.s 80.0 MB .*micro-batch.*held now: param'
    report $? "NCCL without memory: $(cat "$err")"
    NCCL_ON_CPU_BUFFERS=100000000000000 run $nccl/tests/test_comm --ranks 2 'a_sum*'
    one_line $? -F 'calloc 100000000000000 bytes; with NCCL_DEBUG' && ! grep -q 'micro-batch' "$err"
    report $? "NCCL with memory is not told to lack it: $(cat "$err")"
fi
if wanted stops; then
    run $nccl/tests/test_comm --scenario stops --timeout 1
    [ $status != 0 ] && [ $status != 124 ] && head -n 1 "$err" | grep -q 'the ranks have not left MPI in 21 s'
    report $? "stops: $(head -n 1 "$err")"
fi
small="--layers 1 --hidden 24 --heads 6 --kv-heads 2 --ffn 20 --seq 13 --steps 1"
build=$nccl passes "zero_r over NCCL, whose calls have no common order of sums" 02_zero/zero_r --ranks 4 \
    $small --dtype f32
# Streams with queues, whose work the emulator runs in orders that only streams, events and waits limit.
if wanted "streams keep the order of the calls, in any order of the rest"; then
    bad=0
    for seed in 1 2 3 4 5; do
        CUDA_ON_CPU_STREAMS=$seed run $nccl/tests/test_streams --ranks 2 || bad=1
        ! grep -q '^not ok' "$out" || bad=1
        [ $bad = 0 ] || break
    done
    report $bad "streams keep the order of the calls, in any order of the rest"
fi
[ $# = 0 ] || [ $count = 0 ] || finish

programs="test_comm test_comm_requests test_comm_clock test_lines"
if [ $# != 0 ]; then
    for program in $programs; do
        grep -qE "^static void ${1//\*/.*}\(" tests/unit/$program.c && programs=$program
    done
fi
# On 3 ranks in all dtypes, on others in three of them: emulated GPUs are slow.
for program in $programs; do
    for ranks in 2 3 4; do
        types='--types 3'
        [ $ranks != 3 ] && [ $program = test_comm ] || types=''
        chosen=yes
        all_tests $nccl/tests/$program --ranks $ranks $types --timeout 20 "$only"
        report $? "${1:-every test of $program} over NCCL on $ranks ranks"
    done
done
only_whole
run $nccl/tests/test_lines --scenario crossed-late
one_line $? -F 'two ranks must start the calls that they share in the same order'
report $? "crossed orders of two communicators: $(cat "$err")"

run $nccl/tests/test_streams --ranks 2 && ! grep -q '^not ok' "$out"
report $? "streams keep the order of the calls"
train() {
    run $nccl/08_mixed_precision/train_5d --no-check --ranks 4 --dp 2 --pp 2 --tp 1 --zero 3 --layers 2 \
        --hidden 24 --heads 6 --kv-heads 2 --ffn 20 --seq 12 --steps 2 --eval-every 0 --sample 0 --save "$1"
}
bad=0
train "$work/calls" || bad=1
for seed in 1 2; do
    CUDA_ON_CPU_STREAMS=$seed train "$work/$seed" && diff -r "$work/calls" "$work/$seed" >"$out" || bad=1
done
report $bad "training steps have the same bits, in any order of the streams: $(cat "$err")"
limit=400 all_tests $nccl/tests/test_waits --timeout 60
report $? "the host waits once a step, and for the counts of a mixture's rows"
for program in test_comm test_comm_requests; do
    all_tests $nccl/tests/$program --ranks 3 --types 3 --timeout 20 --trust-calls
    report $? "every test of $program with trusted calls over NCCL"
done
passes "collectives: every call holds its promise" collectives --sleep 0
grep -q 'ranks on .*, NCCL 2\..* test mode: ranks share GPUs' "$out"
report $? "and the header tells of the test mode"
passes "ring_all_reduce over NCCL" ring_all_reduce --ranks 4
passes "ddp_naive over NCCL, 3 ranks" ddp_naive --ranks 3 $small
ULTRASCALE_GEMM=timed:$work/gemm passes "ranks time multiplies for a later run" ddp_naive --ranks 2 $small
[ 2 = "$(find "$work" -name 'gemm.*' -size +400c | wc -l)" ]  # of a line, and several kinds
report $? "and each writes a file"
ULTRASCALE_GEMM=read:$work/gemm passes "which chooses as their files say" ddp_naive --ranks 2 $small
rm "$work/gemm.1"
ULTRASCALE_GEMM=read:$work/gemm refused 'gemm.1: No such file' ddp_naive --ranks 2 $small
passes "ddp_bucketed over NCCL, 2 ranks, bf16" ddp_bucketed --ranks 2 $small --dtype bf16
passes "ddp_bucketed over NCCL, trusted calls" ddp_bucketed --ranks 2 $small --trust-calls

NCCL_ON_CPU_VERSION=21403 run $nccl/tests/test_comm --ranks 2
one_line $? -F 'NCCL 2.14.3 is loaded, and this program needs 2.18 or later'
report $? "an old NCCL: $(cat "$err")"
NCCL_COMM_BLOCKING=0 run $nccl/tests/test_comm --ranks 2
one_line $? -F 'unset NCCL_COMM_BLOCKING'
report $? "an environment that makes each call of NCCL a thread: $(cat "$err")"
blind='[ "$OMPI_COMM_WORLD_RANK" != 1 ] || export CUDA_VISIBLE_DEVICES=; exec "$0"'
by_mpirun -n 3 bash -c "$blind" $nccl/tests/test_comm
one_line $? -F 'rank 1: no GPU is visible'
report $? "a rank whose GPU is missing: $(cat "$err")"
for scenario in kind killed late; do
    # late: three ranks say where they wait.
    run $nccl/tests/test_comm --scenario $scenario --timeout 1
    [ $? != 0 ] && tail -n 1 "$err" | grep -qE 'where rank|has died|waits in barrier\(\), its call 1'
    report $? "$scenario: $(tail -n 1 "$err")"
done

# Ranks that died before they had met have left their memory behind.
for left in /dev/shm/nccl-on-cpu-*; do
    maker=${left#*cpu-}
    [ ! -e "$left" ] || kill -0 "${maker%-*}" 2>/dev/null || rm -f "$left"
done
finish
