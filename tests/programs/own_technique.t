#!/bin/bash
# own_technique.t: a technique of one's own, outside the tree: the program on 00's page, as the page says how to
# build and run it; and an optimizer in the step socket. TAP.
# needs: build/libultrascale.a build/corpus.txt
# slow: *
. "$(dirname "$0")/tap.sh"
tree=$PWD
text=(--data "$tree/$build/corpus.txt")
page=00_single_gpu/README.md

# compiles NAME: $work/NAME.c, from a folder that is not this tree, without a warning.
compiles() {
    (cd "$work" && ${CC:-gcc} "$1.c" -o "$1" $(make -s -C "$tree" BUILD="$build" flags)) >"$out" 2>"$err" &&
        [ ! -s "$err" ]
}
# proves NAME FLAGS…: exit status 0 and a PASS verdict.
proves() { run "$work/$1" "${text[@]}" "${@:2}" && grep -q "^PASS $1: " "$out"; }

sed -n '/^<!-- own technique -->/,/^<!-- .own technique -->/s/^    //p' $page >"$work/sum_once.c"
compiles sum_once
report $? "the page's program is compiled outside the tree"
for ranks in 1 3; do
    proves sum_once --ranks $ranks
    report $? "it proves itself on $ranks ranks"
done
proves sum_once --dtype bf16 --tied --recompute full --ranks 2 --grad-acc 1
report $? "and in bf16, with tied weights and recomputation"
by_mpirun -n 2 "$work/sum_once" "${text[@]}" && grep -q '^PASS sum_once' "$out"
report $? "under an mpirun that was typed"

# What a reader may get wrong with it.
sed 's/REDUCE_SUM, unit->replicas));/&\n            op_scale(unit_total_grad(unit), 1.0 \/ unit->replicas.size);/' \
    "$work/sum_once.c" >"$work/averages.c"
compiles averages && ! proves averages --ranks 2 &&
    grep -q '^FAIL averages: .* by this factor: usually averaged twice over the 2 ranks of dp' "$out"
report $? "averaged as well, it fails and says so"
sed 's/(price, 1, /(price, 2, /' "$work/sum_once.c" >"$work/dear.c"
compiles dear && ! proves dear --ranks 2 &&
    grep -q '^FAIL dear: all_reduce: calls of rank 0: predicted 30, measured 18,' "$out"
report $? "at twice the price, too"
if wanted "a FAIL leaves"; then
    ! proves dear --ranks 2 --trace "$work/t.json" --json "$work/j.json" --timeline \
        --timeline-svg "$work/t.svg" && tail -n 1 "$out" | grep -q '^FAIL dear: ' &&
        grep -q '^all ranks .* ms$' "$out" &&
        is_json "$work/t.json" "$work/j.json" && grep -q '"rank 1, model clock' "$work/t.json" &&
        [ "$(tail -n 1 "$work/t.svg")" = '</svg>' ]
    report $? "a FAIL leaves trace, JSON and picture whole, and stays the last line"
fi
if wanted "a FAIL behind"; then
    ! proves dear --ranks 2 --trace /dev/stdout &&
        grep -qx ']}' "$out" && tail -n 1 "$out" | grep -q '^FAIL dear: '
    report $? "a FAIL behind its trace: that is written before the verdict"
fi
again='comm_wait(comm_broadcast(unit_total_grad(unit), 0, unit->replicas));'
sed "s/REDUCE_SUM, unit->replicas));/& $again/" "$work/sum_once.c" >"$work/sends.c"
compiles sends && ! proves sends --ranks 2 &&
    grep -q '^FAIL sends: broadcast: calls of rank 0: predicted 0, measured 4, off by 4' "$out"
report $? "and with a broadcast of the sums, which no price has"

# One all-reduce for each micro-batch, of sums that hold those before: right for a single micro-batch.
sed -e 's/^static void sum(void \*context, Model \*model) {/static void sum(void *context, Model *model, bool last) {\n    (void)last;/' \
    -e 's/gradients\.finish = sum/gradients.micro_batch_ready = sum/' \
    -e 's/(price, 1, /(price, model->config.grad_acc, /' "$work/sum_once.c" >"$work/sums_each.c"
