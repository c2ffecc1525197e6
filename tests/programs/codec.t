#!/bin/bash
# codec.t: what is sent in 8 bits, on 1 to 4 ranks. TAP.
# needs: build/tests/test_codec
cd "$(dirname "$0")/../.." || exit 2
unset OPENBLAS_CORETYPE
export OMP_NUM_THREADS=1
out=$(mktemp)
trap 'rm -f "$out"' EXIT
count=0 failed=0

for ranks in 1 2 3 4; do
    timeout -k 5 120 "${BUILD:-build}/tests/test_codec" --ranks $ranks >"$out" 2>&1
    status=$?
    count=$((count + 1))
    if [ $status = 0 ] && [ "$(grep -c '^ok' "$out")" = "$(sed -n 's/^1\.\.//p' "$out")" ]; then
        echo "ok $count - every test of test_codec on $ranks ranks"
    else
        echo "not ok $count - every test of test_codec on $ranks ranks"
        failed=1
        grep -v '^ok' "$out" | head -n 12 | sed 's/^/#   /'
    fi
done
echo "1..$count"
exit $failed
