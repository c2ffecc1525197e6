#!/bin/bash
# checkpoint.t: --save, --resume and --init as a user meets them.
. "$(dirname "$0")/tap.sh"
build=$build/00_single_gpu
train=$build/train
shape="--layers 1 --hidden 32 --heads 2 --kv-heads 1 --ffn 48"
run="--seq 16 --micro-batch 2 --grad-acc 2 --sample 0 --eval-every 0 --lr 1e-2"
to20="$run --steps 20" to24="$run --steps 24" to30="$run --steps 30"

# trains ARGUMENTS…: up to a verdict, whichever. Whether a few steps lower the held-out loss depends on the
# corpus, and is tested by train.t.
trains() { run "$train" "$@"; [ $? -le 1 ]; }

same_checkpoint() {  # same_checkpoint A B
    for file in config.json model.safetensors optimizer.safetensors; do
        cmp "$1/$file" "$2/$file" >>"$err" 2>&1 || return 1
    done
}

# held_out before|after JSON
held_out() { grep -A9 '"held-out loss"' "$2" | tr -d '\n\t' | grep -oE "\"$1\":\{\"value\":[^,]*" |
    grep -oE '[0-9.e+-]+$'; }

# ---- resuming ----

for kind in "--dtype f64" "--dtype f32 --tied" "--dtype bf16" "--dtype bf16 --optimizer sgd"; do
    rm -rf "$work/straight" "$work/half" "$work/resumed"
    dtype=${kind/--tied/}  # the folder says whether it is tied
    trains $shape $to20 $kind --save "$work/straight" --save-every 10 &&
        mkdir "$work/half" && cp -r "$work/straight/step-000010" "$work/half/" &&
        trains $to20 $dtype --resume "$work/half" --save "$work/resumed" &&
        same_checkpoint "$work/straight/step-000020" "$work/resumed/step-000020"
    report $? "20 steps straight are 10, a resumption, and 10, bit for bit: $kind"
done

rm -rf "${work:?}"/[a-z]*
trains $shape $to20 --save "$work/ours/deeper" --save-every 8 --json "$work/a.json"
[ $? = 0 ] && [ "$(ls -A "$work/ours/deeper" | tr '\n' ' ')" = "step-000008 step-000016 step-000020 " ] &&
    [ "$(ls -A "$work/ours/deeper/step-000008" | tr '\n' ' ')" = \
        "config.json model.safetensors optimizer.safetensors " ]
report $? "saves every 8 steps and at the end, and leaves nothing else behind"

cp -r "$work/ours/deeper" "$work/newest"
trains $to24 --resume "$work/newest" --save "$work/newest" && [ -d "$work/newest/step-000024" ] &&
    grep -q 'step 21/24' "$out" && ! grep -q 'step 20/24' "$out"
report $? "resumes from the newest checkpoint of a folder"

rm -rf "$work/newest/step-000020" "$work/newest/step-000024"
trains $to20 --resume "$work/newest" --save "$work/newest" --save-every 4 &&
    same_checkpoint "$work/newest/step-000020" "$work/ours/deeper/step-000020" &&
    [ "$(ls -A "$work/newest" | tr '\n' ' ')" = "step-000008 step-000016 step-000020 " ]
report $? "resumes into the folder that it came from"

# Steps are counted from the run's beginning, not from the resumption; what is held out is the same.
evaluated=${run/--eval-every 0/--eval-every 2}
if wanted "a resumed run looks at held-out losses in the steps in which a straight one does"; then
    trains $shape $evaluated --steps 7 --save "$work/looks" --save-every 3 --json "$work/straight.json" &&
        grep '  held-out loss' "$out" | grep -v '^step 2 ' >"$work/straight.txt" &&
        trains $evaluated --steps 7 --resume "$work/looks/step-000003" --json "$work/resumed.json" &&
        grep '  held-out loss' "$out" >"$work/resumed.txt" &&
        [ "$(cut -d' ' -f1,2 "$work/resumed.txt" | tr '\n' ' ')" = "step 4 step 6 " ] &&
        cmp "$work/straight.txt" "$work/resumed.txt" >>"$err" 2>&1 &&
        python3 -c 'import json, sys
straight, resumed = [json.load(open(name))["series"]["held-out loss"] for name in sys.argv[1:]]
assert [x is not None for x in resumed] == [True, False, True, False] and straight[3:] == resumed' \
            "$work/straight.json" "$work/resumed.json" 2>>"$err"
    report $? "a resumed run looks at held-out losses in the steps in which a straight one does"
fi

# ---- continuing with other settings ----

rm -rf "$work/otherwise"
trains ${to24/--micro-batch 2 --grad-acc 2/--grad-acc 1 --micro-batch 4} --resume "$work/ours/deeper" \
    --save "$work/otherwise" &&
    grep -qx 'continues differently from the run that was saved: --steps 24, not 20' "$out"
