// zero_r.c: what else fills memory: replicated checkpoints, growing buffers, fragmentation. Playbook: "A3:
// ZeRO-R" in its table of contents, missing from its text; Rajbhandari et al. 2020, sections 6 and 8.
//
// Three measures besides the stages of ZeRO, each against memory that the stages leave:
//
//   partitioned checkpoints   ranks of tp hold the same input x (n tokens, h) of every block, and with full
//                             recomputation x is all that is kept. Each rank keeps only its part, and an
//                             all-gather reassembles x before the block's backward:
//                                 rank 0 [x0 . . .]  rank 1 [. x1 . .]  ...   ->   [x0 x1 x2 x3]
//   constant-size buffers     gradients are sent from one buffer whose size does not depend on the model's:
//                             a larger tensor goes in pieces, small ones go together
//   no fragmentation          checkpoints, and what flows from block to block, live longer than what is
//                             computed between them; mixed, they leave holes in which nothing fits. Copied
//                             to one tensor, allocated once (like gradients: params.h), they leave none.
//
// Memory per rank and block: n h e / tp instead of n h e (e bytes per element). Bytes sent per rank, block
// and micro-batch: (tp - 1) / tp n h e, a twelfth of what tensor parallelism with recomputation sends (6
// all-reduces of n h e). With sequence parallelism x is already sharded, and there is nothing to do.
// Run: build/02_zero/zero_r  (--ranks 3, --dtype bf16, --tied, --buffer-bytes 1000, --vocab 512 …)
// Last line: PASS zero_r: checkpoints are sharded, buffers and holes do not grow …
#include <math.h>
#include <stdlib.h>

#include "00_single_gpu/formulas.h"
#include "heap.h"
#include "zero.h"

// ---- partitioned activation checkpoints ----

// A place for this rank's part of a block's input: in the arena, which has one per block for one
// micro-batch at a time, else a new tensor.
static Tensor new_checkpoint(const ZeroR *z, const MicroBatch *micro, DType dtype, int64_t count,
                             int layer) {
    if (!z->contiguous || z->held[layer]) return tensor_new(MEMORY_ACTIVATION, dtype, SHAPE(count));
    z->held[layer] = micro->index >= 0;  // when not training, no backward would release it
    return tensor_share(tensor_view(z->arena, layer * z->part, SHAPE(count)));
}

// What flows from block to block outlives the tensors around it, so it moves to a place of its own, unless
// a weight gradient that is yet to be computed still holds the previous contents.
static void move_to_own_place(const ZeroR *z, Tensor *flowing) {
    if (!z->contiguous || z->flowing.storage->references > 1) return;
    Tensor place = tensor_view(z->flowing, 0, flowing->dims, flowing->shape);
    op_copy(place, *flowing);
    tensor_free(flowing);
    *flowing = tensor_share(place);
}

static void keep_own_part(void *context, Model *m, MicroBatch *micro, int layer) {
    const ZeroR *z = context;
    BlockKept *kept = micro->block[layer];
    block_drop(m, kept, true);
    int64_t first, count = zero_part(tensor_count(kept->x), z->tp.rank, z->tp.size, &first);
    Tensor own = new_checkpoint(z, micro, kept->x.dtype, count, layer);
    op_copy(own, tensor_view(kept->x, first, SHAPE(count)));
    tensor_free(&kept->x);
    kept->x = own;
    move_to_own_place(z, &micro->x);
}

static void gather_and_compute(void *context, Model *m, MicroBatch *micro, int layer) {
    const ZeroR *z = context;
    BlockKept *kept = micro->block[layer];
    move_to_own_place(z, &micro->dx);
    Tensor x = tensor_new(MEMORY_ACTIVATION, kept->x.dtype, SHAPE(micro->b * micro->s, m->config.hidden));
    int64_t first, counts[z->tp.size];
    for (int i = 0; i < z->tp.size; i++) counts[i] = zero_part(tensor_count(x), i, z->tp.size, &first);
    comm_wait(comm_all_gather(x, kept->x, counts, z->tp));
    if (z->contiguous && kept->x.storage == z->arena.storage) z->held[layer] = false;
    tensor_free(&kept->x);
    kept->x = x;
    Tensor y = block_compute(m, micro, layer);  // the next block has had its output already
    tensor_free(&y);
}

