#!/bin/bash
# comm.t: communication on 1 to 8 ranks. TAP.
# needs: build/tests/test_comm
cd "$(dirname "$0")/../.." || exit 2
unset OPENBLAS_CORETYPE
build=${BUILD:-build}
comm=$build/tests/test_comm
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
count=0 failed=0

report() {  # report STATUS NAME
    count=$((count + 1))
    if [ "$1" = 0 ]; then echo "ok $count - $2"; else echo "not ok $count - $2"; failed=1; tail -n 12 "$work/out" "$work/err" | sed 's/^/# /'; fi
}

for ranks in 1 2 3 4 6 8; do
    timeout 120 "$comm" --ranks $ranks --timeout 60 >"$work/out" 2>"$work/err"
    status=$?
    sed -n 's/^not ok/# not ok/p' "$work/out"
    [ $status = 0 ] && [ "$(grep -c '^ok' "$work/out")" = "$(sed -n 's/^1\.\.//p' "$work/out")" ]
    report $? "every test of test_comm on $ranks ranks"
done
timeout 60 mpirun --oversubscribe --allow-run-as-root -n 3 "$comm" 'a_ring*' >"$work/out" 2>"$work/err" &&
    grep -q '^ok 1 .* on 3 ranks' "$work/out"
report $? "takes the ranks that mpirun gives"

timeout 10 "$comm" --scenario header --ranks 8 >"$work/out" 2>"$work/err"
[ $? = 0 ] && grep -qx '8 ranks on .*' "$work/out" && grep -qxF '  dp 2: {0 2} {1 3} {4 6} {5 7}' "$work/out" &&
    grep -qxF '  tp 2: {0 1} {2 3} {4 5} {6 7}' "$work/out"
report $? "the header shows each group's members"

timeout 30 "$comm" --scenario clock --ranks 8 >"$work/real" 2>"$work/err" &&
    timeout 30 "$comm" --scenario clock --ranks 8 --dry-run >"$work/out" 2>>"$work/err" &&
    grep -q 'model clock' "$work/real" && cmp -s "$work/real" "$work/out"
report $? "a dry run takes the same model time and counts the same bytes"

echo "1..$count"
[ $failed = 0 ]
