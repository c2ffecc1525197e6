// test_mesh.c [--ranks N] [PATTERN]: which rank is in which group of the process grid. TAP.
#include "ranks.h"

// ---- shapes that need no ranks ----

static int ranks_of(MeshShape s) { return s.dp * s.pp * s.cp * s.tp; }

// Every rank is in one group of this axis, at its place among the group's members, and the group has so many
// ranks.
static void expect_partition(MeshShape s, MeshAxis axis, int size) {
    int ranks = ranks_of(s), members[64], others[64];
    for (int r = 0; r < ranks; r++) {
        int count = mesh_members(s, axis, r, members), mine = 0;
        if (count != size)
            note("axis %d has %d members in dp %d pp %d cp %d tp %d ep %d, expected %d", axis, count, s.dp,
                 s.pp, s.cp, s.tp, s.ep, size);
        for (int i = 0; i < count; i++) {
            mine += members[i] == r;
            if (members[i] < 0 || members[i] >= ranks || (i && members[i] <= members[i - 1]))
                note("axis %d: member %d of rank %d is %d", axis, i, r, members[i]);
            else if (mesh_members(s, axis, members[i], others) != count ||
                     memcmp(members, others, sizeof *members * (size_t)count))
                note("axis %d: ranks %d and %d see different groups", axis, r, members[i]);
        }
        SAME(mine, 1);
    }
}

// Two axes are independent: a rank's groups along them have only that rank in common.
static void expect_independent(MeshShape s, MeshAxis a, MeshAxis b) {
    int first[64], second[64];
    for (int r = 0; r < ranks_of(s); r++) {
        int n_a = mesh_members(s, a, r, first), n_b = mesh_members(s, b, r, second), both = 0;
        for (int i = 0; i < n_a; i++)
            for (int j = 0; j < n_b; j++) both += first[i] == second[j];
        if (both != 1) note("axes %d and %d meet in %d ranks at rank %d", a, b, both, r);
    }
}

static void every_axis_parts_the_world(void) {
    uint64_t bits = 88172645463325252;
    for (int turn = 0; turn < 3000; turn++) {
        int degree[5];
        for (int i = 0; i < 5; i++) {
            bits ^= bits << 13, bits ^= bits >> 7, bits ^= bits << 17;
            degree[i] = 1 + (int)(bits % 6);
        }
        MeshShape s = {degree[0], degree[1], degree[2], degree[3], degree[4]};
        int within = s.dp * s.cp * s.tp;
        if (ranks_of(s) > 64 || within % s.ep) continue;
        const int sizes[MESH_AXES] = {
            [AXIS_WORLD] = ranks_of(s), [AXIS_DP] = s.dp,           [AXIS_PP] = s.pp,
            [AXIS_PP_BACKWARD] = s.pp,  [AXIS_CP] = s.cp,           [AXIS_TP] = s.tp,
            [AXIS_EP] = s.ep,           [AXIS_DP_CP] = s.dp * s.cp, [AXIS_EXPERT_DP] = within / s.ep,
            [AXIS_TP_PP] = s.tp * s.pp, [AXIS_EP_PP] = s.ep * s.pp};
        for (int axis = 0; axis < MESH_AXES; axis++) expect_partition(s, axis, sizes[axis]);
        const MeshAxis apart[][2] = {{AXIS_DP, AXIS_CP},        {AXIS_DP, AXIS_TP},
                                     {AXIS_DP, AXIS_PP},        {AXIS_CP, AXIS_TP},
                                     {AXIS_CP, AXIS_PP},        {AXIS_TP, AXIS_PP},
                                     {AXIS_EP, AXIS_EXPERT_DP}, {AXIS_EP, AXIS_PP},
                                     {AXIS_EXPERT_DP, AXIS_PP}, {AXIS_DP_CP, AXIS_TP_PP},
                                     {AXIS_EXPERT_DP, AXIS_EP_PP}};
        for (size_t i = 0; i < sizeof apart / sizeof *apart; i++)
            expect_independent(s, apart[i][0], apart[i][1]);
    }
}

// tp fastest, then cp, dp, pp; ep fastest within dp x cp x tp.
static void ranks_are_numbered_with_tp_fastest(void) {
    int members[64];
    MeshShape s = {.dp = 2, .pp = 2, .cp = 2, .tp = 2, .ep = 2};
    const struct {
        MeshAxis axis;
        int count, member[8];
    } of_rank_11[] = {{AXIS_TP, 2, {10, 11}},
                      {AXIS_CP, 2, {9, 11}},
                      {AXIS_DP, 2, {11, 15}},
                      {AXIS_PP, 2, {3, 11}},
                      {AXIS_EP, 2, {10, 11}},
                      {AXIS_DP_CP, 4, {9, 11, 13, 15}},
                      {AXIS_EXPERT_DP, 4, {9, 11, 13, 15}},
                      {AXIS_TP_PP, 4, {2, 3, 10, 11}},
                      {AXIS_EP_PP, 4, {2, 3, 10, 11}}};
    for (size_t i = 0; i < sizeof of_rank_11 / sizeof *of_rank_11; i++) {
        SAME(mesh_members(s, of_rank_11[i].axis, 11, members), of_rank_11[i].count);
        for (int j = 0; j < of_rank_11[i].count; j++) SAME(members[j], of_rank_11[i].member[j]);
    }
    s.ep = 4;
    SAME(mesh_members(s, AXIS_EP, 11, members), 4);
    for (int i = 0; i < 4; i++) SAME(members[i], 8 + i);
    SAME(mesh_members(s, AXIS_EXPERT_DP, 11, members), 2);
    SAME(members[1], 15);
}