void zero_r_plug(Model *m, ZeroR *z) {
    const Config *c = &m->config;
    int64_t first, whole = c->micro_batch * c->seq * c->hidden;
    z->part = zero_part(whole, 0, z->tp.size, &first);
    if (z->contiguous) {
        z->arena = tensor_new(MEMORY_ACTIVATION, (DType)c->dtype, SHAPE(m->config.layers * z->part));
        z->flowing = tensor_new(MEMORY_ACTIVATION, (DType)c->dtype, SHAPE(whole));
        z->held = calloc((size_t)c->layers, sizeof *z->held);
        CHECK(z->held, "out of host memory for %ld places", c->layers);
    }
    m->sockets.activations.context = z;
    m->sockets.activations.after_forward = keep_own_part;
    m->sockets.activations.before_backward = gather_and_compute;
}

void zero_r_unplug(Model *m, ZeroR *z) {
    m->sockets.activations = sockets_single_device().activations;
    tensor_free(&z->arena);
    tensor_free(&z->flowing);
    free(z->held);
    z->held = NULL;
}

// ---- constant-size buffers ----

// Copies between the buffer and the gradients, starting at element *at of weight *param, until the buffer
// or the gradients end; advances *param and *at. Returns how many elements.
static int64_t fill(Params *params, Tensor buffer, int *param, int64_t *at, bool back) {
    int64_t used = 0, room = tensor_count(buffer);
    while (*param < params->count && used < room) {
        Tensor grad = param_total_grad(params, &params->param[*param]);
        int64_t left = tensor_count(grad) - *at, count = left < room - used ? left : room - used;
        Tensor here = tensor_view(buffer, used, SHAPE(count)), there = tensor_view(grad, *at, SHAPE(count));
        op_copy(back ? there : here, back ? here : there);
        used += count;
        *at += count;
        if (count == left) ++*param, *at = 0;
    }
    return used;
}

static void all_reduce_through_buffer(void *context, Model *m) {
    const ConstantBuffer *b = context;
    int param = 0, begun = 0;
    int64_t at = 0, first = 0;
    while (param < m->params.count) {
        int64_t count = fill(&m->params, b->buffer, &param, &at, false);
        comm_wait(comm_all_reduce(tensor_view(b->buffer, 0, SHAPE(count)), REDUCE_SUM, m->params.replicas));
        fill(&m->params, tensor_view(b->buffer, 0, SHAPE(count)), &begun, &first, true);
    }
}

void constant_buffer_plug(Model *m, ConstantBuffer *b) {
    DType dtype = m->params.recipe.sum;
    int64_t count = b->bytes / (int64_t)dtype_size(dtype), all = params_elements(&m->params);
    CHECK(count >= 1, "--buffer-bytes %lld: no element of a gradient fits in", (long long)b->bytes);
    b->buffer = tensor_new(MEMORY_COMMUNICATION, dtype, SHAPE(count < all ? count : all));
    m->sockets.gradients.context = b;
    m->sockets.gradients.finish = all_reduce_through_buffer;
}

void constant_buffer_unplug(Model *m, ConstantBuffer *b) {
    m->sockets.gradients = sockets_single_device().gradients;
    tensor_free(&b->buffer);
}

#ifndef NO_MAIN

// ---- checkpoints: their size, and the holes between them ----

typedef struct Way {
    const char *name;
    bool sharded, contiguous;
    Record record;
    Heap heap;  // for its activations
} Way;

// Makes the same run on every rank, since with tensor parallelism every rank of tp has the same x.
static void run(Way *way, const Config *config, Group tp) {
    Config c = *config;
    c.recompute = way->sharded ? RECOMPUTE_NONE : RECOMPUTE_FULL;
    heap_follow(&way->heap);
    Trainer *t = trainer_new(&c, mesh_single(), NULL);
    ZeroR z = {.tp = tp, .contiguous = way->contiguous};
    if (way->sharded) zero_r_plug(t->model, &z);
    way->record = train_record(t, way->name);
    for (int64_t layer = 0; z.held && layer < c.layers; layer++)
        report_that(!z.held[layer], "%s: the place of block %lld was never given back", way->name,
                    (long long)layer);
    zero_r_unplug(t->model, &z);
    trainer_free(t);
    heap_follow(NULL);
    int64_t left = memory_account().now[MEMORY_ACTIVATION];
    report_that(left == 0, "%s: %lld B of activations are left after the run", way->name, (long long)left);
}

// Bytes of block inputs that this rank keeps, over all blocks.
static double checkpoint_bytes(const Config *c, const Way *way, Group tp) {
    int64_t first, count = c->micro_batch * c->seq * c->hidden;
    if (way->sharded) count = zero_part(count, way->contiguous ? 0 : tp.rank, tp.size, &first);
    return (double)(c->layers * count) * (double)dtype_size((DType)c->dtype);
}

