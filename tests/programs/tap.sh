# tap.sh: what the shell tests share. A test reads it first,
#
#     . "$(dirname "$0")/tap.sh"
#
# and is then in the root of the tree, with the programs in $build, a folder of its own in $work, and without
# those of the caller's settings that would change what it tests. It ends with `finish`. Its argument is a
# pattern: only tests whose names match run, so a test that looks at what the previous one printed needs a
# pattern that matches both.
#
# A line "# needs: ..." in a test names the variables and targets of make that it takes, where these are not
# all programs. With MUTANT set (tests/mutants/run) that has been built, and the first red is enough. The
# names that patterns choose from are added to the file TEST_NAMES, if one is named.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
unset OPENBLAS_CORETYPE MAKEFLAGS MAKELEVEL
export OMP_WAIT_POLICY=passive LC_ALL=C  # one order of names, one form of numbers and of warnings
export ULTRASCALE_DATA=$PWD/tests/fixtures/shakespeare.txt  # not the sources, which change
build=${BUILD:-build}
work=$(mktemp -d) || exit 2  # it says why; without a folder, what removes "$work"/* would be at the root
trap 'rm -rf "$work"' EXIT
out=$work/out err=$work/err
: >"$out" >"$err"
limit=120   # seconds, after which a program hangs on an idle machine
cores=$(nproc)
verdict=''  # what follows "PASS program: " in the line of a test that passes
only=${1:-*} chosen='' count=0 failed=0 status='' spent=0

# Runs a command where control groups, of either version, leave it the time of one core.
time_of_a_core=(unshare -m --propagation private bash -c '
    mount -t tmpfs tmpfs /sys/fs/cgroup && mkdir /sys/fs/cgroup/cpu && cd /sys/fs/cgroup &&
        echo 50000 50000 >cpu.max && echo 50000 | tee cpu/cpu.cfs_quota_us >cpu/cpu.cfs_period_us &&
        cd "$OLDPWD" && exec "$@"' -)

# private_mounts WHAT: whether a test may mount something that only it sees. Where it may not, as an ordinary
# user or in many containers, it says that this is not checked.
private_mounts() {
    unshare -m --propagation private true 2>/dev/null && return
    echo "# not checked: $1: no private mounts here"
    false
}

# wanted NAME: whether the pattern chooses this test; the next report is this test's, whatever its name.
wanted() {
    [ -z "$TEST_NAMES" ] || echo "${0##*/}:${1//$'\n'/ }" >>"$TEST_NAMES"
    [[ $1 == $only ]] && chosen=yes
}

# about cpu|mpi NAME: like wanted, for a test of the CPU as the device, or of MPI as what carries the bytes;
# where something else does, it is left out by name. So are tests with few addresses on a GPU: CUDA takes
# terabytes of them.
about() {
    wanted "$2" || return
    case $1 in
        cpu) [[ $build != *cuda* && $build != *nccl* ]] || report 0 "$2 # SKIP the device is not the CPU" ;;
        mpi) [[ $build != *nccl* && $build/ != *build-cuda/* ]] || report 0 "$2 # SKIP NCCL moves the bytes" ;;
    esac
    [ -n "$chosen" ]  # still to be reported
}

# cost: the CPU time of this test since the last one ended, with all that it has waited for.
cost() {
    local stat now
    read -r stat </proc/$$/stat
    read -ra stat <<<"${stat##*) }"
    now=$((stat[11] + stat[12] + stat[13] + stat[14]))  # user, system, and theirs of children, in 10 ms
    printf '# %6d ms  %s\n' $((10 * (now - spent))) "$1"
    spent=$now
}

# report STATUS NAME: one test, which passes if the status is 0.
report() {
    [ -n "$chosen" ] || wanted "$2" || return 0
    chosen=''
    count=$((count + 1))
    [ -z "$COST" ] || cost "$2"
    if [ "$1" = 0 ]; then
        echo "ok $count - $2"
        return
    fi
    echo "not ok $count - $2"
    failed=1
    { echo "exit status of the last run: $status"; grep -h FAIL "$out"; tail -q -n 12 "$work"/out* "$err"; \
        } 2>/dev/null | sed 's/^/#   /'
    [ -z "$MUTANT" ] || exit 1
}

# only_whole: what follows is run only if no pattern chooses.
only_whole() {
    [ "$only" = '*' ] || finish
    TEST_NAMES=''
}

finish() {
    echo "1..$count"
    [ $failed = 0 ] && [ $count -gt 0 ]
    exit
}

# run COMMAND…: puts its output into $out, its errors into $err, and its exit status also into $status. Where
# several processes share each core, it may take as many times as long.
run() {
    local load
    read -r load _ </proc/loadavg
    load=$((${load%.*} / cores))
    # Without /dev/null mpirun would read a loop's input.
    timeout -k 5 $((load > 1 ? load * limit : limit)) "$@" >"$out" 2>"$err" </dev/null
    status=$?
    return $status
}

# on_terminal COMMAND: the same on a terminal of 100 columns.
on_terminal() { (unset NO_COLOR; TERM=xterm script -qec "stty cols 100; $*" /dev/null </dev/null) >"$out" \
    2>"$err"; }

# by_mpirun ARGUMENTS…: the same under mpirun, started by hand. mpirun's own messages, between lines of
# dashes, are left out of $err. As under the launcher, its late answer fails no run (launch.c).
by_mpirun() {
    OMPI_MCA_orte_execute_quiet=1 OMPI_MCA_orte_allowed_exit_without_sync=1 \
        PRTE_MCA_prte_allowed_exit_without_sync=1 TMPDIR=$work \
        run mpirun --oversubscribe --allow-run-as-root "$@"
    tr -d '\0' <"$err" | sed '/^-\{74\}$/,/^-\{74\}$/d' >"$work/theirs"
    mv "$work/theirs" "$err"
    return $status
}

# passes NAME PROGRAM FLAGS…: exit status 0 and a PASS verdict.
passes() {
    local name=$1 program=$2
    shift 2
    wanted "$name" || return 0
    run "$build/$program" "$@" && grep -q "^PASS ${program##*/}: $verdict" "$out"
    report $? "$name"
}