compiles sums_each && proves sums_each --ranks 2 --grad-acc 1 && ! proves sums_each --ranks 2 &&
    grep -q '^FAIL sums_each: .*gradient' "$out"
report $? "and summed again with each micro-batch, which only the page's two micro-batches show"
multiply='Tensor a = tensor_new(MEMORY_ACTIVATION, F64, SHAPE(2, 2)), b = tensor_like(MEMORY_ACTIVATION, a);
    op_fill(a, 1), op_matmul(b, a, a, false, false, 0), tensor_free(\&a), tensor_free(\&b);'
sed "0,/^    for/s//    ${multiply//$'\n'/\\n}\n&/" "$work/sum_once.c" >"$work/works.c"
compiles works && ! proves works --ranks 2 &&
    grep -q '^FAIL works: FLOPs per step: predicted [0-9]* FLOP, measured [0-9]*, off by 32$' "$out"
report $? "and with a multiply on each rank that one device does not need"

# Steps against the sign of each gradient, with a moment of its own.
cat >"$work/signs.c" <<'END'
#include <math.h>
#include <stdlib.h>

#include "02_zero/zero.h"

typedef struct Signs {
    Tensor *sum;
} Signs;

static bool steps(void *context, Model *model, double norm) {
    Signs *s = context;
    double factor = clip_scale(norm, model->config.clip) / model->grad_scale;
    for (int i = 0; i < model->params.units; i++) {
        const Unit *u = &model->params.unit[i];
        size_t bytes = (size_t)u->own_count * sizeof(double);
        double *w = host_alloc(bytes), *g = host_alloc(bytes), *m = host_alloc(bytes);
        tensor_to_doubles(w, u->own_values);
        tensor_to_doubles(g, u->own_grads);
        tensor_to_doubles(m, s->sum[i]);
        for (int64_t j = 0; j < u->own_count; j++) {
            m[j] += factor * g[j];
            w[j] -= model->config.lr * tanh(m[j]);
        }
        tensor_from_doubles(u->own_values, w);
        tensor_from_doubles(s->sum[i], m);
        free(w);
        free(g);
        free(m);
    }
    return false;
}
static void *plug(Model *model) {
    Signs *s = host_alloc(sizeof *s);
    s->sum = host_alloc((size_t)model->params.units * sizeof *s->sum);
    for (int i = 0; i < model->params.units; i++) {
        s->sum[i] = tensor_like(MEMORY_OPTIMIZER, model->params.unit[i].own_values);
        op_fill(s->sum[i], 0);
    }
    model->sockets.step.context = s;
    model->sockets.step.accept = steps;
    return s;
}
static void unplug(Model *model, void *context) {
    Signs *s = context;
    for (int i = 0; i < model->params.units; i++) tensor_free(&s->sum[i]);
    free(s->sum);
    free(s);
}
static void price(Price *price, const Model *model, const void *context) {
    const Signs *s = context;
    for (int i = 0; i < model->params.units; i++)
        price->more[MEMORY_OPTIMIZER] += (double)tensor_bytes(s->sum[i]);
}
static void check(const Config *c) {
    CHECK(c->optimizer == OPTIMIZER_SGD, "signs steps in the optimizer's place: --optimizer sgd would fit");
}
static const Technique signs = {
    .name = "signs", .check = check, .plug = plug, .unplug = unplug, .price = price};

int main(int argc, char **argv) {
    const Program program = {
        .purpose = "Another optimizer.",
        .claim = "ranks step as one device does",
        .defaults = "layers=2 hidden=48 heads=6 kv-heads=2 seq=31 dtype=f64 steps=3 optimizer=sgd lr=0.01",
        .natural = 2,
        .baseline = (const Technique *[]){&signs, &recompute, NULL},
        .techniques = (const Technique *[]){&signs, &zero1, &recompute, NULL}};
    return program_main(argc, argv, &program);
}
END
compiles signs && proves signs
report $? "an optimizer in the step socket, on the parts that ZeRO-1 leaves it"
proves signs --no-check --steps 30 --sample 0 && grep -q 'step 30/30 .* lr 1.0e-02' "$out"
report $? "it trains for real, at a rate that is shown"
run "$work/signs" "${text[@]}" --optimizer adamw
one_line $? -F "signs steps in the optimizer's place: --optimizer sgd would fit"
report $? "a technique's own refusal is one sentence"
finish