static void check_way(const Way *way, const Way *whole, const Config *config, Group tp) {
    Config full = *config;
    full.recompute = RECOMPUTE_FULL;
    double all = checkpoint_bytes(config, whole, tp), others = (double)kept_activation_bytes(&full) - all;
    if (config->verbose) say("\nCheckpoints %s:\n", way->name);
    // At the end of forward, what flows from block to block is the head's x, which is already counted.
    report_equal("activations kept", others + checkpoint_bytes(config, way, tp),
                 (double)way->record.kept_bytes, "B");
    if (!way->sharded) return;
    double times = (double)(config->steps * config->grad_acc), n = tp.size;
    CommCount gathers = comm_count("all_gather");
    report_equal("all-gathers", n > 1 ? times * (double)config->layers : 0, (double)gathers.calls, "");
    report_equal("bytes sent by all ranks", times * (n - 1) * all, comm_sum((double)gathers.bytes, tp),
                 "B");
    if (!config->no_check) report_compare(&way->record, &whole->record, PROOF_EXACT, bound_of(0));
}

static void print_ways(const Way *way, int ways, const Config *config, Group tp) {
    say("\nActivations of rank 0: what it keeps of the blocks' inputs, the most it holds at once, and how "
        "far the heap\n"
        "reaches if each tensor takes the lowest address at which it fits:\n");
    say("  %-28s %14s %14s %14s %12s\n", "checkpoints", "kept, bytes", "peak, bytes", "heap, bytes",
        "in holes");
    for (int i = 0; i < ways; i++) {
        const Heap *heap = &way[i].heap;
        say("  %-28s %14.0f %14ld %14ld %11.1f%%\n", way[i].name, checkpoint_bytes(config, &way[i], tp),
            heap->most_live, heap->end, 100.0 * (double)(heap->end - heap->most_live) / (double)heap->end);
        report_number(way[i].name, "most held", (double)heap->most_live, "B");
        report_number(way[i].name, "heap", (double)heap->end, "B");
    }
}

static int64_t holes(const Way *way) { return way->heap.end - way->heap.most_live; }

// First fit may leave holes among a block's own tensors, but however many blocks there are, none between
// their checkpoints.
static void one_block_more(const Way *contiguous, const Config *config, Group tp) {
    Config larger = *config;
    larger.layers++, larger.steps = 1;
    Way more = {.name = "of one block more", .sharded = true, .contiguous = true};
    run(&more, &larger, tp);
    report_equal("bytes in holes, with one block more", (double)holes(contiguous), (double)holes(&more), "B");
    record_free(&more.record);
    heap_free(&more.heap);
}

static void checkpoints(const Config *config, Group tp) {
    enum { WHOLE, SHARDED, CONTIGUOUS, WAYS };
    Way way[WAYS] = {
        {.name = "whole"}, {.name = "sharded"}, {.name = "sharded, all in one tensor", .contiguous = true}};
    for (int i = 0; i < WAYS; i++) {
        way[i].sharded = i != WHOLE;
        run(&way[i], config, tp);
        check_way(&way[i], &way[WHOLE], config, tp);
    }
    print_ways(way, WAYS, config, tp);
    one_block_more(&way[CONTIGUOUS], config, tp);
    for (int i = 0; i < WAYS; i++) {
        record_free(&way[i].record);
        heap_free(&way[i].heap);
    }
}

// ---- buffers: their size when the model grows ----

static Record run_buffered(const Config *config, Mesh mesh, int64_t bytes, const char *title) {
    Trainer *t = trainer_new(config, mesh, NULL);
    ConstantBuffer b = {.bytes = bytes};
    constant_buffer_plug(t->model, &b);
    Record record = train_record(t, title);
    constant_buffer_unplug(t->model, &b);
    trainer_free(t);
    return record;
}

static Record run_ddp(const Config *config, Mesh mesh) {
    return program_record(config, mesh, (const Technique *[]){&ddp_no_sync, NULL}, false, false,
                          "all-reduce in place");
}

// Bytes of the last run, over all ranks: one rank's depend on how the elements divide, their sum does not.
static double bytes_summed(Mesh mesh) {
    return comm_sum((double)comm_count("all_reduce").bytes, mesh.world);
}

static int64_t buffer_bytes_of(const Record *record) { return record->memory.peak[MEMORY_COMMUNICATION]; }