report $? "another split of the same samples goes on, and a longer course of the rate is told"

cat common/*.h >"$work/other.txt"
trains ${to24/--lr 1e-2/--lr 0.02} --resume "$work/ours/deeper" --data "$work/other.txt" --clip 0 &&
    grep -qx "continues differently .*: other data, --lr 0.02, not 0.01, --clip 0, not 1, \
--steps 24, not 20" "$out"
report $? "other data and other rates are told"

trains $to20 --resume "$work/ours/deeper/step-000016" --documents 10 &&
    grep -qx 'continues differently from the run that was saved: --documents 10, not -1' "$out"
report $? "other documents are told"

cp "$ULTRASCALE_DATA" "$work/copy.txt"
trains $to20 --resume "$work/ours/deeper/step-000016" --data "$work/copy.txt" &&
    ! grep -q 'continues differently' "$out"
report $? "the same data under another name is the same"

cp -r "$work/ours/deeper/step-000016" "$work/older"
sed -i 's/"data":/"dada":/' "$work/older/optimizer.safetensors"
trains $to20 --resume "$work/older" --save "$work/older" &&
    grep -q 'is older than this program: it does not say its data' "$out" &&
    same_checkpoint "$work/older/step-000020" "$work/ours/deeper/step-000020"
report $? "an older checkpoint goes on, and what it does not say is told"

# ---- starting from weights ----

trains $to20 --init "$work/ours/deeper/step-000020" --json "$work/b.json" &&
    [ -n "$(held_out after "$work/a.json")" ] && [ "$(held_out after "$work/a.json")" = \
        "$(held_out before "$work/b.json")" ] &&
    grep -q 'step 2/20 .*lr 1.0e-03' "$out"
report $? "--init begins anew with the loss that the saved weights had"
grep -q "^begins with the weights of $work/ours/deeper/step-000020, at step 0" "$out"
report $? "and says with which folder"
trains $shape --vocab 300 $run --steps 1 --save "$work/words" &&
    trains $run --steps 1 --init "$work/words" &&
    grep -q '^WARNING: --data .* is read as bytes, and the weights know 300 tokens' "$out"
report $? "bytes for the weights of another vocabulary are warned of"

# llm.c's header: 256 int32, magic 20240520 (GPT-2), version 1, 4000 tokens; then 0 to 24, again and again
{
    printf '\x88\xd8\x34\x01\x01\x00\x00\x00\xa0\x0f\x00\x00'; head -c 1012 /dev/zero
    for _ in $(seq 160); do
        printf '\x00\x00\x01\x00\x02\x00\x03\x00\x04\x00\x05\x00\x06\x00\x07\x00\x08\x00\x09\x00'
        printf '\x0a\x00\x0b\x00\x0c\x00\x0d\x00\x0e\x00\x0f\x00\x10\x00\x11\x00\x12\x00\x13\x00'
        printf '\x14\x00\x15\x00\x16\x00\x17\x00\x18\x00'
    done
} >"$work/tokens.bin"
for folder in llama_untied_f32 llama_tied_bf16; do
    trains --init tests/fixtures/$folder --data "$work/tokens.bin" $to20 --save "$work/$folder" &&
        grep -q '^PASS' "$out" && [ -e "$work/$folder/step-000020/model.safetensors" ]  # easy to learn
    report $? "trains a checkpoint of Hugging Face's: $folder"
done

# ---- wrong use ----

# In blocks of 1,024 bytes: the weights do not fit, or only the optimizer's state does not.
last=$work/ours/deeper/step-000020
weights=$(($(stat -c %s "$last/model.safetensors") / 1024))
for limit in $((weights / 2)) $((weights + 8)); do
    rm -rf "$work/full" && mkdir "$work/full" && cp -r "$last" "$work/full/"
    (ulimit -f $limit && exec timeout 120 "$train" $to24 --resume "$work/full" --save "$work/full") \
        >"$out" 2>"$err"
    [ $? = 2 ] && [ "$(wc -l <"$err")" = 1 ] && grep -q 'step 24 is not saved' "$err" &&
        [ "$(ls -A "$work/full")" = step-000020 ] && same_checkpoint "$last" "$work/full/step-000020"
    report $? "no room beyond $limit kB: one sentence, and the older checkpoint as it was"
done
for place in "$work/tokens.bin/x" /proc/x; do
    refuses "a place to save that cannot be, before any step: ${place#$work}" \
        "^train: --save $place: cannot create" train \
        $shape $run --steps 3 --save "$place"
    ! grep -q '^step' "$out"
    report $? "and none was made: ${place#$work}"
done
refuses "a dry run that would save" 'dry-run computes no weights to save or begin with' train $shape $run \
    --steps 2 --save "$work/dry" --dry-run
[ ! -e "$work/dry" ]
report $? "and makes no folder for it"

# Rank 1 has another file system in place of the folder, as on another host.
if private_mounts "folders that not all ranks see"; then
    mkdir "$work/apart"
    on_two_hosts='[ $OMPI_COMM_WORLD_RANK = 0 ] || mount -t tmpfs tmpfs "$0" && exec "$@"'
    by_mpirun -n 2 unshare -m --propagation private \
        sh -c "$on_two_hosts" "$work/apart" "$build/../02_zero/zero3" $shape $run --steps 1 --no-check \
        --save "$work/apart"
    one_line $status -F "--save $work/apart: rank 1 does not see what rank 0 makes there: a folder" &&
        ! grep -q '^step' "$out" && [ -z "$(ls -A "$work/apart")" ]
    report $? "a folder that one rank does not see: its sentence before any step, and nothing is left"
    mkdir "$work/earlier" && cp -r "$work/ours/deeper/step-000016" "$work/earlier/"
    by_mpirun -n 2 unshare -m --propagation private \
        sh -c '[ $OMPI_COMM_WORLD_RANK = 0 ] || mount --bind "$0" "$1" && shift && exec "$@"' \
        "$work/earlier" "$work/ours/deeper" "$build/../02_zero/zero3" --resume "$work/ours/deeper" \
        ${to30/--grad-acc 2/--grad-acc 1} --dtype f32 --no-check
    one_line $status -F 'deeper: step 20 is the newest that one rank sees, and step 16 that another sees' &&
        ! grep -q '^step' "$out"
    report $? "ranks that see other checkpoints: one sentence before any step"
else
    report 0 "ranks that see other checkpoints # SKIP no mount namespaces here"
fi

# Identical runs that save into the same folder at the same time.
"$train" $shape $run --steps 1000000 --save "$work/both" >"$work/first" 2>&1 </dev/null &
first=$!
for i in $(seq 1200); do [ -d "$work/both" ] && ! flock -n "$work/both" true && break; sleep 0.1; done
refuses "a folder into which a run is saving" \
    '^train: --save .*/both: another run is saving there: wait for its end, or choose another folder$' \
    train $shape $run --steps 1000000 --save "$work/both"
