#!/bin/bash
# comm_errors.t: what a user sees when ranks disagree, die or wait for each other. TAP.
# needs: build/tests/test_comm
# A pattern chooses among the scenarios.
# slow: stops
# slow: open files
. "$(dirname "$0")/tap.sh"
comm=$build/tests/test_comm
limit=60  # seconds, after which it hangs

# ends SCENARIO STATUS PATTERN [FLAGS…]: 4 ranks end, long before the limit, with that status (-: any but 0),
# after one line on stderr, which matches.
ends() {
    local name=$1 expected=$2 pattern=$3 status; shift 3
    wanted "$name" || return
    run "$comm" --scenario "$name" "$@"
    status=$?
    [ $status != 0 ] && [ $status != 124 ] && { [ "$expected" = - ] || [ $status = "$expected" ]; } &&
        [ "$(wc -l <"$err")" = 1 ] && grep -qE -- "$pattern" "$err"
    report $? "$name: $(head -n 1 "$err")"
}

reduce='called all_reduce\(1024 f32\)' gather='called all_gather\(4096 f32\)'
one="rank 2 $gather where rank [013] $reduce" other="rank 3 $reduce where rank 2 $gather"
ends kind 2 "$one, in group world|$other, in group"
ends root 2 'broadcast\(1024 f32 from rank 1\)'
ends op 2 'all_reduce\(1024 f32 max\)'
ends dtype 2 'all_reduce\(1024 bf16\)'
ends count 2 'all_reduce\(1023 f32\)'
host_count='all_reduce\(2 f64 on the host\) where rank . called all_reduce\(100 |\(100 f64 on .* where rank 2'
ends host-count 2 "$host_count" --trust-calls
ends parts 2 'split in other parts'
ends all-to-all 2 'all_to_all\('
ends order 2 'in group (red|blue) where rank . called all_reduce\(.*\) in group (red|blue)'
# With NCCL all ranks make a group together.
ends unmade 2 \
    '([0-9]+ \(not made on rank 0\)|red|comm_group, .*) where rank 0 called barrier\(\) in group world'
ends skipped 2 'rank 2 called barrier\(\) where|where rank 2 called barrier\(\)'
ends sends 2 \
    'rank (1|3) called send\(1024 f32 to rank .\) where rank . called send\(1024 f32 to rank (1|3)\)'
ends receives 2 'called receive\(.*where rank . called receive\('
ends send-size 2 \
    'rank 1 called receive\(1000 f32 from rank 0\) where rank 0 called send\(1024 f32 to rank 1\)'
ends send-all 2 'called all_reduce\(1024 f32\) where rank 0 called send\(1024 f32 to rank 1\)'
ends lost 2 'rank 2: comm_finish: nobody waited for all_reduce\(1024 f32\) in group single'
ends killed - 'rank 2 has died'
ends killed-in-work - 'rank 2 has died'
ends killed-in-sum - 'rank 2 has died'
ends killed-in-sum - 'rank 2 has died' --trust-calls
ends exits-at-once - 'rank 2 has died'
ends exits 2 \
    'rank 2 called comm_finish \(or left the program\) where|where rank 2 called comm_finish \(or left the program\), in'
ends finishes 2 \
    'rank 2 called comm_finish \(or left the program\) where|where rank 2 called comm_finish \(or left the program\), in'
ends fatal-one 2 '^test_comm: rank 2: something broke$'
ends fatal-all 2 '^test_comm: rank 0: something broke$'
ends root-9 2 'broadcast: there is no root 9 in group world of 4'
ends in-is-out 2 'all_to_all: in and out overlap'
ends no-tensor 2 'all_reduce: t is no tensor'
ends no-part 2 'all_gather: in is no tensor'
ends no-message 2 'transfers: number 0 of the batch has no tensor'
ends no-request 2 'comm_wait: this is no request in flight: it is NULL, or was waited for before'
ends waited-twice 2 'comm_wait: this is no request in flight: it is NULL, or was waited for before'
ends part-of-another 2 'all_gather: in lies in out, and not where part 0 does'
ends sent-and-overwritten 2 'transfers: 0 and 1 of the batch overlap, and one of them receives'
ends stranger 2 'barrier: rank [23] is not a member of group pair'
ends grid 2 '--dp 3 x --tp 2 needs 6 ranks, and there are 4: --ranks 6 would fit, or --dp 2'
ends grid-tp 2 \
    '--dp 1 x --tp 3 needs 3 ranks, and there are 4: --ranks 3 would fit; with 4 ranks --tp 3 does not'
