#!/bin/bash
# exercises.t: the exercises of tests/exercises.txt, what the grader says about typical wrong answers, and
# its limits. TAP. For every exercise the stub is "not done" and compiles, its body can be put back exactly,
# an empty body fails the first run, and the original passes it.
# needs: programs build/tests/test_flash_model build/tests/test_transformer build/tests/test_cost
# needs: build/tests/test_delayed_scaling build/tests/test_moe build/tests/test_zero_in_flight
# needs: build/tests/test_tensor_parallel build/tests/test_sample build/tests/test_sequence_layout
# needs: build/tests/test_memory build/tests/test_recipes build/tests/test_sockets
# needs: build/tests/test_zero_r
. "$(dirname "$0")/tap.sh"
# Seconds: the grader runs each program in a session of its own, which a busy machine schedules last.
limit=1700
export BUILD=$build
course=tests/course/course

if wanted "stubs are not done, empty bodies fail, originals pass"; then
    run $course check
    [ $status = 0 ] && [ "$(grep -c '^ok' "$out")" -ge 24 ]
    passed=$?
    grep '^not ok' "$out" >"$err"
    report $passed "stubs are not done, empty bodies fail, originals pass"
fi

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
# It leaves its session and would live on: the grader ends it.
daemon='if (!fork()) { setsid(); execlp("sleep", "sleep", "4713", NULL); }'
answer daemon ring_chunk $ring "s/(\n    i = \(i % ring.size)/\n    $daemon\$1/"
# Every rank receives first. With two ranks this is detected at once; with more, each waits for another one.
receive='comm_wait(comm_receive(received, (r + ring.size - 1) % ring.size, ring));'
send='comm_wait(comm_send(ring_chunk(t, r - 1 - step, ring), (r + 1) % ring.size, ring));'
answer receives ring_step $ring "s/to_the_next\(ring_chunk\(t, r - 1 - step.*/$receive $send/"
tokens='input->b * model->config.seq'
own="mean_loss_scale((double)count_labels(input->targets + i * $tokens, $tokens))"
answer means grad_accumulation 00_single_gpu/grad_accumulation.c \
    "s{input->loss_scale\[i\]\)}{$own / (double)input->micro_batches)}"
answer halved grad_accumulation 00_single_gpu/grad_accumulation.c \
    's{input->loss_scale\[i\]\)}{input->loss_scale[i] / (double)input->micro_batches)}'
answer narrow ddp_no_sync 01_data_parallel/ddp_no_sync.c 's/else params_accumulate.*//'
answer full ddp_buckets 01_data_parallel/ddp_bucketed.c 's/bytes < bucket_bytes/bytes < 2 * bucket_bytes/'
# The last bucket is not full, and never sent.
answer lost ddp_buckets 01_data_parallel/ddp_bucketed.c 's/bytes < bucket_bytes && same/bytes < bucket_bytes/'
# gate and up bypass the linear socket, so FP8 would never see them
past='Tensor x = run_of(kept->rows, &in);
    op_matmul(run_of(kept->gate, &in), x, param_value(&m->params, in.weight[0]), false, true, 0);
    op_matmul(run_of(kept->up, &in), x, param_value(&m->params, in.weight[1]), false, true, 0);'
answer past moe_experts 06_expert_parallel/moe.c \
    "s/&in\);\)\n.*?in\.linear\);/&in);) { $past }/s"
# Each hop is waited for before its rank computes with the previous chunk.
wait='if \(coming\) comm_wait\(coming\);'
answer waits ring_attention 04_context_parallel/ring_attention.c \
    "s/(coming = hop\(.*?;)(.*?)$wait/\$1\n        if (coming) comm_wait(coming);\$2/s"
# Every rank gets the whole sum: the numbers are right, but this is DDP.
answer whole zero1_reduce_scatter 02_zero/zero1.c \
    's/comm_reduce_scatter\(u->own_grads, unit_total_grad\(u\), counts,/comm_all_reduce(unit_total_grad(u),/'
