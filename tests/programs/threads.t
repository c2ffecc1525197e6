#!/bin/bash
# threads.t: programs on many ranks under ThreadSanitizer: the thread that computes, the one that watches
# whether the output is read, and MPI's own. OpenMP's threads are left out, since its library is not built
# for the sanitizer, and so is memory shared between ranks, which are processes: tests/unit/test_comm.c
# tests that by its results. TAP.
# needs: BUILD=build-tsan SANITIZE=thread OPT=-O0 CHAPTERS=0[0-5] build-tsan/corpus.txt
# needs: build-tsan/01_data_parallel/ddp_bucketed build-tsan/02_zero/zero3
# needs: build-tsan/03_tensor_parallel/async_tensor_parallel
# needs: build-tsan/04_context_parallel/zigzag_ring_attention
# needs: build-tsan/05_pipeline_parallel/one_f_one_b
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
if ! echo 'int main(void) { return 0; }' | ${CC:-gcc} -fsanitize=thread -x c - -o "$work/thread" \
    2>/dev/null || ! "$work/thread"; then
    echo "1..0 # SKIP this compiler has no ThreadSanitizer, or this kernel does not let it run"
    exit 0
fi
programs=$(sed -n 's/^# needs: //p' "$0")
builds $programs
build=build-tsan
# Open MPI passes requests between threads by atomics and mutexes of a library that was not built for the
# sanitizer, which sees the two accesses but not what orders them.
printf 'race:%s\n' mca_ libpmix libopen- libmpi libevent >"$work/of-mpi"
export TSAN_OPTIONS="suppressions=$work/of-mpi exitcode=66"
# UCX, which Open MPI 5 loads, starts a thread that waits for its monitor. Without /run/user that thread ends
# before its program and is never joined, which the sanitizer reports as a leak.
export UCX_VFS_ENABLE=n
# races PROGRAM FLAGS…: no race in any rank; the output goes to a pipe, which a thread watches.
races() {
    wanted "$1" || return
    timeout -k 5 $limit "$build/$@" 2>"$err" | cat >"$out"
    status=${PIPESTATUS[0]}
    [ $status = 0 ] && grep -q '^PASS' "$out" && ! grep -q 'WARNING: ThreadSanitizer' "$err"
    report $? "$1"
}
quick="--no-check --steps 3 --sample 0 --eval-every 0"
races 01_data_parallel/ddp_bucketed --layers 1 $quick
races 02_zero/zero3 --layers 1 $quick
races 03_tensor_parallel/async_tensor_parallel --layers 1 $quick
races 04_context_parallel/zigzag_ring_attention --layers 1 $quick
races 05_pipeline_parallel/one_f_one_b --layers 4 $quick
finish