ends grid-ep 2 '--ep 3 does not divide --dp 4: 1, 2, 4 would'

# Each rank that waits says where, and the first one to give up ends them all.
waits() {  # waits SCENARIO LINES PATTERN [FLAG]
    wanted "$1" || return
    run "$comm" --scenario "$1" --timeout 1 $4
    [ $? = 2 ] && [ "$(wc -l <"$err")" = "$2" ] && tail -n 1 "$err" |
        grep -qE "$3.*, for [0-9.]+ s \(--timeout\)$"
    report $? "$1: $(tail -n 1 "$err")"
}
waits late 3 'waits in barrier\(\), its call 1, in group world, for rank 2'
waits late-busy 3 'waits in barrier\(\), its call 1, in group world, for rank 2'
if about mpi late-starved; then
    OMPI_MCA_mpi_yield_when_idle=1 run "$comm" --scenario late-starved --timeout 4
    [ $? = 0 ] && [ ! -s "$err" ]
    report $? "late-starved: who had no core to look has not waited in vain"
fi
waits circle 4 'waits in send\(1024 f32 to rank .\), its call 1, in group world, for rank .'

# Over NCCL they wait in it, and only one that does not can say where.
! about mpi skipped ||
    waits skipped 4 'waits in (all_reduce\(1024 f32\), its call 1, .*for data|barrier.*for rank 0.*)' \
    --trust-calls

# A container or a batch job may be allowed only some of the machine's cores, or of their time.
shares_a_core() {  # shares_a_core NAME COMMAND…: which confines what follows it
    wanted "$1" && [ "$(getconf _NPROCESSORS_ONLN)" -gt 1 ] || return
    env -u OMPI_MCA_mpi_yield_when_idle "${@:2}" \
        "$comm" --scenario killed-in-work --ranks 2 >"$out" 2>"$err" &  # neither of the two is killed
    launcher=$!
    tr '\0' '\n' </proc/$(awk '{ print $1 }' <<<"$(ranks_of $launcher 2)")/environ >"$work/environ"
    grep -q '^OMPI_MCA_mpi_yield_when_idle=1$' "$work/environ"
    report $? "$1: two ranks let each other run"
    kill -TERM $launcher
    wait $launcher
}
shares_a_core "one core of several" taskset -c "$(taskset -pc $$ | grep -o '[0-9]*$')"
if private_mounts "the time of one core"; then
    shares_a_core "the time of one core" "${time_of_a_core[@]}"
fi
# A pod's name may be as long as Linux allows; a sandbox may hide what distinguishes machines with the same
# name.
if private_mounts "long names of hosts, a hidden boot_id"; then
    if wanted "a host's name of 64 letters"; then
        letters=64
        ! ompi_info --version | grep -q ' v5' || letters=63  # at 64 its MPI_Init overruns an array
        run unshare -u bash -c 'hostname $(printf "pods%.0s" {1..16} | head -c $0) && exec "$@"' $letters \
            "$comm" --scenario header
        [ $? = 0 ] && [ ! -s "$err" ] && grep -q '^4 ranks on podspods' "$out"
        report $? "a host's name of $letters letters: $(cat "$err")"
    fi
    if wanted "a hidden boot_id"; then
        run unshare -m --propagation private bash -c \
            'mount -t tmpfs tmpfs /proc/sys/kernel/random && exec "$@"' - "$comm" --scenario header
        [ $? = 0 ] && [ ! -s "$err" ]
        report $? "a hidden boot_id: $(cat "$err")"
    fi