! grep -q '^step' "$out" && kill -0 $first
report $? "and makes no step, while the first one goes on"
{ kill -9 $first && wait $first; } 2>/dev/null
trains $shape $run --steps 2 --save "$work/both" && [ -e "$work/both/step-000002/optimizer.safetensors" ]
report $? "a run that was killed keeps nobody from saving"

# Rank 1 may not write any more, once the first checkpoint is there.
"$build/../02_zero/zero3" --ranks 2 $shape $run --steps 1000000 --save-every 20 --no-check --save \
    "$work/short" >"$out" 2>"$err" </dev/null &
launcher=$!
ranks=$(ranks_of $launcher 2)
for i in $(seq 1200); do [ -e "$work/short/step-000020" ] && break; sleep 0.1; done
prlimit --fsize=0 --pid ${ranks#* }
enough=$(($(ls "$work/short" | wc -l) + 3))  # one may have been in progress
while kill -0 $launcher 2>/dev/null && [ "$(ls "$work/short" | wc -l)" -lt $enough ]; do sleep 0.1; done
kill $launcher 2>/dev/null
wait $launcher
one_line $? -E 'rank 1: cannot write .*: File too large; the checkpoint of step [0-9]* is not saved' &&
    [ "$(ls -A "$work/short" | grep -vc '^step-')" = 0 ]
report $? "a write that fails on one rank alone: its sentence, and nothing is left"

refuses "a folder without a checkpoint" "$work holds no checkpoint" train --resume "$work" $to20
refuses "a folder that is not there" 'no/such/folder' train --resume "$work/no/such/folder" $to20
refuses "weights alone cannot be resumed" 'init takes only its weights' train \
    --resume tests/fixtures/llama_untied_f32 $to20 \
    --data "$work/tokens.bin"
refuses "a run that has ended" 'already has 20 steps' train --resume "$work/ours/deeper" $to20
refuses "another seed" 'of a run with --seed 1, and this one has 2' train \
    --resume "$work/ours/deeper" $to30 --seed 2
refuses "another number of samples in a step" 'of a run with 4 samples in a step, and this one has 6' \
    train --resume "$work/ours/deeper" \
    ${to30/--micro-batch 2/--micro-batch 3}
refuses "another length" 'of a run with --seq 16, and this one has 8' train \
    --resume "$work/ours/deeper" ${to30/--seq 16/--seq 8}
refuses "another dtype" 'of a run with --dtype f32, and this one has f64' train \
    --resume "$work/ours/deeper" $to30 \
    --dtype f64
refuses "a shape beside a checkpoint's" 'config.json' train --resume "$work/ours/deeper" $to30 --layers 2
refuses "tokens beyond the checkpoint's vocabulary" 'vocab' train \
    --init tests/fixtures/llama_untied_f32 $to20

refuses "a folder with another run's steps" \
    'deeper/step-0000[0-9]* is a checkpoint of another run: choose another folder' train \
    $shape $to30 --save "$work/ours/deeper"
mkdir -p "$work/foreign/step-000020" && touch "$work/foreign/step-000020/tokenizer.json"
refuses "a folder whose files would be hidden" \
    'foreign/step-000020 holds tokenizer.json, which is no part' train $shape $to30 \
    --save "$work/foreign"
mkdir -p "$work/linked" "$work/elsewhere" && ln -s "$work/elsewhere" "$work/linked/step-000020"
refuses "a folder that is a link" 'linked/step-000020 is a link, which no checkpoint can replace' train \
    $shape $to30 --save "$work/linked"
broken=$work/broken
# breaks NAME PATTERN COMMAND…: COMMAND, run in a copy of a checkpoint, makes it one that is refused.
breaks() {
    local name=$1 pattern=$2; shift 2
    rm -rf "$broken" && cp -r "$last" "$broken" && (cd "$broken" && "$@")
    refuses "$name" "$pattern" train --resume "$broken" $to30
}
header_length() { printf "$1" | dd of=model.safetensors conv=notrunc status=none; }
breaks "a truncated file" 'broken/model.safetensors: tensor' truncate -s -1 model.safetensors
breaks "a truncated optimizer file" 'broken/optimizer.safetensors: tensor' truncate -s -1 \
    optimizer.safetensors
if about cpu "a file larger than the address space"; then
    rm -rf "$broken" && cp -r "$last" "$broken" && truncate -s 1T "$broken/model.safetensors"
    (ulimit -v 8000000; exec timeout 60 "$train" --resume "$broken" $to30) >"$out" 2>"$err"
    [ $? = 2 ] && grep -q 'broken/model.safetensors cannot be mapped into memory' "$err"
    report $? "a file larger than the address space"
fi
nan_at() { printf '\0\0\xc0\x7f' | dd of=$1 bs=1 seek=$(($(stat -c %s $1) - $2)) conv=notrunc status=none; }
breaks "a NaN in the state" \
    'optimizer.safetensors: element 8191 of lm_head.weight.v is nan in f32, and must be finite' \
    nan_at optimizer.safetensors 4
below_0_at() { printf '\0\0\x80\xbf' | dd of=$1 bs=1 seek=$(($(stat -c %s $1) - $2)) conv=notrunc status=none; }
breaks "a mean of squares below 0" \
    'optimizer.safetensors: element 8191 of lm_head.weight.v is -1, and a mean of squares is not negative' \
    below_0_at optimizer.safetensors 4
breaks "another config.json" 'config.json is not that of the run that was saved: it says .*eps 0.1", and ' \
    sed -i 's/"rms_norm_eps":.*,/"rms_norm_eps": 0.1,/' config.json
"$train" $shape $run --steps 1 --save "$work/nan" >"$out" 2>"$err" </dev/null
(cd "$work/nan/step-000001" && nan_at optimizer.safetensors 4)
refuses "one that only rank 1 reads" '^zero3: rank 1: .*element 8191 of lm_head.weight.v is nan' \
    ../02_zero/zero3 --ranks 2 --resume "$work/nan" ${to30/--grad-acc 2/--grad-acc 1} --dtype f32 --no-check
breaks "an empty file" 'model.safetensors: too short for a safetensors file: 0 B$' truncate -s 0 \
    model.safetensors
breaks "a header of 2^63 bytes" 'claims 9223372036854775808 B' header_length '\0\0\0\0\0\0\0\x80'
breaks "a folder as a file" 'model.safetensors' bash -c 'rm model.safetensors && mkdir model.safetensors'
breaks "a FIFO as weights" 'model.safetensors is a pipe' bash -c \
    'rm model.safetensors && mkfifo model.safetensors'
breaks "a FIFO as config" 'config.json is a pipe' bash -c 'rm config.json && mkfifo config.json'
breaks "weights of another step" 'is of step 16 and optimizer.safetensors of step 20' cp \
    "$work/ours/deeper/step-000016/model.safetensors" .
breaks "a missing tensor" 'lacks the tensor model.norm.weight' sed -i \
    's/model.norm.weight/model.morn.weight/' model.safetensors
breaks "a wrong shape" 'shape' sed -i 's/"intermediate_size": 48/"intermediate_size": 64/' config.json
breaks "another kind of model" '"model_type" is "gpt2"' sed -i 's/"llama"/"gpt2"/' config.json
breaks "a stretched RoPE" '"rope_scaling"' sed -i \
    's/"rope_scaling": null/"rope_scaling": {"rope_type": "yarn"}/' config.json

finish
