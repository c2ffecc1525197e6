#!/bin/bash
# matrix.t [PATTERN]: cells of the composition matrix that cover every pair of choices, on 8 or 6 ranks,
# against one device; a run that was interrupted; a cell that fails. TAP.
# needs: build/08_mixed_precision/matrix
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/08_mixed_precision
limit=500  # for many runs together

passes "every pair on 8 ranks" matrix --ranks 8
grep -q ' 5949 of 11520 refused' "$out"
report $? "and no combination more is refused than those that cannot be"
passes "every pair on 6 ranks that does not meet on 8" matrix --ranks 6 --met-on 8
passes "list: every pair on 12 ranks meets in some cell" matrix --ranks 12 --list
grep -q 'are possible, of which would be proven: [1-9]' "$out"
report $? "list: says that it proves none"
passes "parts: one of 250 on 2 ranks" matrix --ranks 2 --part 2/250 --table "$work/table"
if [ -e "$work/table" ]; then
    cp "$work/table" "$work/whole"
    sed -i '$d' "$work/table"
fi
passes "parts: a run that was broken off goes on with its last cell" matrix --ranks 2 --part 2/250 --table \
    "$work/table"
cmp -s <(grep proven "$work/table" 2>/dev/null) <(grep proven "$work/whole" 2>/dev/null)
report $? "parts: which is proven once"
if wanted "parts: a cell that ended the program twice has failed"; then
    number=$(sed -n 's/ proven .*//p' "$work/whole" | head -n 1)
    printf '%s begun\n%s begun\n' "$number" "$number" >"$work/dead"
    run "$build/matrix" --ranks 2 --part 2/250 --table "$work/dead"
    [ $status = 1 ] && grep -q "^$number failed .*it ends the program" "$work/dead" && grep -q \
        '^FAIL matrix: 1 cells fail' "$out"
    report $? "parts: a cell that ended the program twice has failed"
fi
echo '0 proven --dp 77' >"$work/other"
refused "--table $work/other has results of other cells: 0 is " matrix --ranks 2 --part 2/250 \
    --table "$work/other"
if wanted "parts: a row that was cut off" && [ -e "$work/whole" ]; then
    number=$(sed -n 's/ proven .*//p' "$work/whole" | head -n 1)
    { cat "$work/whole"; printf '%s fail' "$number"; } >"$work/cut"
    run "$build/matrix" --ranks 2 --part 2/250 --table "$work/cut" && [ "$(sed -n '$p' "$work/cut")" = \
        "$number fail" ] && ! grep -q ' failed ' "$work/cut"
    report $? "parts: a row that was cut off says nothing of its cell"
fi
# on_full_disk BYTES COMMAND…: with so many bytes left for $work/full/table, whose last row it then shows.
on_full_disk() { run unshare -m --propagation private bash -c '
    table=$1/table && mount -t tmpfs -o size=8k tmpfs "$1" && yes "" | head -c $((8192 - $2)) >"$table" &&
        shift 2 && "$@"; status=$?; tail -n 1 "$table" | cat -A; exit $status' - "$work/full" "$@"; }
if wanted "a full disk" && private_mounts "a full disk"; then
    mkdir "$work/full"
    for left in 5 20; do  # the first row of a cell, or its second, does not fit
        on_full_disk $left "$build/matrix" --ranks 2 --part 2/250 --table "$work/full/table"
        one_line $status -F "--table $work/full/table could not be written: No space left on device" &&
            [ "$(tail -n 1 "$out")" = '$' ]
        report $? "a full disk, $left bytes left: one sentence, and no row of a cell without its result"
    done
    mkdir "$work/build" && ln -s "$PWD/$build" "$work/build/" && ln -s "$work/full" "$work/build/matrix"
    BUILD=$work/build on_full_disk 0 tests/matrix 1/5000
    [ $status = 2 ] && [ -s "$err" ] && ! grep -qv '/matrix/.*: No space left on device' "$err" &&
        ! grep -q 'proven .*failed' "$out"
    report $? "a full disk: tests/matrix ends with a sentence for each file, and without its table"
fi
refused "no combination of dp, pp, cp and tp of 1 to 4 takes 5 ranks" matrix --ranks 5
refused "--part 0/3: which of how many" matrix --ranks 2 --part 0/3
refused "--part 1/3x: which of how many" matrix --ranks 2 --part 1/3x
refused "--cell says which cells, and nothing reads --part then" matrix --cell 3 --part 1/3
refused "--part says which cells, and nothing reads --met-on then" matrix --part 1/3 --met-on 8
refused "--table /dev/null is not a regular file" matrix --ranks 2 --cell 1 --table /dev/null
refused "--table /dev/full is not a regular file" matrix --ranks 2 --cell 1 --table /dev/full
refused "--list proves no cell, and --table tells of those that are" matrix --list --table "$work/list"
refused "--machine is not one of matrix's flags" matrix --list --machine h200
refused "--trace is not one of matrix's flags" matrix --list --trace "$work/trace"
refused "--tp 2 with --experts: experts are not sharded over tp" matrix --ranks 2 --cell 320
refused "--cell 3 is of 4 ranks, and there are 3: --ranks 4 would fit" matrix --ranks 3 --cell 3 \
    --table "$work/begun"
[ ! -e "$work/begun" ]
report $? "and --table has no row of it"
refused "--cell 999999999: there are cells 0 to " matrix --ranks 2 --cell 999999999
finish