fi
# Containers may have process numbers of their own (apptainer exec --pid): no rank finds the others'
# processes. Rank 2 comes 6 s late, so that the others look for it.
if wanted "ranks that do not see each other" && unshare -p -f true 2>/dev/null; then
    by_mpirun -n 3 unshare -p -f bash -c 'for ((i = 0; i < 10 * OMPI_COMM_WORLD_RANK; i++)); do
        /bin/true; done; "$@"; exit' - "$comm" --scenario late-starved --timeout 60
    [ $? = 0 ]
    report $? "ranks that do not see each other are not dead: $(head -n 1 "$err")"
fi
if wanted stops; then  # mpirun may fail to end the rank that it has to end (Open MPI 4.1.4), and say so
    run "$comm" --scenario stops --timeout 1
    [ $? = 2 ] && head -n 1 "$err" | grep -q \
        'the ranks have not left MPI in 21 s (--timeout, and 20 s to end): one is stopped or gone'
    report $? "stops: $(head -n 1 "$err")"
fi

if wanted status; then
    run "$comm" --scenario status
    [ $? = 1 ] && [ ! -s "$err" ]
    report $? "one rank's FAIL is everyone's, without a word on stderr"
fi
if wanted "a loop's input"; then
    while read -r line; do
        "$comm" --scenario status
        echo "read $line"
    done >"$out" 2>"$err" < <(printf '%s\n' first second)
    [ "$(grep -c '^read' "$out")" = 2 ]
    report $? "a loop's input is the loop's: $(grep -c '^read' "$out") of 2 lines"
fi
# As if a rank that leaves MPI had waited in vain for the answer of an mpirun that is held up.
if wanted "an mpirun that is late"; then
    echo 'int PMIx_Finalize(const void *info, unsigned long count) { return !info && count; }' |
        ${CC:-cc} -shared -fPIC -x c -o "$work/late.so" -
    LD_PRELOAD=$work/late.so run "$comm" --scenario header
    [ $? = 0 ] && [ ! -s "$err" ]
    report $? "an mpirun that is late at the end changes no verdict: $(cat "$err")"
fi
# The rank that says why all end is the first that makes a file in mpirun's folder.
if wanted "what a killed run has left"; then
    by_mpirun -n 4 sh -c 'touch -d "2 minutes ago" "$PMIX_SERVER_TMPDIR/ultrascale-ends"; exec "$@"' - \
        "$comm" --scenario fatal-one
    one_line $? -F 'test_comm: rank 2: something broke'
    report $? "what a killed run has left keeps no rank from saying why: $(cat "$err")"
fi
# know_each_other RANKS…: from then on they catch SIGTERM (signal 15, bit 14).
know_each_other() {
    local rank i
    for rank; do
        for i in $(seq 600); do
            (($(sed -n 's/^SigCgt:\t*/0x/p' /proc/$rank/status) & 1 << 14)) && break
            sleep 0.1
        done
    done
}

# Even memory that has a name only for a moment: a run that is killed just then leaves it behind.
if about mpi "what ranks share"; then
    "$comm" --scenario late --timeout 60 >"$out" 2>"$err" &
    launcher=$!
    ranks=$(ranks_of $launcher 4)
    know_each_other $ranks
    shared=$(for rank in $ranks; do cat /proc/$rank/maps; done |
        sed -n 's|.* /dev/shm/\([^/]*\)......\(/.*\)*$|\1|p' | sort -u)
    kill -TERM $launcher
    wait $launcher
    [ "$shared" = ultrascale-run- ]
    report $? "what ranks share stands in their run's folder: ${shared//$'\n'/, }"