# prints NAME LINE…: the output of the last run has each LINE, up to white space; one that ends with "…" is
# the beginning of a line.
prints() {
    local name=$1 line text missing=''
    shift
    wanted "$name" || return 0
    text=$'\n'$(sed 's/  */ /g; s/^ //; s/ $//' "$out")$'\n'
    for line in "$@"; do
        case $line in
            *…) [[ $text == *$'\n'"${line%…}"* ]] ;;
            *) [[ $text == *$'\n'"$line"$'\n'* ]] ;;
        esac || missing="$missing '$line'"
    done
    [ -z "$missing" ]
    report $? "$name${missing:+: not$missing}"
}

# one_line STATUS -F|-E WORDS: the last run ended with status 2, and one line on stderr that has the words, or
# matches the pattern. A thousand runs end like this, so bash checks it itself: each wc and grep takes 2 ms.
one_line() {
    local lines
    mapfile lines <"$err"
    [ "$1" = 2 ] && [ ${#lines[@]} = 1 ] && [[ $lines == *$'\n' ]] || return
    case $2 in
        -F) [[ $lines == *"$3"* ]] ;;
        -E) [[ ${lines%$'\n'} =~ $3 ]] ;;
        *) false ;;
    esac && { [ ! -s "$out" ] || ! grep -q '^PASS' "$out"; }
}

# refused WORDS PROGRAM FLAGS…: status 2, and one line on stderr with the words.
refused() {
    local words=$1 program=$2
    shift 2
    wanted "$program $* is refused: $words" || return 0
    run "$build/$program" "$@"
    one_line $? -F "$words"
    report $? "$program $* is refused: $words"
}

# refuses NAME PATTERN PROGRAM FLAGS…: the same with a line that matches.
refuses() {
    local name=$1 pattern=$2 program=$3
    shift 3
    wanted "$name" || return 0
    run "$build/$program" "$@"
    one_line $? -E "$pattern"
    report $? "$name"
}

# ranks_of LAUNCHER COUNT: the process numbers of so many ranks that a program's mpirun has started, as soon
# as they exist.
ranks_of() {
    local mpirun ranks i
    for i in $(seq 600); do
        mpirun=$(cat /proc/$1/task/*/children 2>/dev/null)
        ranks=$([ -z "$mpirun" ] || cat /proc/${mpirun% }/task/*/children 2>/dev/null)
        [ "$(wc -w <<<"$ranks")" = "$2" ] && break
        sleep 0.05
    done
    echo "$ranks"
}

# all_tests COMMAND…: every test of a TAP program passes, and it has some.
all_tests() {
    run "$@"
    sed -n 's/^not ok/# not ok/p' "$out"
    [ $status = 0 ] && [ "$(grep -c '^ok' "$out")" -gt 0 ] &&
        [ "$(grep -c '^ok' "$out")" = "$(sed -n 's/^1\.\.//p' "$out")" ]
}

# is_json FILE…: each is strict JSON, without NaN and Infinity.
is_json() {
    python3 -c 'import json, sys
def refuse(word): raise ValueError(word)
for name in sys.argv[1:]: json.load(open(name), parse_constant=refuse)' "$@" 2>>"$err"
}

# For tests of CUDA on the CPU.
needs_fibers() {
    echo '#include <boost/context/detail/fcontext.hpp>' | g++ -fsyntax-only -x c++ - 2>/dev/null && return
    echo "1..0 # SKIP g++ or libboost-context-dev is not installed"
    exit 0
}
builds() {  # builds VARIABLES-AND-TARGETS…
    [ -n "${MUTANT+set}" ] || make -s -j"$(nproc)" "$@" >"$out" 2>"$err" || { report 1 "builds"; finish; }
}