static void the_mesh_has_a_line_for_each_axis(void) {
    Mesh mesh = mesh_new((MeshShape){.dp = n}), one = mesh_single();
    const Line lines[MESH_AXES] = {LINE_WORLD, LINE_DP, LINE_PP_FORWARD, LINE_PP_BACKWARD, LINE_CP,
                                   LINE_TP,    LINE_EP, LINE_DP,         LINE_DP,          LINE_WORLD,
                                   LINE_WORLD};
    for (int axis = 0; axis < MESH_AXES; axis++) {
        SAME(mesh_group(&mesh, axis)->line, lines[axis]);
        SAME(mesh_group(&one, axis)->line, lines[axis]);
        comm_wait(comm_barrier(*mesh_group(&mesh, axis)));
        comm_wait(comm_barrier(*mesh_group(&one, axis)));
    }
    SAME(mesh.dp_cp.size, n);
    SAME(mesh.expert_dp.size, n);
    SAME(mesh.tp_pp.size, 1);
}

// The memory for a group's members may be reused once it is freed.
static void end(const void *mesh) { mesh_end((Mesh *)mesh); }

static void groups_live_until_the_end(void) {
    Mesh mesh = mesh_new((MeshShape){.dp = n});
    const char *why = refusal(end, &mesh);
    if (!why || !strstr(why, "until comm_finish")) note("mesh_end takes groups of mesh_new");
}

static void check_degrees(const void *shape) { mesh_check(*(const MeshShape *)shape, 4); }

static void degrees_beyond_all_clusters_are_refused(void) {
    MeshShape large = {.dp = 1 << 18, .pp = 1 << 18, .cp = 1 << 18, .tp = 1 << 18};
    const char *why = refusal(check_degrees, &large);
    if (!why || !strstr(why, "--dp 262144 is out of bounds")) note("2^72 ranks: %s", why ? why : "fit");
    MeshShape longest = {.dp = 1 << 15, .pp = 1 << 15, .cp = 1 << 15, .tp = 1 << 15};
    why = refusal(check_degrees, &longest);
    if (!why || !strstr(why, "1152921504606846976 ranks")) note("2^60 ranks: %s", why ? why : "fit");
}

static void part(const void *k) { mesh_inside(comm_world(), *(const int *)k, "part", LINE_DP); }
static void part_across(const void *k) { mesh_across(comm_world(), *(const int *)k, "part", LINE_DP); }

static void runs_that_do_not_divide_are_refused(void) {
    const int wrong[] = {0, -1, n + 1, n > 2 ? n - 1 : 3};
    for (int i = 0; i < 8 && n > 1; i++) {  // a group of one stays as it is
        const char *why = refusal(i < 4 ? part : part_across, &wrong[i % 4]);
        char *expected = format_text("its %d ranks do not divide into runs of %d", n, wrong[i % 4]);
        if (!why || !strstr(why, expected)) note("runs of %d: %s", wrong[i % 4], why ? why : "fit");
        free(expected);
    }
    SAME(mesh_inside(comm_world(), n, "whole", LINE_DP).size, n);
    SAME(mesh_across(comm_world(), n, "alone", LINE_DP).size, 1);
}

static Group before_start;

static void the_world_grows_at_the_start(void) {
    SAME(before_start.size, 1);
    SAME(before_start.member[0], 0);
    SAME(comm_world().size, n);
    for (int i = 0; i < n; i++) SAME(comm_world().member[i], i);
}

static const RankTest tests[] = {
    TEST(every_axis_parts_the_world),          TEST(ranks_are_numbered_with_tp_fastest),
    TEST(the_mesh_has_a_line_for_each_axis),   TEST(groups_live_until_the_end),
    TEST(the_world_grows_at_the_start),        TEST(degrees_beyond_all_clusters_are_refused),
    TEST(runs_that_do_not_divide_are_refused),
};

int main(int argc, char **argv) {
    base_start(argc, argv);
    before_start = comm_world();
    const char *pattern = ranks_start(argc, argv, 2);
    return ranks_run(tests, sizeof tests / sizeof *tests, pattern);
}