fi
# If the launcher is killed, mpirun ends with it; the next start removes what they left, and nothing of a run
# that still exists.
if about mpi "a killed launcher" && private_mounts "a killed launcher"; then
    run unshare -m --propagation private bash -c "mount -t tmpfs tmpfs /dev/shm; . tests/programs/tap.sh
        $(declare -f know_each_other); files() { find /dev/shm -type f | wc -l; }
        mkdir \$work/tmp && export TMPDIR=\$work/tmp
        $comm --scenario late --timeout 60 2>&1 & killed=\$!; ranks=\$(ranks_of \$killed 4)
        know_each_other \$ranks
        kill -9 \$killed; for i in \$(seq 50); do kill -0 \$ranks 2>&1 | grep -q . && break; sleep 0.1; done
        files
        $comm --scenario late --timeout 60 2>&1 & lives=\$!; know_each_other \$(ranks_of \$lives 4)
        files; $comm --scenario status; files; ls /dev/shm | wc -l; ls \$TMPDIR | wc -l
        kill -9 \$lives"
    seen=$(grep -x '[0-9]*' "$out" | tr '\n' ' ')
    [[ $seen == [1-4]' 4 4 1 1 ' ]]  # a rank that sees mpirun go may still remove its own
    report $? "a killed launcher's folders are removed by the next; a run beside it keeps its own"
fi
if wanted "a clone in /dev/shm" && private_mounts "a clone in /dev/shm"; then
    run unshare -m --propagation private bash -c "mount -t tmpfs tmpfs /dev/shm && cd /dev/shm &&
        mkdir ultrascale.c ultrascale-run-backup && touch ultrascale.c/README.md ultrascale-run-backup/file &&
        TMPDIR=/dev/shm \$OLDPWD/$comm --scenario header && ls -d */*"
    [ "$(tail -n 2 "$out" | tr '\n' ' ')" = 'ultrascale-run-backup/file ultrascale.c/README.md ' ]
    report $? "a clone in /dev/shm is taken for no abandoned run, nor is a user's own folder of such a name"
fi
# 0 would mean the process group.
wanted "no number of a launcher" && ULTRASCALE_LAUNCHER=abc by_mpirun -n 2 "$comm" --ranks 3
[ "$status" = 2 ]
report $? "no number of a launcher: a rank signals nobody"
# The mpirun of Open MPI 4 that ends as the last of its user removes the folder that they have in common.
if wanted "an mpirun that ends as another starts"; then
    mkdir "$work/common"
    perl -e 'while (1) { rmdir $ARGV[0] }' "$work/common/ompi.$(hostname).$(id -u)" &
    removes=$!
    for i in 1 2 3 4 5; do  # each without its own folder fails 9 times in 10
        TMPDIR=$work/common run "$comm" --scenario header || break
    done
    kill $removes
    # Nor does a run ask for that folder: here it cannot be made.
    rm -rf "$work/common/ompi.$(hostname).$(id -u)" && touch "$work/common/ompi.$(hostname).$(id -u)"
    [ $status = 0 ] && [ ! -s "$err" ] && TMPDIR=$work/common run "$comm" --scenario header
    [ $status = 0 ] && [ ! -s "$err" ]
    report $? "an mpirun that ends as another starts takes nothing from it: $(head -n 1 "$err")"
fi
# Linux promises /dev/shm's memory and takes it page by page: another program may fill it during the run.
if about mpi "a /dev/shm that fills up" && private_mounts "a /dev/shm that fills up"; then
    run unshare -m --propagation private bash -c "mount -t tmpfs -o size=64M tmpfs /dev/shm
        . tests/programs/tap.sh; $(declare -f know_each_other)
        $comm --scenario full & launcher=\$!; know_each_other \$(ranks_of \$launcher 4)
        dd if=/dev/zero of=/dev/shm/filling bs=64k 2>/dev/null; mv /dev/shm/filling /dev/shm/full
        wait \$launcher"
    one_line $? -E ': /dev/shm/ultrascale-run-[^/]* is full, where the ranks of this machine share memory: '
    report $? "a /dev/shm that fills up: $(cat "$err")"
fi
# A signal's exit status is not that of a failed check, however it arrives: only at the launcher, at its
# mpirun too (Ctrl-C reaches the terminal's whole group), or at a rank that is killed before the others know
# of it.
interrupts() {  # interrupts SIGNAL STATUS [queued]
    local how=$3
    wanted "interrupts ${how:+$how }$1" || return
    # A shell without a terminal makes its background processes ignore SIGINT, and nohup makes them ignore
    # SIGHUP.
    perl -e '$SIG{$_} = "DEFAULT" for qw(INT TERM HUP); exec @ARGV' "$comm" --scenario late --timeout 60 \
        >"$out" 2>"$err" &
    launcher=$!
    ranks_of $launcher 4 >/dev/null
    sleep 0.5
    if [ -z "$how" ]; then kill -$1 $launcher
    else python3 -c "import ctypes; ctypes.CDLL(None).sigqueue($launcher, $(kill -l $1), None)"  # as supervisors do
    fi
    wait $launcher
    status=$?
    [ $status = $2 ] && [ ! -s "$err" ]
    report $? "SIG$1${how:+, $how,} to the launcher is exit status $2"
}
interrupts INT 130
interrupts TERM 143
interrupts HUP 129
interrupts TERM 143 queued
# mpirun answers a signal of its own with status 1, which from a rank is a failed check. Its ranks end before
# they know each other, or later, and none knows why.
if wanted "mpirun is told to end"; then
    other=''
    for delay in 0 0.5; do
        "$comm" --scenario late --timeout 60 >"$out" 2>"$err" & launcher=$!
        ranks_of $launcher 4 >/dev/null
        sleep $delay
        kill -TERM $(cat /proc/$launcher/task/*/children)
        wait $launcher
        status=$?  # the mpirun of Open MPI 5 has more to say, before
        [[ "$status $(tail -n 1 "$err")" == \
            '2 test_comm: mpirun has ended with status 1, and no rank has said why'* ]] ||
            other="$other, not after $delay s: status $status, $(tail -n 1 "$err")"
    done
    [ -z "$other" ]
    report $? "mpirun is told to end$other"
