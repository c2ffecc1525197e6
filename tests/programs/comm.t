#!/bin/bash
# comm.t: communication on 1 to 8 ranks. TAP.
# needs: build/tests/test_comm
. "$(dirname "$0")/tap.sh"
comm=$build/tests/test_comm

for ranks in 1 2 3 4 6 8; do
    all_tests "$comm" --ranks $ranks --timeout 60
    report $? "every test of test_comm on $ranks ranks"
done
run mpirun --oversubscribe --allow-run-as-root -n 3 "$comm" 'a_ring*' &&
    grep -q '^ok 1 .* on 3 ranks' "$out"
report $? "takes the ranks that mpirun gives"

run "$comm" --scenario header --ranks 8 && grep -qx '8 ranks on .*' "$out" &&
    grep -qxF '  dp 2: {0 2} {1 3} {4 6} {5 7}' "$out" &&
    grep -qxF '  tp 2: {0 1} {2 3} {4 5} {6 7}' "$out"
report $? "the header shows each group's members"

run "$comm" --scenario clock --ranks 8 && cp "$out" "$work/real" &&
    run "$comm" --scenario clock --ranks 8 --dry-run &&
    grep -q 'model clock' "$work/real" && cmp -s "$work/real" "$out"
report $? "a dry run takes the same model time and counts the same bytes"

finish