// Compares gradients that went through a buffer with those summed in place: no bit differs, except over
// NCCL, which may add in a different order in each call.
static void compare_sums(const Config *config, Mesh mesh, const Record *through, const Record *in_place) {
    Config alone = program_on_one_device(config, mesh);
    alone.follows = through;
    if (comm_sums_in_rank_order()) report_compare(through, in_place, PROOF_EXACT, bound_of(0));
    else report_compare(through, in_place, train_proof(config), train_bound(&alone, false, in_place));
}

// With twice the blocks, a buffer for all gradients grows by those of the new blocks, a constant one not at
// all.
static void buffers(const Config *config, Mesh mesh, int64_t bytes) {
    Config larger = *config;
    larger.layers *= 2;
    double g = config->dtype == F64 ? 8 : 4;
    double one = g * (double)config_parameters(config), two = g * (double)config_parameters(&larger);
    if ((double)bytes > one) bytes = (int64_t)one;
    Record fused = run_buffered(config, mesh, INT64_MAX, "one buffer for all gradients");
    double at_once = bytes_summed(mesh);
    Record fused_larger = run_buffered(&larger, mesh, INT64_MAX, "the same");
    Record constant = run_buffered(config, mesh, bytes, "a constant buffer");
    int64_t calls = comm_count("all_reduce").calls;
    double in_turns = bytes_summed(mesh);
    Record constant_larger = run_buffered(&larger, mesh, bytes, "the same");
    Record in_place = run_ddp(config, mesh);
    say("\nThe buffer that gradients are sent from, for a model of %ld block%s and one of %ld:\n",
        config->layers, plural(config->layers), larger.layers);
    bool quiet = report_quiet(false);
    // A peak includes what the transport may need for itself, so only differences are checked.
    report_equal("a constant one grows by", 0,
                 (double)(buffer_bytes_of(&constant_larger) - buffer_bytes_of(&constant)), "B");
    report_equal("one for all gradients grows by", two - one,
                 (double)(buffer_bytes_of(&fused_larger) - buffer_bytes_of(&fused)), "B");
    report_equal("and exceeds the constant one by", one - (double)(bytes / (int64_t)g) * g,
                 (double)(buffer_bytes_of(&fused) - buffer_bytes_of(&constant)), "B");
    double times = ceil(one / g / (double)(bytes / (int64_t)g));
    if (mesh.dp.size > 1)
        report_equal("times the constant buffer fills", times,
                     (double)calls / (double)config->steps - 2, "");
    report_quiet(quiet);
    report_that(
        in_turns == at_once,
        "through the buffer all ranks send %.0f B, and with all gradients at once %.0f: of the last "
        "filling, only the part that it fills may be sent",
        in_turns, at_once);
    if (!config->no_check) {
        compare_sums(config, mesh, &constant, &in_place);
        compare_sums(config, mesh, &fused, &in_place);
    }
    Record *all[] = {&fused, &fused_larger, &constant, &constant_larger, &in_place};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) record_free(all[i]);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    int64_t buffer_bytes;
    Option own[] = {{"buffer-bytes", OPTION_INT, &buffer_bytes, "16384", 8, 1e12, "bytes",
                     "size of the buffer through which all gradients pass", false}};
    Config config = config_parse(
        argc, argv, "ZeRO-R: checkpoints without copies, buffers that do not grow, memory without holes.",
        CONFIG_MODEL | CONFIG_BATCH | CONFIG_OPTIMIZER | CONFIG_REPORT | CONFIG_CLUSTER | CONFIG_TRACE |
            CONFIG_CHECK | CONFIG_RANKS,
        "layers=3 hidden=48 heads=6 kv-heads=2 ffn=88 vocab=1024 seq=31 micro-batch=2 grad-acc=2 steps=3 "
        "dtype=f64 optimizer=adamw lr=0.001 clip=0.5",
        own, sizeof own / sizeof *own);
    comm_start(argc, argv, 4);
    MeshShape shape = {.dp = comm_ranks()};
    Mesh mesh = mesh_new(shape);
    report_json(config.json);
    report_quiet(!config.verbose);
    timeline_start(&config, mesh.world);
    mesh_print(&mesh, shape);
    config_print(&config);
    checkpoints(&config, mesh.world);
    buffers(&config, mesh, buffer_bytes);
    timeline_finish(&config, mesh.world);
    report_split(mesh.world.size, NULL);
    const char *proven = config.no_check ? "" : ", and no bit changes";
    return comm_finish(
        report_verdict("checkpoints are sharded, buffers and holes do not grow%s", proven));
}
#endif