fi

# Under nohup, closing the terminal sends SIGHUP to its whole group and ends nothing, even if a library has
# installed a handler before main; Ctrl-C does end the run.
if wanted "nohup"; then
    printf '#include <signal.h>\n%s\n' '__attribute__((constructor)) static void take(void) {
        signal(SIGHUP, SIG_DFL); }' | gcc -shared -fPIC -x c - -o "$work/takes.so"
    LD_PRELOAD=$work/takes.so setsid perl -e '$SIG{HUP} = "IGNORE"; exec @ARGV' "$comm" --scenario late \
        --timeout 60 >"$out" 2>"$err" &
    launcher=$!
    ranks=$(ranks_of $launcher 4)
    sleep 0.5
    kill -HUP -- -$launcher
    sleep 5  # mpirun takes 2.5 to end its ranks
    kill -0 $ranks 2>"$work/gone"
    alive=$?
    kill -TERM $launcher
    wait $launcher
    status=$?
    [ $alive = 0 ] && [ $status = 143 ] && [ ! -s "$err" ]
    report $? "nohup keeps a run whose terminal is closed"
fi
if wanted "Ctrl-C under nohup"; then
    cat >"$work/terminal" <<'PYTHON'
import os, pty, signal, sys, time
pid, terminal = pty.fork()
if pid == 0:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.execv(sys.argv[1], sys.argv[1:])
time.sleep(2)
os.write(terminal, b"\x03")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
PYTHON
    run python3 "$work/terminal" "$comm" --scenario late --timeout 60
    [ $? = 130 ]
    report $? "Ctrl-C under nohup is exit status 130"
fi

# The reader of the output may pause (Ctrl-S, less): mpirun then outlives its ranks.
if wanted "a reader that pauses"; then
    timeout $limit "$comm" --scenario prints 2>"$err" | (sleep 8 && wc -l) >"$out"
    status=${PIPESTATUS[0]}
    [ $status = 0 ] && [ ! -s "$err" ] && [ "$(cat "$out")" = 3000 ]
    report $? "a reader that pauses ends nothing: status $status, $(cat "$out") lines"
