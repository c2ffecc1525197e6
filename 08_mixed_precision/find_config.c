// find_config.c: finds the layouts that train a model fastest on a cluster, and says how far to trust the
// figure. Playbook: "Finding the Best Training Configuration", "Benchmarking thousands of configurations".
//
// Eight factors are fitted to published runs. Seven set the clock: six shares of peaks and bandwidths that
// real programs reach, and the size of a multiply that reaches half of its rate. The eighth, the share of
// communication that is hidden, is for the steps of other programs (cost.c). With this clock the search
// makes two passes, in one process that stands for all ranks:
//
//     every layout           closed forms of what a rank holds and how long a step takes, from a dry run of
//                            one block that many layouts share: microseconds each
//     the best of them       clocked: one stage by dry steps of few layers (cost_lone_step.c), several by
//                            dry steps of all stages (cost_lone_pipeline.c)
//
// How far to trust it: each published run (published.csv) that this book's programs could make is priced as
// the search would, with factors fitted without its series; the median error is printed beside the step's
// time.
//
// Bytes sent and memory per rank: the sums of the records' closed forms.
// Run: build/08_mixed_precision/find_config --model llama-3-70b --gpus 512 --batch-tokens 4M --seq 8192
//      build/08_mixed_precision/find_config --runs 08_mixed_precision/published.csv
// Last line: PASS find_config: the fastest of … layouts takes … s a step …
#include "find_config.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "00_single_gpu/formulas.h"
#include "report/report.h"

#ifndef NO_MAIN

// "4M": tokens, with K, M or G for powers of 1024.
static int64_t tokens_of(const char *text) {
    char *end;
    double number = strtod(text, &end);
    double unit = *end == 'K' ? 1024 : *end == 'M' ? 1 << 20 : *end == 'G' ? 1 << 30 : 1;
    if (unit > 1) end++;
    CHECK(end > text && !*end && number >= 1 && number * unit < 1e15,
          "--batch-tokens %s is no number of tokens: 4M would fit, which is 4194304", text);
    return (int64_t)(number * unit);
}

static Goal goal_of(const Config *c, int64_t gpus, const char *batch) {
    int64_t tokens = tokens_of(batch);
    CHECK(c->dtype == BF16, "--dtype %s: the cost model knows bf16; leave it out",
          dtype_name((DType)c->dtype));
    CHECK(tokens % c->seq == 0, "--batch-tokens %s is not divisible by --seq %ld: %lld would fit", batch,
          c->seq, (long long)((tokens / c->seq + 1) * c->seq));
    Goal goal = {.model = *c, .gpus = (int)gpus, .sequences = tokens / c->seq};
    // 5% are left for libraries and the allocator.
    goal.memory = 0.95 * machine_find(c->machine)->memory_bytes;
    return goal;
}

// From here on the model clock runs at the speed that real programs reach on this machine.
static void reach(const char *machine) {
    Factors fitted = factors_fitted();
    CostTable table = cost_table(machine_find(machine), &fitted, 1);
    cost_table_clock(&table);
}

// With the best sharding, ZeRO-3, all GPUs together hold the states of one model: weights, sums of gradients
// and optimizer state, 18 bytes per parameter. Only units in use have 16-bit gradients (zero.c).
static void report_none(const Goal *goal, int64_t legal) {
    MemoryPlan plan = {.model = goal->model, .f32_gradients = true, .tp = 1, .dp = 1};
    MemoryNeed need = memory_states(&plan, (double)config_parameters(&goal->model));
    double filled = ceil((memory_states_bytes(&need) - need.gradients) / goal->memory);
    const char *s = plural(goal->gpus);
    if (legal == 0)
        report_that(
            false,
            "no layout of %d GPU%s is legal: dp x pp x cp x tp is %d, where dp divides the "
            "sequences of a step (%lld), of which a rank takes at most %d, pp is at most the number "
            "of layers (%ld), tp divides the heads (%ld), and it and the heads of K/V (%ld) divide "
            "one another, and tp and cp are powers of two",
            goal->gpus, s, goal->gpus, (long long)goal->sequences, MICRO_BATCH_MOST * MICRO_BATCHES_MOST,
            goal->model.layers, goal->model.heads, goal->model.kv_heads);
    else if (filled > goal->gpus)
        report_that(false,
                    "no layout of %d GPU%s fits: weights, gradients and optimizer state alone fill %.0f",
                    goal->gpus, s, filled);
    else
        report_that(false, "no layout of %d GPU%s fits: it takes more --gpus, or a shorter --seq",
                    goal->gpus, s);
}

static int show_search(const Goal *goal) {
    device_dry_run(true);
    comm_stand_for_all(true);
    clock_t began = clock();
    Search found = search(goal, 10);
    double seconds = (double)(clock() - began) / CLOCKS_PER_SEC;
    say("\n%lld tokens a step are %lld sequence%s of %ld: micro-batch x dp x micro-batches",
        (long long)(goal->sequences * goal->model.seq), (long long)goal->sequences, plural(goal->sequences),
        goal->model.seq);
    search_print(goal, &found);
    say("\nmeasured here: %.1f s of one core for %lld layouts", seconds, (long long)found.legal);
    if (found.count == 0) report_none(goal, found.legal);
    double step = found.count > 0 ? found.best[0].time.step : 0;
    long long legal = (long long)found.legal;
    free(found.best);
    return report_verdict("the fastest of %lld layouts takes %.3f s a step", legal, step);
}

