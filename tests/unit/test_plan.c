// test_plan.c: a run is held against its plan, of each rank and of each kind of memory. TAP.
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
// cmocka wants the headers above first.
#include <cmocka.h>

#include "08_mixed_precision/five_d.h"

enum { RANKS = 2 };

static int verdict(const RankPlan *plan, const RankPlan *run) {
    const Config c = config_default("");
    Mesh mesh = mesh_single();
    mesh.world.size = RANKS;  // only counted
    report_quiet(true);
    five_d_plan_compare(plan, run, mesh, &c);
    return report_verdict("as planned");
}

static void what_one_rank_holds_otherwise_is_told(void **state) {
    (void)state;
    static const struct {
        const char *what;
        size_t at;
    } fields[] = {{"weights", offsetof(RankPlan, weights)},
                  {"gradients", offsetof(RankPlan, gradients)},
                  {"optimizer", offsetof(RankPlan, optimizer)},
                  {"activations", offsetof(RankPlan, activations)},
                  {"seconds", offsetof(RankPlan, step_seconds)}};
    // Ranks hold other amounts, as unequal stages do.
    RankPlan plan[RANKS] = {
        {.weights = 100, .gradients = 200, .optimizer = 300, .activations = 400, .step_seconds = 1},
        {.weights = 110, .gradients = 220, .optimizer = 330, .activations = 440, .step_seconds = 2}};
    assert_int_equal(verdict(plan, plan), STATUS_PASS);
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        for (int rank = 0; rank < RANKS; rank++) {
            RankPlan run[RANKS];
            memcpy(run, plan, sizeof run);
            // What the other rank holds.
            memcpy((char *)&run[rank] + fields[i].at, (char *)&plan[1 - rank] + fields[i].at,
                   sizeof(double));
            if (verdict(plan, run) != STATUS_FAIL)
                fail_msg("rank %d has the other's %s, and that is as planned", rank, fields[i].what);
        }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {cmocka_unit_test(what_one_rank_holds_otherwise_is_told)};
    return cmocka_run_group_tests_name("plan", tests, NULL, NULL);
}
