#!/bin/bash
# comm.t: communication on 1 to 8 ranks. TAP.
# needs: build/tests/test_comm build/tests/test_comm_requests build/tests/test_comm_clock
. "$(dirname "$0")/tap.sh"
comm=$build/tests/test_comm

# On 4 ranks they already run as unit tests.
for program in test_comm test_comm_requests test_comm_clock; do
    for ranks in 1 2 3 6 8; do
        all_tests $build/tests/$program --ranks $ranks --timeout 60
        report $? "every test of $program on $ranks ranks"
    done
done
for program in test_comm test_comm_requests; do
    for ranks in 2 3 8; do
        all_tests $build/tests/$program --ranks $ranks --timeout 60 --trust-calls
        report $? "every test of $program with trusted calls on $ranks ranks"
    done
done
by_mpirun -n 3 "$comm" 'a_ring*' &&
    grep -q '^ok 1 .* on 3 ranks' "$out"
report $? "takes the ranks that mpirun gives"

run "$comm" --scenario header --ranks 8 && grep -qx '8 ranks on .*' "$out" &&
    grep -qxF '  dp 2: {0 2} {1 3} {4 6} {5 7}' "$out" &&
    grep -qxF '  tp 2: {0 1} {2 3} {4 5} {6 7}' "$out"
report $? "the header shows each group's members"

run "${comm}_clock" --scenario clock --ranks 8 && cp "$out" "$work/real" &&
    run "${comm}_clock" --scenario clock --ranks 8 --dry-run &&
    grep -q 'model clock' "$work/real" && cmp -s "$work/real" "$out"
report $? "a dry run takes the same model time and counts the same bytes"

finish
