#!/bin/bash
# rendezvous.t: ranks that no MPI has started find each other through --rendezvous FILE, and end together when one does not
# come, is not who it should be, or dies. Over NCCL on emulated GPUs, in a build without MPI. TAP.
# needs: OPS=cuda-on-cpu COMM=nccl MPI_CFLAGS= MPI_LIBS= BUILD=build-no-mpi KERNELS=build-nccl-on-cpu/lib build-no-mpi/tests/test_comm
# A pattern chooses among the cases.
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
folder=build-no-mpi
comm=$PWD/$folder/tests/test_comm
file=$work/meet

needs_fibers
builds OPS=cuda-on-cpu COMM=nccl MPI_CFLAGS= MPI_LIBS= BUILD=$folder KERNELS=build-nccl-on-cpu/lib $folder/tests/test_comm

# One rank in the background, as a launcher would start it. Its output is $work/out.RANK, all errors $work/err.
pids=()
rank() {  # rank RANK WORLD_SIZE FLAGS…
    local r=$1 n=$2
    shift 2
    RANK=$r WORLD_SIZE=$n timeout -k 5 40 "$comm" --rendezvous "$file" --timeout "${patience:-20}" "$@" >"$work/out.$r" 2>>"$err" &
    pids+=($!)
}
begin() { rm -f "$work"/*; pids=(); : >"$err"; }
# ended STATUSES: all end with these, in the order in which they began.
ended() {
    local statuses=''
    for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null; statuses+=" $?"; done
    [ "${statuses# }" = "$1" ]
}
all() { local r; for ((r = 0; r < $1; r++)); do rank $r "$@"; done; }
told() { grep -qE -e "$1" "$err"; }
says() { [ "$(wc -l <"$err")" = 1 ] && grep -qE -e "$1" "$err"; }
nothing_left() { [ -z "$(ls "$work" | grep meet)" ]; }

if wanted tests; then
    begin
    all 3
    ended "0 0 0" && ! grep -q '^not ok' "$work/out.0" && [ "$(grep -c '^ok' "$work/out.0")" -ge 27 ] &&
        [ ! -s "$work/out.1" ] && [ ! -s "$err" ] && nothing_left
    report $? "every test of test_comm on 3 ranks without mpirun; rank 0 alone speaks, and no file is left"
fi
if wanted slurm; then
    begin
    for r in 1 0; do
        SLURM_PROCID=$r SLURM_NTASKS=2 timeout 20 "$comm" --rendezvous "$file" --scenario header >"$work/out.$r" 2>>"$err" &
        pids+=($!)
    done
    ended "0 0" && grep -q '^2 ranks on ' "$work/out.0"
    report $? "srun's variables do as well, and ranks may come in any order"
fi

# Programs that go wrong once all have met: as comm_errors.t has them.
goes_wrong() {  # goes_wrong SCENARIO STATUSES WORDS
    wanted "$1" || return
    begin
    all 4 --scenario "$1"
    ended "$2" && says "$3" && nothing_left
    report $? "$1: $(head -n 1 "$err")"
}
goes_wrong kind '2 2 2 2' 'rank 2 called all_gather\(4096 f32\) where'
goes_wrong killed '2 2 137 2' 'rank 2 has died; all ranks end'
goes_wrong killed-in-work '2 2 137 2' 'rank 2 has died; all ranks end'
goes_wrong exits-at-once '2 2 0 2' 'rank 2 has died; all ranks end'
goes_wrong exits '2 2 2 2' 'rank 2 called comm_finish, or left the program, where'
goes_wrong fatal-one '2 2 2 2' 'rank 2: something broke'
goes_wrong fatal-all '2 2 2 2' 'rank 0: something broke'
if wanted status; then
    begin
    all 4 --scenario status
    ended "1 1 1 1" && [ ! -s "$err" ]
    report $? "one rank's FAIL is everyone's"
fi
if wanted late; then
    begin
    patience=1 all 3 --scenario late
    ended "2 2 2" && tail -n 1 "$err" | grep -q 'waits in barrier.*for rank 2, for .* s (--timeout)'
    report $? "a rank that does not come to a call: $(tail -n 1 "$err")"
fi

# Ranks that do not find each other.
if wanted missing; then
    begin
    patience=3 rank 0 3 --scenario header
    patience=3 rank 1 3 --scenario header
    ended "2 2" && says 'rank 2 of 3 did not come in 3 s \(--timeout\)' && nothing_left
    report $? "missing: $(cat "$err")"
    begin
    patience=1 rank 1 2 --scenario header
    ended 2 && says 'rank 0 did not come in 1 s \(--timeout\): the file is not there'
    report $? "rank 0 missing: $(cat "$err")"
fi
if wanted world; then
    begin
    # Who comes late, on a busy machine, finds nobody and says so, too.
    patience=5 rank 1 2 --scenario header
    patience=5 rank 2 3 --scenario header
    rank 0 3 --scenario header
    ended "2 2 2" && told 'rank 1 on .* was started as one of 2 ranks \(WORLD_SIZE\), and rank 0 as one of 3'
    report $? "world: $(head -n 1 "$err")"
fi
if wanted twice; then
    begin
    patience=5 rank 1 3 --scenario header
    patience=5 rank 1 3 --scenario header
    rank 0 3 --scenario header
    ended "2 2 2" && told 'two processes say that they are rank 1'
    report $? "twice: $(head -n 1 "$err")"
fi
if wanted arguments; then
    begin
    rank 0 2 x
    rank 1 2 y
    ended "2 2" && says 'rank 1 was started with other arguments than rank 0'
    report $? "arguments: $(cat "$err")"
fi
# A file of an earlier run: nobody waits there, or somebody who does not know its secret.
stale() { printf 'ultrascale rendezvous 1\n%s %d 0123456789abcdef0123456789abcdef\n' "$(hostname)" "$1" >"$file"; }
if wanted stale; then
    begin
    stale 1
    rank 1 2 --scenario header
    sleep 0.5
    rank 0 2 --scenario header
    ended "0 0" && [ ! -s "$err" ] && nothing_left
    report $? "stale: who read the file of an earlier run reads the new one"
    begin
    stale 1
    patience=1 rank 1 2 --scenario header
    ended 2 && says 'rank 0 did not come in 1 s \(--timeout\): it names port 1 of .*: it is of an earlier run'
    report $? "stale, and nobody comes: $(cat "$err")"
fi
if wanted taken; then
    begin
    rank 0 2 --scenario header
    for i in $(seq 50); do [ -s "$file" ] && break; sleep 0.1; done
    rank 0 2 --scenario header
    sleep 0.3
    rank 1 2 --scenario header
    ended "2 0 0" && says 'another run has taken the file: each run needs its own'
    report $? "taken: $(cat "$err")"
fi

# Wrong use: status 2 and one sentence.
refused() {  # refused NAME WORDS VARIABLE… -- FLAGS…
    local name=$1 words=$2 variables=()
    wanted use || return
    shift 2
    while [ "$1" != -- ]; do variables+=("$1"); shift; done
    shift
    begin
    [ -z "$notes" ] || echo "$notes" >"$file"
    env "${variables[@]}" timeout 20 "$comm" --scenario header --timeout 1 "$@" >"$out" 2>"$err"
    [ $? = 2 ] && says "$words"
    report $? "$name: $(cat "$err")"
}
refused "no launcher" '2 ranks need mpirun: this program was built without MPI' -- --ranks 2
refused "no ranks" '2 ranks need a launcher: --rendezvous takes RANK and WORLD_SIZE' -- --rendezvous "$file" --ranks 2
refused "a rank beyond the last" 'RANK=3 is no rank of WORLD_SIZE=3' RANK=3 WORLD_SIZE=3 -- --rendezvous "$file"
refused "a rank that is no number" 'RANK=one in the environment is not a count' RANK=one WORLD_SIZE=3 -- --rendezvous "$file"
refused "no folder" '--rendezvous /nonexistent/meet cannot be written' RANK=0 WORLD_SIZE=2 -- --rendezvous /nonexistent/meet
refused "RANK alone" '--rendezvous FILE lets these ranks find each other' RANK=0 WORLD_SIZE=2 --
refused "other --ranks" '--ranks 3, but a launcher has started 1' RANK=0 WORLD_SIZE=1 -- --rendezvous "$file" --ranks 3
notes='a page of notes'
refused "a file of something else" 'there is such a file, and it is of something else' RANK=0 WORLD_SIZE=2 -- --rendezvous "$file"
if wanted use; then
    [ "$(cat "$file")" = "$notes" ]
    report $? "and leaves it as it was"
fi

finish
