#!/bin/bash
# codec.t: what is sent in 8 bits, on 1 to 4 ranks. TAP.
# needs: build/tests/test_codec
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1

for ranks in 1 2 3 4; do
    wanted "every test of test_codec on $ranks ranks" || continue
    all_tests "$build/tests/test_codec" --ranks $ranks
    report $? "every test of test_codec on $ranks ranks"
done
finish