fi
if wanted "a TMPDIR" && private_mounts "a TMPDIR that cannot be used"; then
    mkdir "$work/tmp"
    none="4 ranks need mpirun: it keeps a folder for each run in $work/tmp.*, and none can be made there"
    for case in "ro,Read-only file system" "nr_inodes=10,No space left on device"; do
        run unshare -m --propagation private bash -c \
            "mount -t tmpfs -o ${case%,*} tmpfs $work/tmp && TMPDIR=$work/tmp $comm --scenario status"
        one_line $? -E "$none: ${case#*,} \(TMPDIR names another place\)"
        report $? "a TMPDIR that cannot be used, ${case%,*}: $(cat "$err")"
    done
    TMPDIR=$work/tmp/no/such run "$comm" --scenario status
    one_line $? -E "$none: No such file or directory"
    report $? "a TMPDIR that is not there: $(cat "$err")"
    TMPDIR=$work/tmp/new run "$comm" --scenario header
    [ $? = 0 ] && [ ! -s "$err" ]
    report $? "a TMPDIR that Open MPI makes: $(cat "$err")"
fi
# mpirun would hang. Up to the hard limit the launcher asks for more.
if about cpu "open files"; then
    run bash -c 'ulimit -Sn 40 && exec "$@"' - "$comm" --scenario header
    [ $? = 0 ] && [ ! -s "$err" ]
    report $? "open files: a soft limit is raised"
    wanted "open files" && run bash -c 'ulimit -n 40 && exec "$@"' - "$comm" --scenario header
    one_line $? -F '4 ranks need mpirun: it opens up to 80 files, and 40 are allowed (ulimit -n)'
    report $? "open files: a hard limit is told: $(cat "$err")"
fi
if about cpu "address space"; then
    OMP_NUM_THREADS=1 run bash -c 'ulimit -v 400000 && exec "$@"' - "$comm" --scenario header
    one_line $? -F '4 ranks need mpirun: each rank takes 768 MB of address space, and 390 are allowed (ulimit -v)'
    report $? "address space for ranks: $(cat "$err")"
fi
# As srun without PMIx and another MPI's mpirun start them: each would be a run of its own, and pass.
lonely() {  # lonely NAME WORDS SETTINGS…
    wanted "$1" || return
    run env "${@:3}" "$comm" --scenario header
    one_line $? -F "test_comm: 4 processes were started that do not find each other; $2"
    report $? "$1: $(cat "$err")"
}
lonely "tasks of srun" 'try srun --mpi=pmix' SLURM_STEP_NUM_TASKS=4
lonely "ranks of MPICH" "is that mpirun Open MPI's?" PMI_RANK=1 PMI_SIZE=4
if wanted "a folder that is gone"; then
    run bash -c 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"' "$work/nowhere" "$PWD/$comm" --scenario header
    one_line $? -F '4 ranks need mpirun: the folder in which it would start is gone'
    report $? "a folder that is gone: $(cat "$err")"
fi
if wanted "an environment without a PATH" && [ -e /usr/bin/mpirun ]; then
    run env -u PATH "$comm" 'a_ring*'
    report $? "an environment without a PATH"
fi
only_whole

PATH=/nonexistent "$comm" >"$out" 2>"$err"
[ $? = 2 ] && [ "$(wc -l <"$err")" = 1 ] && grep -q '4 ranks need mpirun.*openmpi-bin' "$err"
report $? "without mpirun: $(cat "$err")"
mkdir "$work/bin" && printf '#!/bin/sh\nexit 1\n' >"$work/bin/mpirun" && chmod +x "$work/bin/mpirun"
PATH=$work/bin:$PATH run "$comm"
one_line $? -F 'mpirun has ended with status 1, and no rank has said why (OMPI_MCA_orte_execute_quiet=0 shows'
report $? "an mpirun that fails by itself has no verdict: $(cat "$err")"
printf '#!/bin/sh\nkill -ABRT $$\n' >"$work/bin/mpirun"
PATH=$work/bin:$PATH run "$comm"
[ $? = 134 ] &&
    [ "$(cat "$err")" = 'test_comm: mpirun was ended by signal 6 (Aborted), and the ranks with it' ]
report $? "an mpirun that a signal ends is no rank: $(cat "$err")"
# mpirun's own message, between lines of dashes, is shown unless a rank has said something (SIGUSR1).
frame=$(printf -- '-%.0s' $(seq 74))
printf '%s\n' '#!/bin/sh' "printf '%s\\n' $frame said $frame --- >&2" '$SPEAK; exit 4' >"$work/bin/mpirun"
PATH=$work/bin:$PATH run "$comm"
[ $? = 2 ] && [ "$(tr '\n' '|' <"$err")" = \
    '---|said|test_comm: mpirun has ended with status 4, and no rank has said why|' ]
