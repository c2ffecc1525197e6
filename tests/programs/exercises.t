#!/bin/bash
# exercises.t: the exercises of tests/exercises.txt, what the grader says of typical wrong answers, and its
# limits. TAP. Every exercise's stub is "not done" and its body comes back to the letter; of a third of them,
# by turns of days, stub and empty body are built, the empty body fails, and the original passes. With CI
# set: of all.
# needs: programs build/tests/test_flash_model build/tests/test_transformer
. "$(dirname "$0")/tap.sh"
limit=580
export BUILD=$build
course=tests/course/course

run $course check $([ -n "$CI" ] && echo 1 || echo 3)
[ $status = 0 ] && [ "$(grep -c '^ok' "$out")" -ge 24 ]
report $? "stubs are not done, empty bodies fail, originals pass"

# answer STUDENT EXERCISE FILE EXPRESSION: the file with this substitution of perl is handed in.
answer() {
    mkdir -p "$work/class/$1"
    perl -0pe "$4" "$3" >"$work/class/$1/$2.c"
    ! cmp -s "$3" "$work/class/$1/$2.c"
    report $? "$1: the wrong answer still fits the sources"
}
naive=01_data_parallel/ddp_naive.c ring=01_data_parallel/ring_all_reduce.c
answer "m'ean" ddp_naive $naive 's/ && !last; i\+\+/; i++/'
answer semicolon ddp_naive $naive 's/param\[i\];/param[i]/'
answer price ddp_naive $naive 's/\(double\)model->config.grad_acc/2/'
answer wait ddp_overlap_more 01_data_parallel/ddp_overlap.c \
    's/if \(wait_for_unit\(context, u\)\) op_scale/op_scale/'
answer memory zero2 02_zero/zero2.c 's/tensor_free\(&zero->gradient\);\n/zero->gradient = (Tensor){0};\n/'
answer ahead one_f_one_b 05_pipeline_parallel/one_f_one_b.c 's/ahead = p - 1 - r/ahead = p - 2 - r/'
# It leaves its session, and would stay: the grader ends it.
daemon='if (!fork()) { setsid(); execlp("sleep", "sleep", "4713", NULL); }'
answer daemon ring_chunk $ring "s/(\n    i = \(i % ring.size)/\n    $daemon\$1/"
run $course grade --from "$work/class" --json "$work/class.json"
[ $status = 1 ] && grep -q '^0 pass, 7 fail, 0 not done$\|^1 pass, 6 fail, 0 not done$' "$out" &&
    perl -MJSON::PP -e 'local $/; my $all = decode_json(<>);
        exit(@$all != 7 || grep { !$_->{student} } @$all)' "$work/class.json"
report $? "a class is graded, with exit status and JSON"
says() {  # says STUDENT WORDS: what stands below the student's line
    awk -v "who=$1," '/^[A-Z]/ { on = index($0, who) } on' "$out" | tr -s '\n ' '  ' | grep -q -e "$2"
    report $? "$1: $2"
}
says "m'ean" 'averaged twice over the 2 ranks of dp'
says semicolon 'error: expected'
says price 'Only all_reduce_after_backward is graded'
says wait 'wait for the request first'
says memory 'Memory is above the formula'
says ahead 'this rank ends too early'
! grep -lsa "471[3]" /proc/[0-9]*/cmdline >/dev/null
report $? "what a submission has left behind is ended"

mkdir -p "$work/mine"
$course stubs "$work/mine" >"$out" && cp $naive "$work/mine/ddp_naive.c" &&
    $course stubs "$work/mine" >"$out" &&
    cmp -s $naive "$work/mine/ddp_naive.c"
report $? "exercises are written, and over no file"
run $course grade --folder "$work/mine" ddp_no_sync
[ $status = 3 ] && grep -q '^NOT DONE ddp_no_sync' "$out"
report $? "an untouched exercise is not done, status 3"
run $course grade --folder "$work/mine" ddp_naive
[ $status = 0 ] && grep -q '^PASS ddp_naive' "$out"
report $? "the book's own file passes all its runs, on 4 ranks, too"

if wanted "a hunt shows symptoms, and knows the place"; then
    run $course hunt 1 && grep -q 'Which file, and which line' "$out" && $course answer 1 >"$err" &&
        at=$(sed -n 's/^hunt 1: \([^:]*:[0-9]*\).*/\1/p' "$err") && $course answer 1 "$at" >"$out" &&
        ! $course answer 1 Makefile:1 >>"$out"
    report $? "a hunt shows symptoms, and knows the place"
fi

# A token file as tokens.py writes it, in both widths; a folder in transformers, where that is installed.
python3 - "$work" <<'PYTHON' >"$out" 2>&1
import sys
sys.path.insert(0, "tests/course")
from tokens import write_tokens
for name, vocabulary in ("narrow", 25), ("wide", 70000):
    documents = ([i % 25 for i in range(100)] for _ in range(40))
    assert write_tokens(f"{sys.argv[1]}/{name}.bin", documents, vocabulary) == 4000
PYTHON
report $? "token files are written"
small="--layers 1 --hidden 24 --heads 2 --kv-heads 1 --ffn 40 --seq 16 --steps 2 --sample 0"
for name in narrow wide; do
    passes "train reads $name tokens" 00_single_gpu/train --data "$work/$name.bin" --vocab 25 $small \
        --save "$work/$name"
done
if python3 -c 'import transformers, torch' 2>/dev/null; then
    python3 -c 'import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert model(torch.tensor([[1, 2, 3]])).logits.shape == (1, 3, 25)' "$work/narrow/step-000002" >"$out" 2>&1
    report $? "transformers loads what was saved"
fi
finish
