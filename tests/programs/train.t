#!/bin/bash
# train.t: the training program as a user meets it: it learns, repeats itself, and says what is wrong.
. "$(dirname "$0")/tap.sh"
build=$build/00_single_gpu
train=$build/train
small="--layers 1 --hidden 32 --heads 2 --kv-heads 1 --ffn 48 --seq 16 --sample 0"

# runs NAME PATTERN ARGUMENTS…: exit 0, and PATTERN in the output.
runs() {
    local name=$1 pattern=$2; shift 2
    wanted "$name" || return
    run "$train" "$@" && grep -qE -- "$pattern" "$out"
    report $? "$name"
}

ULTRASCALE_DATA= runs "learns this book's own sources" '^PASS train: held-out loss 5\.[0-9]+ -> [0-3]\.' \
    --steps 150 --layers 2 --seq 64
runs "writes a sample" 'the prompt ends at \|' --steps 30 --layers 1 --sample 20 --temperature 0
# As with docker run --cpus 1: threads that share it would all stop for a part of each period.
for setting in --unset=OMP_NUM_THREADS OMP_NUM_THREADS=; do
    about cpu "one thread" && private_mounts "the time of one core" || continue
    run env $setting "${time_of_a_core[@]}" "$train" $small --steps 1
    [ $? = 0 ] && grep -qE '^OpenBLAS .*, 1 thread(,|$)' "$out"
    report $? "one thread has the time of one core: $setting"
done
# The machine has room for it, and gives none.
if about cpu "refused memory"; then
    OMP_NUM_THREADS=1 run bash -c 'ulimit -v 500000 && exec "$@"' - "$train" --hidden 2048 --ffn 8192 --steps 1
    one_line $? -F ' more for parameters were refused, although the tensors leave '
    report $? "refused memory has a sentence of its own"
fi
# OpenBLAS would ask for it for ever.
if about cpu "address space"; then
    OMP_NUM_THREADS=1 run bash -c 'ulimit -v 100000 && exec "$@"' - "$train" $small --steps 1
    one_line $? -F 'train: OpenBLAS with 1 thread takes 352 MB of address space, and 97 are allowed (ulimit -v'
    report $? "address space: too little when OpenBLAS is loaded"
    OMP_NUM_THREADS=2 run bash -c 'ulimit -v 400000 && exec "$@"' - "$train" $small --steps 1
    one_line $? -F 'OMP_NUM_THREADS=1 needs 352)'
    report $? "address space: too little for two threads"
fi
# OpenBLAS would wait for the others for ever.
! about cpu "fewer threads than asked for" || OMP_NUM_THREADS=2 OMP_THREAD_LIMIT=1 \
    runs "fewer threads than asked for" '^OpenBLAS .*, 1 thread(,|$)' $small --steps 1
! about cpu "no parallel regions" || OMP_NUM_THREADS=2 OMP_MAX_ACTIVE_LEVELS=0 \
    runs "no parallel regions" '^OpenBLAS .*, 1 thread(,|$)' $small --steps 1
if about cpu "ULTRASCALE_BF16"; then
    ULTRASCALE_BF16=tf32 run "$train" $small --steps 1 --dtype bf16
    one_line $? -F "ULTRASCALE_BF16 is tf32"
    report $? "ULTRASCALE_BF16 names a way that does not exist"
fi
runs "trains in bf16" '^PASS' $small --steps 40 --dtype bf16
grep -qE '^matrix multiply in bf16, (128|256|512) x \1: [0-9.]+ .?FLOP/s$' "$out"
report $? "trains in bf16, beside what its device multiplies in bf16, which takes no longer than the run"
runs "trains in f64 with tied embeddings and accumulation" '^PASS' $small --steps 40 --dtype f64 --tied \
    --grad-acc 2
runs "a rate of 0 leaves the loss as it is, and no one asks for less" \
    '^PASS train: held-out loss ([0-9.]+) -> \1 nats' $small --steps 2 --lr 0
runs "counts what f16 loses without loss scaling" \
    'without loss scaling [1-9][0-9.]*% of the logits. gradients became zero' \
    $small --steps 2 --dtype f16 --vocab 8192 --micro-batch 320
grep -q '^float16 without loss scaling: gradients up to 3.0e-8 become zero' "$out"
report $? "counts what f16 loses, and says so at the start"
runs "counts Llama 3 8B without computing it" 'FLOPs per step.*equal' --model llama-3-8b --dtype bf16 \
    --steps 1 \
    --micro-batch 1 --dry-run
runs "holds its estimate against the FLOPs without recomputation, and says so" \
    'the estimate 6 Psi n gives .* of the step.s without recomputation$' \
    $small --steps 1 --recompute full --dry-run

other="--layers 1 --seq 512"
dry_clock() { run "$train" $other --dry-run --attention flash $1 && grep '^model clock' "$out"; }
whole=$(dry_clock "") && [ -n "$whole" ] && [ "$(dry_clock "--documents 0")" = "$whole" ]
report $? "a dry run has no text, and so no end of a document, whatever token that is"

run "$train" $small --steps 6 --json "$work/a.json" && run "$train" $small --steps 6 --json "$work/b.json"
series() { sed -n '/"loss"/,/]/p' "$1"; }
[ -n "$(series "$work/a.json")" ] && [ "$(series "$work/a.json")" = "$(series "$work/b.json")" ]
report $? "the same seed gives the same losses to the last digit"
OMP_NUM_THREADS=1 run "$train" $small --steps 6 --trace "$work/trace.json" &&
    grep -q '"rmsnorm_forward"' "$work/trace.json" && is_json "$work/trace.json"
