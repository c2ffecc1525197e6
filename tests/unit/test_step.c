// test_step.c: what a whole training step asks of its device besides computing: how often the host waits,
// in how many operations gradients are measured and weights stepped, what memory the heap holds, and whether
// memory is accessed for the first time. Runs on the CPU, and with the CUDA kernels on the emulator. TAP.
#include <malloc.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "00_single_gpu/training.h"
#include "tensor/clock.h"
#include "tensor/device.h"
#include "tensor/guard.h"

enum { LAYERS = 2 };
static char text_file[] = "/tmp/test_step_XXXXXX";

static int write_text(void **state) {
    (void)state;
    int file = mkstemp(text_file);
    assert_true(file >= 0);
    for (int i = 0; i < 400; i++) assert_int_equal(write(file, "a step.\n", 8), 8);
    return close(file);
}

static int remove_text(void **state) {
    (void)state;
    return unlink(text_file);
}

static Trainer *trainer_with(const char *more, Techniques techniques) {
    char *text = format_text(
        "layers=%d hidden=16 heads=2 kv-heads=1 ffn=20 vocab=256 seq=9 micro-batch=1 grad-acc=2 steps=9 %s",
        LAYERS, more);
    Config c = config_default(text);
    free(text);
    c.data = text_file;
    return trainer_new(&c, mesh_single(), techniques);
}

static Trainer *trainer_of(const char *more) { return trainer_with(more, NULL); }

// Of the emulated GPU: calls that may wait for the device, whoever makes them.
int64_t cuda_on_cpu_waits(void) __attribute__((weak));
static int64_t other_waits(void) { return cuda_on_cpu_waits ? cuda_on_cpu_waits() : 0; }

// Between the upload of the batch and the optimizer's step the host waits for the device once, for the loss
// and the squares of all gradients: it asks whether the stream is done, and makes no call that waits. (The
// host never waits for a CPU; the CUDA kernels on the emulator count.)
static void a_step_waits_once(void **state) {
    (void)state;
    Trainer *t = trainer_of("dtype=bf16");
    train_step(t, NULL);  // the device's start-up is not part of a step's cost
    for (int step = 0; step < 2; step++) {
        int64_t reads = device_reads(), waits = backend_waits(), others = other_waits();
        train_step(t, NULL);
        assert_int_equal(device_reads() - reads, 1);
        assert_int_equal(other_waits() - others, 0);
        assert_int_equal(backend_waits() - waits, backend_is_host() ? 0 : 1);
    }
    trainer_free(t);
}

// While a trace is on, an operation ends when the device has done it: its time is not that of the launch.
static void a_traced_operation_waits_for_the_device(void **state) {
    (void)state;
    const Event *event;
    int64_t operations = 0;
    Trainer *t = trainer_of("dtype=bf16");
    train_step(t, NULL);
    const int64_t waits = backend_waits();
    clock_trace_start();
    train_step(t, NULL);
    const int64_t events = clock_events(&event);
    for (int64_t i = 0; i < events; i++) operations += event[i].kind == EVENT_OPERATION;
    assert_true(operations > 50);
    assert_true(backend_is_host() || backend_waits() - waits >= operations);
    trainer_free(t);
}

// Neighbours in a unit that are stepped the same way are one range. Decay splits a block into norm | q k v
// o | norm | gate up down, and the head into norm | head; without it a unit is one range.
static void a_step_takes_few_operations(void **state) {
    (void)state;
    static const struct {
        const char *settings, *optimizer;
        int calls;
    } cases[] = {{"dtype=f32 optimizer=adamw weight-decay=0.1", "adamw", 1 + 4 * LAYERS + 2},
                 {"dtype=bf16 optimizer=adamw weight-decay=0.1", "adamw", 1 + 4 * LAYERS + 2},
                 {"dtype=f32 optimizer=adamw weight-decay=0.1 tied=1", "adamw", 1 + 4 * LAYERS + 1},
                 {"dtype=f32 optimizer=adamw weight-decay=0", "adamw", LAYERS + 2},
                 {"dtype=f32 optimizer=sgd weight-decay=0.1", "sgd", LAYERS + 2}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Trainer *t = trainer_of(cases[i].settings);
        train_step(t, NULL);
        clock_reset();
        train_step(t, NULL);
        assert_int_equal(clock_operation(cases[i].optimizer).calls, cases[i].calls);
        // The norm: one pass over all gradients, one sum for each weight.
        const Params *p = &t->model->params;
        double bytes = (double)tensor_bytes(params_total_grad(p)) + 8 * p->count;
        assert_int_equal(clock_operation("squares_of_ranges").calls, 1);
        assert_true(clock_operation("squares_of_ranges").bytes == bytes);
        trainer_free(t);
    }
}

