#!/bin/bash
# suite.t: what tests/run shows of TAP programs that fail or are left out, and how it counts them; the width of
# lines; which mutants it plants; what tests/recipes takes for a refusal. TAP.
# needs: build/corpus.txt
. "$(dirname "$0")/tap.sh"
log=$work/log failures=$work/failures passed=0 failed=0
eval "$(sed -n '/^prove_all() {/,/^}/p' tests/run)"

tap() { printf '%s\n' '#!/bin/sh' "printf '%s\\n' $1" "exit $2" >"$work/$3.t"; chmod +x "$work/$3.t"; }
tap "'ok 1 - one' '# ok - tests' 1..1" 0 green
tap "'ok 1 - one' 'not ok 2 - two' '# as it has no leg' 1..2" 1 red
tap "'ok 1 - one' 1..3" 0 short
tap "'ok 1 - one' 'ok 2 - two # SKIP no wings' 1..2" 0 part
tap "'1..0 # SKIP no water'" 0 none

prove_all "$work"/{green,red,short,part,none}.t >"$out" 2>"$err"
shown=$(grep -nE '^not ok 2 - two$|^# as it has no leg$' "$out" | cut -d : -f 2 | tr '\n' '|')
[ "$shown" = 'not ok 2 - two|# as it has no leg|' ] && ! grep -q '# ok - tests' "$out"
said=$?
grep -qx 'ok 2 - two # SKIP no wings' "$out" && grep -q 'none.t .* skipped: no water$' "$out"
says_why=$?
counts="$passed passed, $failed failed" listed=$(tr '\n' '|' <"$failures")
failed=0  # tap.sh's own
report $said "the log says why a test is red"
report $says_why "the log says which test is left out, and why"
[ "$counts" = '4 passed, 2 failed' ] &&
    [[ $listed == 'not ok 2 - two|'*red.t*'(Wstat: '*short.t*'(Wstat: '* ]]
report $? "a program that ran fewer tests than it planned is one more failure, and one left out none: $counts"

if wanted "little shared memory" && private_mounts "little shared memory"; then
    mkdir "$work/bin" && ln -s /bin/false "$work/bin/make" && ln -s /bin/false "$work/bin/prove"  # if it begins
    PATH=$work/bin:$PATH run unshare -m --propagation private bash -c \
        'mount -t tmpfs -o size=64m none /dev/shm && tests/run'
    one_line $? -F "make test: /dev/shm has 64 MB left, and tests that run at once need 256 MB there" &&
        [ ! -s "$out" ]
    report $? "little shared memory: the suite says so, and does not begin"
fi

# limited LOAD SECONDS: where the machine says that its load is this, a program of so many seconds runs within
# a limit of one on an idle machine.
limited() {
    echo "$1 0.50 0.50 1/99 9" >"$work/loadavg"
    unshare -m --propagation private bash -c 'mount --bind "$0" /proc/loadavg && source tests/programs/tap.sh
        limit=1 run sleep $1' "$work/loadavg" "$2"
}
if private_mounts "how long a program may take"; then
    limited 0.00 60
    report $(($? != 124)) "a program that hangs is ended"
    limited $((60 * $(nproc))).00 2
    report $? "on a busy machine it may take as many times as long as processes share a core"
fi

# cmocka's own skip() prints "not ok N # SKIP", which prove counts as red, and gives no reason.
! grep -nw 'skip();' tests/unit/* >"$out"
report $? "no unit test calls cmocka's skip()"

# What clang-format cannot break, and comments, which it leaves alone.
LC_ALL=C grep -rnE '^.{111}' --include=*.{c,h,inc,cc,cu} common 0[0-9]_* tests >"$out"
report $(($? != 1)) "no line of the sources is longer than 110 bytes"

# The suite plants the same bugs of a tree each time, and as many others of the next.
mkdir "$work/tree" && cp -a Makefile README.md common 0[0-9]_* tests "$work/tree"
sample() { "$work/tree/tests/mutants/run" --sample --list | cut -d ' ' -f 1; }
first=$(sample) again=$(sample)
echo '// changed' >>"$work/tree/common/base.c"
other=$(sample) both=$(comm -12 <(sort <<<"$first") <(sort <<<"$other") | wc -l)
[ "$first" = "$again" ] && [ "$(wc -l <<<"$first")" = "$(wc -l <<<"$other")" ] && [ "$both" -lt 24 ]
report $? "the sample of the mutants is that of the sources: $both are also the next tree's"

# names_no_test PROGRAM: its bugs then name a test that it has not.
names_no_test() {
    TEST_NAMES=$work/names run "$work/tree/tests/mutants/run" --check
    [ $? = 1 ] && grep -q ": $1 has no test " "$out"
}
sed -i '0,/^test: test_train:/s/^test: test_train:.*/&_no_more/' "$work/tree/tests/mutants/train.txt"
echo 'zero.t:another test' >"$work/names"
names_no_test test_train && ! names_no_test test_ops && names_no_test zero.t && ! names_no_test ddp.t
report $? "a bug whose test is gone, or has another name now, is told"