// Nothing that was typed is ignored. Files are NULL where they were not.
static void check_typed(const Config *c, const Option *own, int count, const char *runs, bool agreement,
                        bool asks_rules, bool refit, const char *fitted, const char *map,
                        const char *curves_file) {
    const char *instead = runs ? "--runs" : agreement ? "--agree" : asks_rules ? "--rules" : NULL;
    CHECK(runs || !refit, "--fit is of published runs: add --runs FILE");
    CHECK(runs || !fitted, "--fitted is of published runs: add --runs FILE");
    CHECK((runs != NULL) + agreement + asks_rules <= 1,
          "--runs, --agree and --rules each take the place of the search: give one of them");
    CHECK(!map || !instead, "--heat-map is drawn beside a search: leave out %s", instead);
    CHECK(!curves_file || !instead || asks_rules,
          "--curves is drawn beside a search or --rules: leave out %s", instead);
    const char *unread = option_given(own, count, "gpus batch-tokens machine gpus-per-node");
    CHECK(!instead || !unread, "%s has models and clusters of its own: leave out --%s", instead, unread);
    CHECK(!instead || !(c->shape_given || c->seq_given),
          "%s has models of its own: leave out --model and the flags of its shape", instead);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const char *runs_path = NULL, *json = NULL, *batch = NULL, *machine = NULL, *map = NULL,
               *curves_file = NULL, *fitted = NULL;
    bool refit = false, agreement = false, asks_rules = false;
    int64_t gpus, per_node;
    Option own[] = {
        {"gpus", OPTION_INT, &gpus, "64", 1, 65536, "", "GPUs of the cluster", false},
        {"machine", OPTION_TEXT, &machine, "dgx-h100", 0, 0, machine_names(),
         "kind of nodes, from the model clock's table of machines", false},
        {"gpus-per-node", OPTION_INT, &per_node, "0", 0, 1024, "", "GPUs per node; 0: as --machine has",
         false},
        {"batch-tokens", OPTION_TEXT, &batch, "4M", 0, 0, "TOKENS", "tokens in a step: 4M is 4 x 2^20",
         false},
        {"runs", OPTION_TEXT, &runs_path, NULL, 0, 0, "FILE.csv",
         "predict these published runs, a table with the columns of published.csv", false},
        {"fit", OPTION_FLAG, &refit, NULL, 0, 0, "", "with --runs: fit the factors on these runs anew",
         false},
        {"fitted", OPTION_OUTPUT, &fitted, NULL, 0, 0, "FILE.h",
         "with --runs: write the factors and their errors as the header that the next build reads", false},
        {"agree", OPTION_FLAG, &agreement, NULL, 0, 0, "",
         "compare layouts of 8 GPUs with dry runs on 8 ranks: bytes, peaks, seconds", false},
        {"rules", OPTION_FLAG, &asks_rules, NULL, 0, 0, "",
         "when communication hides, throughput by degree, and the playbook's rules asked of the search",
         false},
        {"heat-map", OPTION_OUTPUT, &map, NULL, 0, 0, "FILE.svg",
         "the best layouts of four model sizes on 1 to 64 nodes, 1M tokens a step", false},
        {"curves", OPTION_OUTPUT, &curves_file, NULL, 0, 0, "FILE.svg",
         "throughput of a GPU by degree: tp, pp, ZeRO-3 and dp across nodes", false},
        {"json", OPTION_OUTPUT, &json, NULL, 0, 0, "FILE", "write every figure at full precision", false},
    };
    Config c = config_parse(argc, argv,
                            "Finds the fastest layouts of a model on a cluster, and says how far to "
                            "trust them.",
                            CONFIG_MODEL | CONFIG_EXPERTS,
                            "model=llama-3-8b seq=4096 dtype=bf16 optimizer=adamw micro-batch=1", own,
                            sizeof own / sizeof *own);
    check_typed(&c, own, sizeof own / sizeof *own, runs_path, agreement, asks_rules, refit, fitted, map,
                curves_file);
    c.machine = machine;
    machine_find(machine);
    Goal goal = goal_of(&c, gpus, batch);
    comm_start(argc, argv, agreement ? 8 : 1);
    if (json) report_json(json);
    int status;
    if (runs_path) {
        Runs runs = runs_read(runs_path);
        runs_report(&runs, refit, fitted);
        free(runs.run);
        status = report_verdict("published runs are predicted");
        return comm_finish(status);
    }
    reach(machine);
    clock_set_nodes((int)per_node);
    if (agreement) {
        agree();
        return comm_finish(report_verdict("layouts cost what their dry runs do"));
    }
    if (asks_rules) {
        overlap();
        curves(curves_file);
        rules();
        return comm_finish(report_verdict("the search obeys the playbook's rules"));
    }
    if (curves_file) curves(curves_file);
    if (map) heat_map(map, machine);
    return comm_finish(show_search(&goal));
}
#endif