report $? "writes a trace"
# Held-out losses of steps that did not measure any are not numbers.
grep -q 'null' "$work/a.json" && is_json "$work/a.json"
report $? "writes JSON that any reader takes"

# ---- what it prints, beside what it writes ----

if wanted "what is printed is what is written, and both are right"; then
    run "$train" ${small/--sample 0/--sample 8} --temperature 0 --steps 5 --eval-every 2 --micro-batch 3 --grad-acc 2 \
        --recompute full --json "$work/c.json" && python3 - "$out" "$work/c.json" "$ULTRASCALE_DATA" <<'END' 2>"$err"
import json, re, sys
out, run, text = open(sys.argv[1]).read(), json.load(open(sys.argv[2])), open(sys.argv[3]).read()
n, s = run['numbers'], run['series']
steps = re.findall(r'^step (\d+)/5  loss ([\d.]+)  norm ([\d.]+)  lr (\S+)  ([\d.]+)k tok/s', out, re.M)
assert [int(x[0]) for x in steps] == [1, 2, 3, 4, 5], steps
near = lambda a, b, by: abs(float(a) - b) <= by
for i, (_, loss, norm, lr, speed) in enumerate(steps):
    assert near(loss, s['loss'][i], 6e-4) and near(norm, s['gradient norm'][i], 6e-3), i
    assert near(lr, s['learning rate'][i], 0.06 * float(lr)), i
    assert near(speed, 3 * 2 * 16 / s['step seconds'][i] / 1e3, 0.06), speed
held = re.findall(r'^step (\d+)  held-out loss ([\d.]+)', out, re.M)
assert [int(x[0]) for x in held] == [2, 4] and [i + 1 for i in range(5) if s['held-out loss'][i]] == [2, 4], held
assert all(near(loss, s['held-out loss'][int(i) - 1], 6e-4) for i, loss in held)
flops = int(re.search(r'FLOPs per step +predicted +(\d+)', out)[1])
assert abs(n['throughput']['FLOPs per second']['value'] * sum(s['step seconds']) / (5 * flops) - 1) < 1e-9
ms, mfu, hfu = map(float, re.search(r'^model clock.*: ([\d.]+) ms a step, MFU ([\d.]+)%, HFU ([\d.]+)%', out, re.M).groups())
assert near(ms, 1e3 * n['model clock']['seconds per step']['value'], 6e-4) and mfu < hfu < 2 * mfu
train, out_of = map(int, re.search(r'(\d+) tokens for training, (\d+) held out', out).groups())
assert train + out_of == len(text) and out_of == len(text) // 10
sample = re.search(r'the prompt ends at \|\):\n(.*?)\n\n?memory at its peak', out, re.S)[1]
assert sample.split('|')[0] == text[train:train + 4] and len(sample.rstrip('\n')) <= 4 + 1 + 8, repr(sample)
END
    report $? "what is printed is what is written, and both are right"
fi
run "$train" $small --steps 1 --trace /dev/stdout && tail -n 1 "$out" | grep -q '^PASS train'
report $? "the verdict is the last line, also behind a trace"

refuses "a rate that explodes is named by step and tensor" 'step [0-9]+: .*(nan|inf).* first bad tensor' \
    train $small --steps 20 \
    --optimizer sgd --lr 1e3 --clip 0 --dtype f16
refuses "more memory than the machine has" 'out of device memory: .*parameters .*gradients .*total' train \
    --model llama-3-405b \
    --steps 1
refuses "a data file that is missing" '/no/such/file' train --data /no/such/file
: >"$work/empty"
refuses "a data file that is empty" "$work/empty" train --data "$work/empty"
printf 'too short' >"$work/short"
refuses "a data file that is too short" "$work/short" train --data "$work/short"
if about cpu "a data file larger than its address space"; then
    truncate -s 1T "$work/large"
    (ulimit -v 8000000; exec timeout 60 "$train" --data "$work/large") >"$out" 2>"$err"
    [ $? = 2 ] && grep -q 'large cannot be mapped into memory: Cannot allocate memory' "$err"
    report $? "a data file larger than its address space"
fi
mkfifo "$work/fifo"
refuses "a FIFO as data" "$work/fifo is a pipe" train --data "$work/fifo"
refuses "a folder as data" "$work" train --data "$work"
# llm.c's header: 256 int32, magic 20240520 (GPT-2), version 1, 5000 tokens; then all but the last token
{ printf '\x88\xd8\x34\x01\x01\x00\x00\x00\x88\x13\x00\x00'; head -c 1012 /dev/zero; head -c 9998 \
    /dev/zero; } >"$work/cut.bin"
refuses "a token file that is truncated" "$work/cut.bin" train --data "$work/cut.bin"
{ cat "$work/cut.bin"; printf '\x10\x27'; } >"$work/big.bin"
refuses "a token beyond the vocabulary" 'vocab' train --data "$work/big.bin"
runs "trains on a token file" '^PASS' $small --vocab 10001 --data "$work/big.bin" --steps 5
for program in "train $small --save $work/shared" "recompute --json $work/shared"; do
    by_mpirun -n 2 $build/$program
    one_line $? -F 'is for one device: start one of it, and not 2' && [ ! -s "$out" ] &&
        [ ! -e "$work/shared" ]
    report $? "several copies of a program for one device are refused: ${program%% *}"
done
refuses "bounds that it would read" ': it is from 1 to 1000000000000$' train --steps 0
refuses "a decay that SGD has not" 'weight-decay has an effect only with --optimizer adamw' train --optimizer sgd --weight-decay 0.3
refuses "a warm-up that SGD has not" 'warmup has an effect only with --optimizer adamw' train --optimizer sgd --warmup 3
refuses "a file that --json cannot write" 'json' train $small --json "$work/no/such/folder.json"

finish
