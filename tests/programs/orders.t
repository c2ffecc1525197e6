#!/bin/bash
# orders.t: every plug under random legal orders of F, B and W, on 1 and 3 ranks; 4 ranks, the default, are a
# unit test. TAP.
# needs: build/tests/test_orders
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1

for ranks in 1 3; do
    wanted "every test of test_orders on $ranks ranks" || continue
    all_tests "$build/tests/test_orders" --ranks $ranks
    report $? "every test of test_orders on $ranks ranks"
done
finish