# ---- nothing is removed that is not the suite's own ----

TMPDIR=$work/none run bash tests/programs/codec.t
[ $? = 2 ] && [ ! -s "$out" ] && grep -q "$work/none" "$err"
report $? "a test without a folder for temporary files does not begin: $(head -n 1 "$err")"

(cd "$work/tree" && mkdir -p 'build/my README.md' build/exercises build-x && touch build-log.txt)
make -C "$work/tree" clean >"$out" 2>"$err" && (cd "$work/tree" && [ "$(ls build)" = exercises ] &&
    [ -e README.md ] && [ -e build-log.txt ] && [ ! -e build-x ])
report $? "make clean keeps exercises, and what is in no folder of a build"
makes() {  # makes WORDS ARGUMENTS…: make refuses them so
    local words=$1
    shift
    wanted "make $*" || return
    run make -n "$@"
    [ $? = 2 ] && grep -qF "$words" "$err" && [ ! -s "$out" ]
    report $? "make $*"
}
makes 'BUILD=: BUILD is a folder without a space in its name; unset, it is build' BUILD= programs
makes 'BUILD=a b: BUILD is a folder without a space' BUILD='a b' programs
make -n programs CHAPTERS='0[0-1]' BUILD=build-x >"$out" 2>"$err" &&
    grep -q "link  build-x/01_data_parallel/ddp_naive" "$out" && ! grep -q "link  build-x/07_kernels" "$out"
report $? "CHAPTERS leaves out later programs, those in CUDA too"
makes 'CFLAGS_EXTRA=-g adds to them' CFLAGS=-g programs

# In a tree of which the path has a space, what its first word names is not the suite's to remove.
mkdir "$work/spaced" "$work/spaced out" && touch "$work/spaced/thesis" && mv "$work/tree" "$work/spaced out/"
run make -C "$work/spaced out/tree" flags
[ $? = 2 ] && grep -q 'has a space or a quote, which flags on one line cannot hold' "$err"
report $? "make flags in a folder whose name has a space"
echo 'programs:' >"$work/spaced out/tree/Makefile"  # nothing is built
run "$work/spaced out/tree/tests/mutants/run" ring_remainder_dropped
[ -d "$work/spaced out/tree/build-mutants/base/common" ] && [ -e "$work/spaced/thesis" ]
report $? "mutants in a folder whose name has a space"

touch "$work/tour"
run common/report/tour.sh "$work"
[ $? = 2 ] && [ ! -s "$out" ] && [ "$(tail -n 1 "$err")" = \
    "make run: what the programs print cannot be kept in $work/tour/" ]
report $? "make run where it may not write"

# ended STATUS WORD LINE…: tests/recipes ends so, and has this word for a program that prints these lines and
# ends with status 2.
mkdir "$work/08_mixed_precision"
ended() {
    local status=$1 word=$2
    shift 2
    printf '%s\n' '#!/bin/sh' "printf '%s\\n' ${*@Q}" 'exit 2' >"$work/08_mixed_precision/fp8"
    chmod +x "$work/08_mixed_precision/fp8"
    BUILD=$work run tests/recipes
    [ $? = $status ] && [ "$(grep -ow 'refused\|FAILED\|ok' "$out" | sort -u)" = $word ]
}
ended 0 refused 'fp8: --tp 2 does not fit'
report $? "tests/recipes: flags that are refused before the run"
ended 1 FAILED 'L=2 h=64' 'fp8: step 2: --data has gone'
report $? "tests/recipes: a run that ends with a sentence has failed"
finish
