// test_waits.c [--ranks N] [PATTERN]: how often the host waits for its device in a step, in layouts of all
// chapters: once, for the loss and the norm, and with delayed scaling once more, for the history. Mixtures
// of experts wait in each layer: the number of a rank's rows is a size, and the host needs sizes. TAP.
#include <string.h>

#include "08_mixed_precision/five_d.h"
#include "comm/transport.h"
#include "ranks.h"
#include "tensor/device.h"

enum { MOST_WORDS = 64, MOST_OPTIONS = 128, EVERYTHING = ~0 };

static void add_option(Option *own, int *count, const Option *option) {
    for (int i = 0; i < *count; i++)
        if (!strcmp(own[i].name, option->name)) return;
    own[(*count)++] = *option;
}

static Config config_of(const char *flags, Techniques layouts) {
    static char text[512];
    static char *words[MOST_WORDS];
    static Option own[MOST_OPTIONS];
    int count = 0, options = 0;
    for (int i = 0; i < FIVE_D_OPTIONS; i++) add_option(own, &options, &five_d_options[i]);
    for (Techniques t = layouts; *t; t++)
        for (int i = 0; i < (*t)->options; i++) add_option(own, &options, &(*t)->option[i]);
    snprintf(text, sizeof text, "test_waits %s", flags);
    for (char *word = strtok(text, " "); word; word = strtok(NULL, " ")) words[count++] = word;
    return config_parse(count, words, "Tests.", EVERYTHING,
                        "layers=2 hidden=16 heads=4 kv-heads=4 ffn=16 vocab=256 seq=8 micro-batch=2 "
                        "grad-acc=2 steps=3 dtype=bf16",
                        own, options);
}

// Of the emulated GPU: calls that may wait for the device, whoever makes them.
int64_t cuda_on_cpu_waits(void) __attribute__((weak));
static int64_t other_waits(void) { return cuda_on_cpu_waits ? cuda_on_cpu_waits() : 0; }

// In every step except the first, the host waits `once` in any layout, and `passes` times for each of this
// rank's layers and micro-batches.
static void expect_waits_of(Techniques layouts, const char *flags, int once, int passes) {
    Config c = config_of(flags, layouts);
    if ((c.dp ? c.dp : 1) * c.pp * c.cp * c.tp != n) return;  // with sanitizers there are 3 ranks, else 4
    layout_check(&c, n, layouts);
    Mesh mesh = mesh_new(layout_shape(&c));
    Trainer *t = trainer_new(&c, mesh, layouts);
    train_step(t, NULL);
    int64_t reads = device_reads(), waits = backend_waits(), others = other_waits();
    train_step(t, NULL);
    reads = device_reads() - reads, waits = backend_waits() - waits, others = other_waits() - others;
    const int64_t expected = once + passes * c.layers / c.pp * c.grad_acc;
    if (reads != expected)
        note("%s: %lld reads, expected %lld", flags, (long long)reads, (long long)expected);
    if (others) note("%s: %lld calls that may wait for the device", flags, (long long)others);
    // With MPI each transfer of a GPU goes through the host.
    if (strstr(comm_carrier(), "NCCL") && waits != expected)
        note("%s: %lld waits, expected %lld", flags, (long long)waits, (long long)expected);
    trainer_free(t);
}

static void expect_waits(const char *flags, int once, int passes) {
    expect_waits_of(five_d_layouts(), flags, once, passes);
}

static void a_step_waits_once(void) {
    static const char *const layouts[] = {
        "--dp 4",
        "--dp 4 --zero 3 --dtype f16",
        "--dp 2 --tp 2 --zero 2",
        "--tp 4 --sp --vocab-parallel",
        "--tp 4 --sp --async-tp",
        "--tp 2 --cp 2 --context zigzag",
        "--cp 2 --dp 2 --context ulysses --recompute full",
        "--cp 4 --context all-gather",
        "--pp 2 --dp 2 --zero 1",
        "--pp 2 --tp 2 --schedule interleaved --layers 4",
        "--pp 2 --cp 2 --schedule zb_h1 --recompute full",
        "--pp 4 --schedule dualpipe_v --layers 8 --grad-acc 8",
        "--dp 3 --zero 1",
        "--pp 3 --layers 3",
        "--dp 2 --tp 2 --fp8 deepseek --fp8-tile 8",
        "--dp 4 --zero 1 --fp8 fp8-lm",
    };
    for (size_t i = 0; i < sizeof layouts / sizeof *layouts; i++) expect_waits(layouts[i], 1, 0);
    expect_waits("--dp 2 --tp 2 --fp8 te-delayed", 2, 0);
}

// The rows by expert of its own tokens and those of all ranks of --ep are read at once; when a layer is
// recomputed, again. With node-limited routing the tokens that have come to a node are counted, too.
static void a_mixture_waits_in_each_layer(void) {
    expect_waits("--dp 3 --ep 3 --experts 3", 1, 1);
    expect_waits("--dp 4 --experts 4", 1, 1);
    expect_waits("--dp 4 --ep 4 --experts 4", 1, 1);
    expect_waits("--dp 2 --tp 2 --sp --ep 2 --experts 4", 1, 1);
    expect_waits("--pp 2 --dp 2 --ep 2 --experts 4", 1, 1);
    expect_waits("--dp 4 --ep 2 --experts 4 --recompute full", 1, 2);
    expect_waits_of(node_limited_layouts(),
                    "--dp 4 --ep 4 --experts 4 --gpus-per-node 2 --moe deepseek --expert-groups 2", 1, 2);
}

static const RankTest tests[] = {
    TEST(a_step_waits_once),
    TEST(a_mixture_waits_in_each_layer),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *pattern = ranks_start(argc, argv, 4);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
