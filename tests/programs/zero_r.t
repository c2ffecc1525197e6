#!/bin/bash
# zero_r.t: ZeRO-R on 1 to 8 ranks, in every dtype, with buffers of every size. TAP.
# needs: build/02_zero/zero_r
cd "$(dirname "$0")/../.." || exit 2
unset OPENBLAS_CORETYPE
export OMP_NUM_THREADS=1
zero_r=${BUILD:-build}/02_zero/zero_r
out=$(mktemp)
trap 'rm -f "$out"' EXIT
count=0 failed=0
small="--layers 2 --steps 2 --vocab 600"

report() {  # report STATUS NAME
    count=$((count + 1))
    if [ "$1" = 0 ]; then echo "ok $count - $2"; else
        echo "not ok $count - $2"
        failed=1
        tail -n 12 "$out" | sed 's/^/#   /'
        [ -z "$MUTANT" ] || exit 1  # one red is all that a mutant needs
    fi
}
passes() {  # passes NAME FLAGS…
    local name=$1
    shift
    timeout -k 5 60 "$zero_r" "$@" >"$out" 2>&1 && grep -q '^PASS zero_r: .*11 counts as predicted' "$out"
    report $? "$name"
}

passes "as it stands"
awk '/most held/ { seen = 1 } seen && $NF ~ /%$/ { hole[++n] = $NF + 0 } END { exit !(n == 3 && hole[1] > 20 && hole[3] < 1) }' "$out"
report $? "and a fifth of the heap, or more, is in holes where checkpoints stand anywhere"
for ranks in 1 2 3 6; do passes "$ranks ranks" $small --ranks $ranks; done
for dtype in f32 bf16 f16; do passes "in $dtype, tied, AdamW" $small --ranks 2 --dtype $dtype --tied --optimizer adamw --lr 0.001; done
passes "a buffer of a single element" --ranks 2 --layers 1 --hidden 8 --heads 2 --kv-heads 1 --ffn 5 --vocab 300 --seq 5 --steps 1 \
    --buffer-bytes 15
passes "a buffer larger than all gradients" $small --ranks 2 --buffer-bytes 1000000000
passes "fewer elements than ranks" --ranks 8 --layers 1 --hidden 6 --heads 3 --kv-heads 1 --ffn 5 --vocab 300 --seq 1 \
    --micro-batch 1 --steps 1
timeout 20 "$zero_r" --ranks 2 --dtype f64 --buffer-bytes 7 >"$out" 2>&1
[ $? = 2 ] && grep -q -- '--buffer-bytes 7 is out of bounds' "$out"
report $? "a buffer without room is refused"
echo "1..$count"
exit $failed