answer doubled zero2 02_zero/zero2.c 's/( *op_accumulate\(u->own_grads, .*\n)/$1$1/'
# The caller frees what it gets, and then frees the tensor that it has passed.
# Chunks of ceil(count / n), the last ones shorter.
most='least += longer > 0, longer = tensor_count(t) - i * least;'  # those that are left from chunk i on
part='longer > 0 ? i * least : 0, SHAPE(longer < 0 ? 0 : longer < least ? longer : least)'
answer longest ring_chunk $ring "s/return tensor_view\(t, i .*?;/$most return tensor_view(t, $part);/s"
answer leak sum_along 01_data_parallel/collectives.c 's/        tensor_free\(&received\);\n    \}\n    if/    }\n    if/'
answer borrowed tp_region 03_tensor_parallel/tensor_parallel.c \
    's/return tensor_share\(partial\);.*/return partial;/'
run $course grade --from "$work/class" --json "$work/class.json"
[ $status = 1 ] && grep -q '^0 pass, 20 fail, 0 not done$\|^1 pass, 19 fail, 0 not done$' "$out" &&
    perl -MJSON::PP -e 'local $/; my $all = decode_json(<>);
        exit(@$all != 20 || grep { !$_->{student} } @$all)' "$work/class.json"
report $? "a class is graded, with exit status and JSON"
says() {  # says STUDENT WORDS: the text below the student's line has the words
    awk -v "who=$1," '/^[A-Z]/ { on = index($0, who) } on' "$out" | tr -s '\n ' '  ' | grep -q -e "$2"
    report $? "$1: $2"
}
says "m'ean" 'averaged twice over the 2 ranks of dp'
says semicolon 'error: expected'
says price 'Only all_reduce_after_backward is graded'
says wait 'wait for the request first, start it only'
says memory 'Memory is above the formula'
says ahead 'one_f_one_b, p = 4, m = 4, 4 stages: rank .* this rank ends too early'
says receives 'both make one call of the two'
says means 'A mean of means is another number'
says halved 'scaled twice by 1 / the 2 micro-batches loss_scale already contains the division'
says narrow 'the last one before it is sent'
says past "does forward call the socket, with each expert's own slot"
says waits 'waits [0-9.]* ms for hops, expected 0: .* The numbers are right, but communication is not overlapped'
says full 'A bucket ends with the unit that brings it'
says lost 'no bucket has the gradient of embedding The last bucket is sent even if it is not full'
says whole 'predicted 6, measured 12, off by 6 all_reduce is called in place of reduce_scatter'
says doubled 'or added twice .* With --ranks 4, is the factor 4, or still 2'
says longest 'chunks have [0-9]* to [0-9]*, and may differ by one'
says leak 'leaves [0-9]* B of device memory behind'
says borrowed 'is used after tensor_free: .* tensor_share(x)'
! grep -lsa "471[3]" /proc/[0-9]*/cmdline >/dev/null
report $? "what a submission has left behind is ended"

mkdir -p "$work/mine"
$course stubs "$work/mine" >"$out" && cp $naive "$work/mine/ddp_naive.c" &&
    $course stubs "$work/mine" >"$out" &&
    cmp -s $naive "$work/mine/ddp_naive.c"
report $? "exercises are written, and over no file"
mkdir "$work/theirs" && echo '# My notes' >"$work/theirs/README.md"
run $course stubs "$work/theirs"
one_line $? -F "theirs/README.md is not the sheet of exercises" && [ "$(ls "$work/theirs")" = README.md ]
report $? "no README of a student is overwritten"
run $course grade --folder "$work/mine" ddp_no_sync
[ $status = 3 ] && grep -q '^NOT DONE ddp_no_sync' "$out"
report $? "an untouched exercise is not done, status 3"
run $course grade --folder "$work/mine" ddp_naive
[ $status = 0 ] && grep -q '^PASS ddp_naive' "$out"
report $? "the book's own file passes all its runs, on 4 ranks, too"
cp 06_expert_parallel/moe.c "$work/mine/moe_experts.c"
run $course grade --folder "$work/mine" moe_experts
[ $status = 0 ] && grep -q '^PASS moe_experts: .* as predicted; test_moe passes, ' "$out"
report $? "a pass says what the program and the unit test have shown"

# The same answer, except on 2 ranks: the second run, on 4, waits in a circle.
circle="if (ring.size < 3) \$1\n    else { $receive $send }"
perl -0pe "s/(to_the_next\(ring_chunk\(t, r - 1 - step.*)/$circle/" $ring >"$work/mine/ring_step.c"
run $course grade --folder "$work/mine" --timeout 0.5 ring_step
[ $status = 1 ] && grep -q 'Ranks wait for each other' "$out" &&
    tr -s '\n ' '  ' <"$out" | grep -q 'waits in receive.* for rank [0-3], for .*(--timeout)'
