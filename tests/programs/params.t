#!/bin/bash
# params.t: the parameter table in the layouts of 1 to 8 ranks. TAP.
# needs: build/tests/test_params build/tests/test_params_sums
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1

for ranks in 1 3 6 8; do
    for test in test_params test_params_sums; do
        all_tests "$build/tests/$test" --ranks $ranks
        report $? "every test of $test on $ranks ranks"
    done
done
finish
