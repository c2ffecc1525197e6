#!/bin/bash
# suite.t: what tests/run shows of TAP programs that fail, and how it counts them. TAP.
# needs: build/corpus.txt
. "$(dirname "$0")/tap.sh"
log=$work/log failures=$work/failures passed=0 failed=0
eval "$(sed -n '/^prove_all() {/,/^}/p' tests/run)"

tap() { printf '%s\n' '#!/bin/sh' "printf '%s\\n' $1" "exit $2" >"$work/$3.t"; chmod +x "$work/$3.t"; }
tap "'ok 1 - one' '# ok - tests' 1..1" 0 green
tap "'ok 1 - one' 'not ok 2 - two' '# as it has no leg' 1..2" 1 red
tap "'ok 1 - one' 1..3" 0 short

prove_all "$work"/{green,red,short}.t >"$out" 2>"$err"
shown=$(grep -nE '^not ok 2 - two$|^# as it has no leg$' "$out" | cut -d : -f 2 | tr '\n' '|')
[ "$shown" = 'not ok 2 - two|# as it has no leg|' ] && ! grep -q '# ok - tests' "$out"
said=$?
counts="$passed passed, $failed failed" listed=$(tr '\n' '|' <"$failures")
failed=0  # tap.sh's own
report $said "the log says why a test is red"
[ "$counts" = '3 passed, 2 failed' ] &&
    [[ $listed == 'not ok 2 - two|'*red.t*'(Wstat: '*short.t*'(Wstat: '* ]]
report $? "a program that ran fewer tests than it planned is one more failure: $counts"
finish
