#!/bin/bash
# params.t: the parameter table in the layouts of 1 to 8 ranks. TAP.
# needs: build/tests/test_params
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
params=$build/tests/test_params

for ranks in 1 2 3 6 8; do
    all_tests "$params" --ranks $ranks
    report $? "every test of test_params on $ranks ranks"
done
finish