// State that is stored in fewer bits than it is stepped in is widened for the step, and may have scales: so
// it is stepped weight by weight.
static void narrow_moments(Recipe *recipe, const Config *config) {
    (void)config;
    recipe->moment = BF16;
}
static const Technique narrow = {.name = "narrow moments", .recipe = narrow_moments};

static void narrow_state_is_stepped_weight_by_weight(void **state) {
    (void)state;
    Trainer *t = trainer_with("dtype=f32 optimizer=adamw", (const Technique *[]){&narrow, NULL});
    clock_reset();
    train_step(t, NULL);
    assert_int_equal(clock_operation("adamw").calls, t->model->params.count);
    trainer_free(t);
}

// A weight is what its master is stored as, not what the step computed before that was rounded: a resumed run
// has no other number to go on from.
static void narrow_masters(Recipe *recipe, const Config *config) {
    (void)config;
    recipe->master = BF16;
}
static const Technique narrow_master = {.name = "narrow masters", .recipe = narrow_masters};

static void a_weight_is_what_its_master_is_stored_as(void **state) {
    (void)state;
    Trainer *t = trainer_with("dtype=f32 optimizer=adamw", (const Technique *[]){&narrow_master, NULL});
    train_step(t, NULL);
    for (int i = 0; i < t->model->params.units; i++) {
        const Tensor weights = t->model->params.unit[i].own_values, masters = t->optimizer.unit[i].master;
        assert_int_equal(masters.dtype, BF16);
        const int64_t count = tensor_count(weights);
        double *weight = host_alloc((size_t)count * sizeof *weight);
        double *master = host_alloc((size_t)count * sizeof *master);
        tensor_to_doubles(weight, weights);
        tensor_to_doubles(master, masters);
        for (int64_t j = 0; j < count; j++)
            if (weight[j] != master[j])
                fail_msg("unit %d, element %lld: the weight is %.9g, its master %.9g", i, (long long)j,
                         weight[j], master[j]);
        free(weight);
        free(master);
    }
    trainer_free(t);
}

// Guarded memory is never reused, nor is what a sanitizer frees, nor the emulator's.
static bool memory_comes_back(void) {
#ifdef __SANITIZE_ADDRESS__
    return false;
#endif
    return !guard_asked() && backend_is_host();
}

// What a step allocates beside its tensors must not keep the heap from joining what they free: then it
// holds little more than they do.
static void a_step_fragments_no_heap(void **state) {
    (void)state;
    if (!memory_comes_back()) return;
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    Trainer *t = trainer_of("vocab=8192 seq=256 micro-batch=8");
    memory_reset_peak();
    for (int step = 1; step <= 2; step++) train_step(t, NULL);
    getrusage(RUSAGE_SELF, &after);
    double account = (double)memory_account().peak_total;
    double resident = 1024.0 * (double)(after.ru_maxrss - before.ru_maxrss);
    print_message("# account %s, resident memory grew by %s\n", bytes_text(account), bytes_text(resident));
    if (resident > 1.15 * account) fail_msg("the heap holds %.2f times the tensors", resident / account);
    trainer_free(t);
    malloc_trim(0);  // the tests below find a heap without pages
}