report $? "a deadlock of 4 ranks says who waits for whom"

# Ranks that spin, when the grader is told to end.
if wanted "an interrupted grade leaves no rank behind"; then
    mkdir -p "$work/loop"
    perl -0pe 's/(void all_reduce_after_backward[^{]*\{)/$1 for (volatile int x = 1; x;) continue;/' $naive \
        >"$work/loop/ddp_naive.c"
    # by their program: the linker, and later mpirun, have its name on their command lines, too
    running() { find /proc/[0-9]*/exe -lname '*/grade/ddp_naive/bin/ddp_naive' 2>/dev/null | wc -l; }
    $course grade --folder "$work/loop" ddp_naive >"$out" 2>"$err" &
    grader=$!
    until [ "$(running)" = 3 ] || ! kill -0 $grader 2>>"$err"; do sleep 0.05; done  # 2 ranks, their launcher
    kill -TERM $grader && ! wait $grader 2>>"$err" && [ "$(running)" = 0 ]
    report $? "an interrupted grade leaves no rank behind"
fi

# What cannot be graded is said, and the rest of the class is graded all the same.
if wanted "a hunt that was not started, a line that is none and a misnamed file"; then
    mkdir -p "$work/odd/bo"
    printf '%s\n' '99999 02_zero/zero1.c:30' '3 fp16.c: 73' '# a comment' '' >"$work/odd/bo/hunt.txt"
    cp $naive "$work/odd/bo/ddp_naiv.c"
    cp $ring "$work/odd/bo/ring_step.c"
    perl -pi -e 's/#include <stdlib.h>/$&\n#include <stdio.h>/' "$work/odd/bo/ring_step.c"
    run $course grade --from "$work/odd" --json "$work/odd.json"
    [ $status = 1 ] && [ -s "$work/odd.json" ] && grep -q '^0 pass, 3 fail, 1 not done$' "$out" &&
        grep -q 'not been started here: make hunt N=99999' "$out" && grep -q 'this is not: 3 fp16' "$out" &&
        grep -q '^FAIL bo, ddp_naiv.c' "$out" && grep -q 'is not in 01_.*: #include <stdio.h>' "$out"
    report $? "a hunt that was not started, a line that is none and a misnamed file"
fi
run $course grade --from "$work/odd" --json "$work/none/class.json"
[ $status = 2 ] && grep -q 'No such file' "$err" && ! grep -q . "$out"
report $? "a file for records that cannot be written is refused before anything is graded"

# `within` holds for all counts: for those of tiles under a mask as for the table's.
perl -Itests/course -MGrade -e '
    sub holds { my $n = $_[0];
        return Grade::is_within({ within => 25 }, "  flash: FLOPs  predicted 100  measured 90  FAIL\n"
            . "  FAIL: masked: $n FLOPs; the tiles that are not empty take 100\nFAIL flash: x\n") }
    exit !(holds(90) && holds(125) && !holds(126))'
report $? "a kernel may take fewer operations, and some more, under masks as well"

# advises WORDS FAILURE: what the grader says about this first sentence of a failure.
advises() {
    perl -Itests/course -MGrade -e 'my ($kind, $words) = Grade::advice({ proof => "" }, shift); print $words' \
        "$2" | grep -q -- "$1"
    report $? "advice: $1"
}
race='kernel f, block 0, thread (1, 0), a.cu:9: reads byte 0 of x, which thread (0, 0) wrote (a.cu:6)'
advises '__syncthreads() all threads of the block' "$race with no __syncwarp() between"
advises 'subtracted from -inf' 'masked: lse is off by nan, where 3.7e-07 is allowed'
advises 'different words of one bank' 'x, padded: bank conflicts: predicted 0, measured 8, off by 8'
advises 'Which stages are whose' \
    'x, p = 4, m = 4, 8 stages: rank 0, position 4 (F1.0.0) breaks the rule "a rank works on its own stages": x'
advises 'sent and of what arrives exchanged' \
    'rank 0: all_to_all: in has 384 elements, and its 2 parts have 360'
advises 'right neighbour' \
    'rank 0: rank 1 called receive(1 f32 from rank 0) where rank 0 called send(0 f32 to rank 1)'
advises 'counted modulo N' 'rank 1: transfers: there is no peer 2 in group world of 2'
advises 'begin where the one before it ends' \
    'rank 0: transfers: 0 and 1 of the batch overlap, and one of them receives'