report $? "what mpirun says is told where nobody else says why"
SPEAK='kill -USR1 $PPID' && sed -i "s/\$SPEAK/$SPEAK/" "$work/bin/mpirun"
PATH=$work/bin:$PATH run "$comm"
[ $? = 4 ] && [ "$(cat "$err")" = --- ]
report $? "what mpirun says is left out where a rank has said why"
warning='[warn] Epoll MOD(4) on fd 21 failed. Old events were 6: Bad file descriptor'
printf '%s\n' '#!/bin/sh' "printf '%s\\n' '$warning' '[warn] of a rank' '$warning' >&2; exit 1" \
    >"$work/bin/mpirun"
PATH=$work/bin:$PATH run "$comm"
[ $? = 2 ] && [[ $(tr '\n' '|' <"$err") == \
    '[warn] of a rank|test_comm: mpirun has ended with status 1, and no rank has said why ('*'says)|' ]]
report $? "what mpirun's event library warns of is left out: $(head -n 1 "$err")"
# PMIx, too, may tell what a user cannot change. A rank's last line may have no end.
pmix='[vm:02397] PMIX ERROR: PMIX_ERR_UNREACH in file ptl_base_connection_hdlr.c at line 120'
printf '%s\n' '#!/bin/sh' "printf '%s\n' '$pmix' said >&2; printf '[no end' >&2; $SPEAK; exit 4" >"$work/bin/mpirun"
PATH=$work/bin:$PATH run "$comm"
[ $? = 4 ] && [ "$(cat "$err")" = 'said
[no end' ]
report $? "what PMIx says is left out where a rank has said why: $(head -n 1 "$err")"
sed -i 's/kill -USR1 $PPID; //' "$work/bin/mpirun"
PATH=$work/bin:$PATH run "$comm"
[ $? = 2 ] && grep -qF "$pmix" "$err" && grep -q 'mpirun has ended with status 4, and no rank' "$err"
report $? "what PMIx says is told where nobody else says why"
# A rank's messages go through mpirun, and are lost if it is killed just then.
printf '%s\n' '#!/bin/sh' '$SAYS kill -USR1 $PPID; kill -KILL $$' >"$work/bin/mpirun"
PATH=$work/bin:$PATH run "$comm"
[ $? = 137 ] &&
    [ "$(cat "$err")" = 'test_comm: mpirun was ended by signal 9 (Killed), and the ranks with it' ]
report $? "a killed mpirun, with what a rank has said: $(cat "$err")"
sed -i 's/$SAYS/echo said >\&2;/' "$work/bin/mpirun"
PATH=$work/bin:$PATH run "$comm"
[ $? = 137 ] && [ "$(cat "$err")" = said ]
report $? "a killed mpirun, after what a rank has said: $(cat "$err")"
PATH=/nonexistent "$comm" --ranks 1 'a_ring*' >"$out" 2>"$err"
report $? "one rank needs no mpirun"
run "$comm" --ranks 2.5
[ $? = 2 ] && grep -q -- '--ranks 2.5 is not a whole number' "$err"
report $? "refuses --ranks 2.5"
by_mpirun -n 2 "$comm" --ranks 3
[ $? = 2 ] && grep -q -- '--ranks 3, but mpirun has started 2' "$err"
report $? "refuses --ranks that mpirun contradicts"

cp "$comm" "$work/test_comm" && echo >>"$work/test_comm"
each='[ "$OMPI_COMM_WORLD_RANK" = 0 ] || shift $(($# / 2)); exec $1'  # rank 0 the first, rank 1 the second
by_mpirun -n 2 sh -c "$each" sh "$comm" "$work/test_comm"
[ $? = 2 ] && [ "$(wc -l <"$err")" = 1 ] && grep -q \
    'rank 1 on .* runs another build of this program than rank 0' "$err"
report $? "refuses ranks of another build"
by_mpirun -n 2 sh -c "$each" sh "$comm x" "$comm y"
[ $? = 2 ] && grep -q 'rank 1 was started with other arguments than rank 0' "$err"
report $? "refuses ranks with other arguments"

# Ranks do not outlive a launcher that is killed.
"$comm" --scenario late >"$out" 2>"$err" &
launcher=$!
ranks=$(ranks_of $launcher 4)
sleep 0.5
kill -9 $launcher
wait $launcher 2>/dev/null
for i in $(seq 50); do
    alive=0
    for pid in $ranks; do kill -0 $pid 2>/dev/null && alive=1; done
    [ $alive = 0 ] && break
    sleep 0.1
done
[ "$(echo "$ranks" | wc -w)" = 4 ] && [ $alive = 0 ]
report $? "ranks end with their launcher"

# A rank that is told to end says so, and is not reported as dead.
"$comm" --scenario late >"$out" 2>"$err" &
launcher=$!
ranks=$(ranks_of $launcher 4)
know_each_other $ranks
kill -TERM $(awk '{ print $NF }' <<<"$ranks")
wait $launcher
[ $? != 0 ] && [ "$(wc -l <"$err")" = 1 ] && grep -q 'rank [0-3] was ended by SIGTERM; all ranks end' "$err"
report $? "a rank that gets SIGTERM says so: $(cat "$err")"

"$comm" --scenario late --timeout 60 >"$out" 2>"$err" &
launcher=$!
kill -9 $(awk '{ print $3 }' <<<"$(ranks_of $launcher 4)")
wait $launcher
status=$?
sentence='rank 2 has died; all ranks end|a rank was ended by signal 9 \(Killed\), and the others with it'
sentence+='|a rank died while they started, and mpirun waited in vain for its end'
[ $status != 0 ] && [ $status != 1 ] && [ "$(wc -l <"$err")" = 1 ] &&
    grep -qE "$sentence" "$err"
report $? "a rank killed while they start: $(cat "$err")"

"$comm" --scenario late --timeout 1 >"$out" 2>"$err" &
launcher=$!
kill -STOP $(awk '{ print $3 }' <<<"$(ranks_of $launcher 4)")
wait $launcher
status=$?
not_met='the ranks have not met in 21 s \(--timeout, and 20 s to start\): one is stopped'
[ $status = 2 ] && grep -qE "rank [013]: ($not_met|waits in)" "$err"
report $? "a rank stopped while they start: $(head -n 1 "$err")"

if private_mounts "a full /dev/shm"; then
    if about mpi "an mpirun that is killed leaves nothing in /dev/shm"; then
        run unshare -m --propagation private bash -c "mount -t tmpfs tmpfs /dev/shm; . tests/programs/tap.sh
            $comm --scenario late --timeout 60 & launcher=\$!
            for i in \$(seq 300); do
                files=\$(find /dev/shm -type f | wc -l); [ \$files = 4 ] && break; sleep 0.1
            done
            echo \$files
            kill -9 \$(cat /proc/\$launcher/task/*/children); wait \$launcher; ls -A /dev/shm | wc -l"
        [ "$(tr '\n' ' ' <"$out")" = '4 0 ' ]
        report $? "an mpirun that is killed leaves nothing in /dev/shm"
    fi
    for size in 8M 20M; do
        [ $size = 8M ] || about mpi "a /dev/shm of $size" || continue
        run unshare -m --propagation private bash -c \
            "mount -t tmpfs -o size=$size tmpfs /dev/shm && exec $comm --scenario status"
        [ $? = 2 ] && [ "$(wc -l <"$err")" = 1 ] &&
            grep -q '/dev/shm has .* left, and what the 4 ranks .* share there takes .*: mount it larger' \
                "$err"
        report $? "a /dev/shm of $size: $(cat "$err")"
    done
fi

timeout 30 "$comm" --scenario late 2>"$err" | true
[ ${PIPESTATUS[0]} = 141 ] && [ ! -s "$err" ]
report $? "ranks whose output nobody reads end at once and quietly"

finish