// Memory is aligned. What is cut off for that must not leave what is freed too small for its own size: then
// pipelines and ZeRO-3, which free some tensors between others, would hold up to twice their account.
static void freed_memory_fits_its_own_size(void **state) {
    (void)state;
    if (!memory_comes_back()) return;
    enum { BLOCKS = 64 };
    const size_t bytes = (1 << 20) + 4;
    void *memory[BLOCKS], *freed[BLOCKS];
    for (int i = 0; i < BLOCKS; i++) memory[i] = backend_alloc(bytes);
    for (int i = 0; i < BLOCKS; i++) assert_int_equal((uintptr_t)memory[i] % 64, 0);
    for (int i = 0; i < BLOCKS; i += 2) backend_free(freed[i] = memory[i]);
    int again = 0;
    for (int i = 0; i < BLOCKS; i += 2) {
        memory[i] = backend_alloc(bytes);
        for (int j = 0; j < BLOCKS; j += 2) again += memory[i] == freed[j];
    }
    print_message("# %d of %d pieces were used again\n", again, BLOCKS / 2);
    assert_int_equal(again, BLOCKS / 2);
    for (int i = 0; i < BLOCKS; i++) backend_free(memory[i]);
    malloc_trim(0);  // as above
}

// Nor may anything that stays lie between tensors: with experts sizes change from step to step, and what
// small ones leave must hold a large one.
static void freed_neighbours_become_one_piece(void **state) {
    (void)state;
    if (!memory_comes_back()) return;
    enum { TENSORS = 300, COUNT = 1 << 16 };
    static Tensor t[TENSORS];
    for (int i = 0; i < TENSORS; i++) t[i] = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(COUNT));
    char *low = t[0].storage->memory, *high = low;
    for (int i = 0; i < TENSORS; i++) {
        char *memory = t[i].storage->memory;
        if (memory < low) low = memory;
        if (memory > high) high = memory;
    }
    for (int i = 0; i < TENSORS; i++) tensor_free(&t[i]);
    for (int i = 0; i < 3; i++) t[i] = tensor_new(MEMORY_ACTIVATION, F32, SHAPE(TENSORS / 4 * COUNT));
    for (int i = 0; i < 3; i++) {
        char *memory = t[i].storage->memory;
        assert_true(memory >= low && memory <= high);
        tensor_free(&t[i]);
    }
    malloc_trim(0);  // as above
}

// The next step reuses what a step frees, and accesses no page for the first time. With the logits, it is
// more than a heap keeps by default.
static void a_step_faults_no_page(void **state) {
    (void)state;
    static const char *const settings[] = {"dtype=f32", "dtype=bf16", "dtype=bf16 recompute=full"};
    for (int i = 0; i < 3 && memory_comes_back(); i++) {
        char *text = format_text("vocab=8192 seq=256 micro-batch=2 %s", settings[i]);
        Trainer *t = trainer_of(text);
        free(text);
        long faults = 0;
        for (int step = 1; step <= 3; step++) {
            struct rusage before, after;
            getrusage(RUSAGE_SELF, &before);
            train_step(t, NULL);
            getrusage(RUSAGE_SELF, &after);
            faults = after.ru_minflt - before.ru_minflt;
            print_message("# step %d: %ld page faults\n", step, faults);
        }
        if (faults >= 100) fail_msg("%s: the third step touches %ld pages anew", settings[i], faults);
        trainer_free(t);
    }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0);  // a page of 2 MB would be one fault
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_step_fragments_no_heap),  // first, as it measures the peak of the process
        cmocka_unit_test(freed_memory_fits_its_own_size),
        cmocka_unit_test(freed_neighbours_become_one_piece),
        cmocka_unit_test(a_step_waits_once),
        cmocka_unit_test(a_step_takes_few_operations),
        cmocka_unit_test(narrow_state_is_stepped_weight_by_weight),
        cmocka_unit_test(a_weight_is_what_its_master_is_stored_as),
        cmocka_unit_test(a_step_faults_no_page),
        cmocka_unit_test(a_traced_operation_waits_for_the_device),  // last, as a trace goes on
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, write_text, remove_text);
}