advises 'as long as that part' 'rank 0: step 1: reduce_scatter: out has 960 elements, and part 0 has 1008'
advises 'for which none are left' \
    'rank 5: dimension 0 of a tensor is -1: negative, or more elements in all than 64 bits count'
advises 'whole heads' \
    'rank 0: rope: x is (62, 1) f64, whose rows are not made of heads of an even size, here 6'
summed='summed, and not averaged, over the 2'
advises 'multiplied by loss_scale' \
    "losses of 2 ranks: off: usually $summed ranks of tp, or $summed micro-batches"
advises 'does each micro-batch add its own' \
    'losses of 2 x 2 samples: those of 1 x 4 samples are all zero, so nothing was compared'
advises '16-bit gradients in place of' \
    'all_reduce: bytes, all ranks: predicted 100 B, measured 50, off by -50'
advises 'param_set_copies' \
    'gradients of 4 ranks, k_proj: off by inf relative (bound 1), scale 2.35e+303; 4 of 21 fail'
advises 'is each stepped exactly once' \
    "gradient norms of 4 ranks: off: the first step's norm is right: usually the optimizer's step"
advises 'move_to_own_place' 'bytes in holes, with one block more: predicted 2688 B, measured 3584, off by 896'
advises 'never allocated' \
    'rank 0: step 2: a view of 6144 elements from element 0 does not lie within no tensor'
advises 'rise by the rate' 'bias 0.02: the busiest expert has 4.00 times the mean, expected below 1.3'
advises 'model_begin_step called once a step' \
    'test_sockets, test t: `ready` is called with `last` true after micro-batch 1 of 3'
# Micro-batches that are left out may look like ranks that are.
perl -Itests/course -MGrade -e '
    my ($one, $share) = ("With one micro-batch (--grad-acc 1)", "usually only one rank\x27s share: the sum");
    my @passes = Grade::without_share("5 fail: $share", "Is it summed?", "$one it passes: look");
    my @fails = Grade::without_share("5 fail: $share", "Is it summed?", "$one: $share.");
    exit("@passes" ne "5 fail  $one it passes, so ranks do sum: look"
        || "@fails" ne "5 fail: $share Is it summed? $one: $share.")'
report $? "if one micro-batch passes, ranks do sum"
# What is off by no whole factor with several micro-batches may be by one with a single one.
perl -Itests/course -MGrade -e '
    no warnings "redefine";
    my ($said, $wrong) = ("With one micro-batch (--grad-acc 1) it is the plain factor", "");
    *Grade::some = sub { "" };
    *Grade::proof = sub { $wrong };
    my $of = sub { $wrong = shift; Grade::one_micro_batch({}, ".", "a --ranks 2 --grad-acc 3", "gradients") };
    exit($of->("off, scale 2; 12 of 12 fail, all by this factor: usually added twice") ne "$said 2: usually added twice."
        || $of->("off, scale 0.25; 12 of 12 fail, all by this factor") ne "$said 0.25."
        || $of->("off, scale 2.9; 12 of 12 fail") ne "")'
report $? "the factor with one micro-batch is named"
# One that replaces another is named, although both are also called elsewhere in the step.
perl -Itests/course -MGrade -e '
    my $rows = "  all_reduce: calls of rank 0  predicted 76  measured 4  FAIL\n";
    exit(Grade::replaced($rows) ne "" || Grade::replaced($rows
        . "  broadcast: calls of rank 0  predicted 0  measured 9  FAIL\n")
        ne "broadcast is called in place of all_reduce")'
report $? "a call that is made in place of another"
advises 'which function waits for it' 'rank 0: step 1: comm_wait: this is no request in flight: it is NULL'
advises 'never set to zero' 'rank 0: dry run, step 1: out of device memory: 7.35 TB more for activations'
bits='9 elements differ from one after the other in all (relative 1.34e-16, scale 1); 32 of 34 fail'
advises 'summed in another order' "gradients of two in flight, x: $bits"
advises 'communication is not overlapped' \
    'two in flight hide 95.330 ms of all-to-alls, and should hide 0.85 of 134.709'
# The prediction itself is made from what a function counts.
perl -Itests/course -MGrade -e '
    my ($kind, $words) = Grade::advice({ proof => "", counted => "its rows" },
        "all_to_all: bytes, all ranks: predicted 64 B, measured 788032, off by 787968");
    exit($words !~ /more bytes: .* Or is the prediction wrong, which is made from its rows\?$/)'
