#!/bin/bash
# params.t: the parameter table in the layouts of 1 to 8 ranks. TAP.
# needs: build/tests/test_params build/tests/test_params_sums
cd "$(dirname "$0")/../.." || exit 2
unset OPENBLAS_CORETYPE
export OMP_NUM_THREADS=1
out=$(mktemp)
trap 'rm -f "$out"' EXIT
count=0 failed=0

for ranks in 1 2 3 6 8; do
    for test in test_params test_params_sums; do
        timeout -k 5 60 "${BUILD:-build}/tests/$test" --ranks $ranks >"$out" 2>&1
        status=$?
        count=$((count + 1))
        if [ $status = 0 ] && [ "$(grep -c '^ok' "$out")" = "$(sed -n 's/^1\.\.//p' "$out")" ]; then
            echo "ok $count - every test of $test on $ranks ranks"
        else
            echo "not ok $count - every test of $test on $ranks ranks"
            failed=1
            grep -v '^ok' "$out" | head -n 12 | sed 's/^/#   /'
        fi
    done
done
echo "1..$count"
exit $failed