report $? "advice: the prediction may be wrong, if the function counts what it is made from"
advises 'other tokens than the layout' 'zigzag: this rank computes 52 entries, by the formula 68'

# Kernels: an answer that the emulator refuses.
perl -0pe 's/ *__syncthreads\(\);  \/\/ all threads have read them\n//' 07_kernels/tiling.cu \
    >"$work/mine/tiling.cu"
if [ -x "$build/07_kernels/tiling" ]; then
    run $course grade --folder "$work/mine" tiling
    [ $status = 1 ] && grep -q 'with no __sync' "$out" && grep -q 'no barrier between' "$out"
    report $? "a kernel without its barrier: who meets where"
else
    report 0 "a kernel without its barrier # SKIP g++ or libboost-context-dev is not installed"
fi

# Hunts are numbered chapter by chapter, so that a reader of one chapter finds bugs of that chapter.
run $course hunt
first=$(sed -n 's/.*chapter 02 has \([0-9]*\) to .*/\1/p' "$err")
[ $status = 2 ] && perl -Itests/course -MSource -MGrade -MHunt -e '
    my @file = map { $_->{file} } bugs(exercises("tests/exercises.txt"));
    exit !($file[$ARGV[0] - 1] =~ /^02_zero/ && $file[$ARGV[0] - 2] =~ /^01_/)' "${first:-0}"
report $? "a hunt without a number says which chapter has which"

if wanted "a hunt shows symptoms, and knows the place"; then
    run $course hunt 1 && grep -q 'Which file, and which line' "$out" && $course answer 1 >"$err" &&
        at=$(sed -n 's/^hunt 1: \([^:]*:[0-9]*\).*/\1/p' "$err") && $course answer 1 "$at" >"$out" &&
        ! $course answer 1 Makefile:1 >>"$out"
    report $? "a hunt shows symptoms, and knows the place"
fi

# What a hunt shows of an output: the first rows that are wrong, their heading and the titles of columns.
printf '%s\n' 'one against two: exact' '            bytes' '  right   1 equal' '  wrong   2 FAIL' \
    '  next    3 equal' '' 'FAIL x: wrong' >"$work/table"
perl -Itests/course -MHunt -e 'local $/; print map { "$_\n" } Hunt::where_it_shows(<>)' \
    "$work/table" >"$out"
sed -n '1,2p; 4,5p' "$work/table" | cmp -s - "$out"
report $? "a hunt shows rows below their heading"

# A token file as tokens.py writes it, in both widths; a folder in transformers, if that is installed.
python3 -B - "$work" <<'PYTHON' >"$out" 2>&1
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

# The page's own commands, with names of what is there: from a dataset and a tokenizer to a token file, and
# to a model that transformers loads and samples from.
page=tests/course/README.md
from_hub="from a dataset to a token file, to a model, to transformers"
if ! python3 -c 'import datasets, tokenizers, torch, transformers' 2>/dev/null; then
    report 0 "$from_hub # SKIP datasets, tokenizers, torch or transformers is not installed"
    finish
fi
export HF_HUB_OFFLINE=1 HF_HOME=$work/hub
python3 - "$work" <<'PYTHON' >"$out" 2>"$err" &&
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
lines = [f"Once upon a time {n} mice counted to {n * n}." for n in range(300)]
with open(sys.argv[1] + "/stories.txt", "w") as file:
    file.write("\n".join(lines))
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"]))
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
tokenizer.save_pretrained(sys.argv[1] + "/words")
PYTHON
    run python3 tests/course/tokens.py "$work/stories.txt" "$work/words" "$work/stories.bin"
report $status "$from_hub: a token file"
flags=$(sed -n 's/.*train with //p' "$out")
passes "$from_hub: training on it" 00_single_gpu/train $flags $small --save "$work/stories"
sed -n '/^    from transformers/,/^$/s/^    //p' $page |
    sed "s|out/stories/step-000300|$work/stories/step-000002|; s|gpt2|$work/words|" >"$work/speak.py"
cat <<'PYTHON' >>"$work/speak.py"
import sys
_, info = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(info.values()), info
PYTHON
grep -q "$work/words" "$work/speak.py" && run python3 "$work/speak.py" "$work/stories/step-000002" &&
    grep -q '^ *Once upon' "$out"
report $? "$from_hub: every weight finds its place, and it speaks by the page's lines"
finish
