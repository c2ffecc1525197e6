// mesh.c: the grid of ranks. A rank's number is written in mixed radix, with tp as the fastest digit:
//
//     rank = ((pp DP + dp) CP + cp) TP + tp
//
// A rank's group on an axis is all ranks that differ from it only in that digit. Adjacent digits together
// form one digit, which can be split differently: dp, cp and tp together into expert_dp and ep, where ep is
// the faster.
#include "mesh.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "comm.h"

const char *line_name(Line line) {
    static const char *const names[COMM_LINES] = {"world", "tp", "cp", "pp", "pp back",
                                                  "dp",    "ep", "dp across", "ep across"};
    return names[line];
}

// ---- the axes ----

static const struct {
    const char *name;
    size_t place;  // offset in Mesh
    Line line;
} axes[MESH_AXES] = {
    {"world", offsetof(Mesh, world), LINE_WORLD},
    {"dp", offsetof(Mesh, dp), LINE_DP},
    {"pp", offsetof(Mesh, pp), LINE_PP_FORWARD},
    {"pp backward", offsetof(Mesh, pp_backward), LINE_PP_BACKWARD},
    {"cp", offsetof(Mesh, cp), LINE_CP},
    {"tp", offsetof(Mesh, tp), LINE_TP},
    {"ep", offsetof(Mesh, ep), LINE_EP},
    {"dp x cp", offsetof(Mesh, dp_cp), LINE_DP},
    {"expert dp", offsetof(Mesh, expert_dp), LINE_DP},
    {"tp x pp", offsetof(Mesh, tp_pp), LINE_WORLD},
    {"ep x pp", offsetof(Mesh, ep_pp), LINE_WORLD},
};

// `size` ranks, `stride` apart.
typedef struct Digit {
    int stride, size;
} Digit;

// The digit of an axis; tp x pp and ep x pp have a second, slower one.
static Digit digit_of(MeshShape s, MeshAxis axis, Digit *second) {
    int replica = s.tp * s.cp * s.dp;  // the ranks of a stage
    *second = (Digit){0, 1};
    switch (axis) {
        case AXIS_WORLD:
            return (Digit){1, replica * s.pp};
        case AXIS_TP_PP:
            *second = (Digit){replica, s.pp};
            return (Digit){1, s.tp};
        case AXIS_TP:
            return (Digit){1, s.tp};
        case AXIS_CP:
            return (Digit){s.tp, s.cp};
        case AXIS_DP:
            return (Digit){s.tp * s.cp, s.dp};
        case AXIS_DP_CP:
            return (Digit){s.tp, s.cp * s.dp};
        case AXIS_EP_PP:
            *second = (Digit){replica, s.pp};
            return (Digit){1, s.ep};
        case AXIS_EP:
            return (Digit){1, s.ep};
        case AXIS_EXPERT_DP:
            return (Digit){s.ep, replica / s.ep};
        default:  // pp, both ways
            return (Digit){replica, s.pp};
    }
}

static MeshShape complete(MeshShape s) {
    int *degrees[] = {&s.dp, &s.pp, &s.cp, &s.tp, &s.ep};
    for (int i = 0; i < 5; i++)
        if (*degrees[i] == 0) *degrees[i] = 1;
    return s;
}

int mesh_members(MeshShape shape, MeshAxis axis, int rank, int *members) {
    shape = complete(shape);
    Digit slow, fast = digit_of(shape, axis, &slow);
    int first = rank - rank / fast.stride % fast.size * fast.stride;
    if (slow.size > 1) first -= first / slow.stride % slow.size * slow.stride;
    for (int i = 0; i < slow.size; i++)
        for (int j = 0; j < fast.size; j++)
            members[i * fast.size + j] = first + i * slow.stride + j * fast.stride;
    return slow.size * fast.size;
}

Group *mesh_group(Mesh *mesh, MeshAxis axis) { return (Group *)((char *)mesh + axes[axis].place); }

Mesh mesh_single(void) {
    Mesh mesh;
    for (int axis = 0; axis < MESH_AXES; axis++)
        *mesh_group(&mesh, axis) = (Group){.size = 1, .name = "single", .line = axes[axis].line};
    return mesh;
}

Mesh mesh_standing_for_all(MeshShape s, int rank) {
    s = complete(s);
    Mesh mesh = mesh_single();
    int ranks = s.dp * s.pp * s.cp * s.tp;
    for (int axis = 0; axis < MESH_AXES; axis++) {
        int *members = host_alloc(sizeof *members * (size_t)ranks);
        Group group = {.name = axes[axis].name, .member = members, .line = axes[axis].line};
        group.size = mesh_members(s, axis, rank, members);
        while (members[group.rank] != rank) group.rank++;
        *mesh_group(&mesh, axis) = group;
    }
    return mesh;
}

void mesh_end(Mesh *mesh) {
    CHECK(!mesh->world.handle, "mesh_end: the groups of mesh_new live until comm_finish");
    for (int axis = 0; axis < MESH_AXES; axis++) free((int *)mesh_group(mesh, axis)->member);
    *mesh = mesh_single();
}

// ---- what fits ----

// The degrees as flags, without those that are 1: "--pp 2 x --tp 3".
static const char *degrees_text(MeshShape s, bool with_dp) {
    static char texts[2][128];
    static int turn;
    char *text = texts[turn++ % 2];
    const char *const names[] = {"dp", "pp", "cp", "tp"};
    int degrees[] = {s.dp, s.pp, s.cp, s.tp}, used = 0;
    text[0] = '\0';
    for (int i = with_dp ? 0 : 1; i < 4; i++)
        if (degrees[i] != 1 || (i == 0 && with_dp))
            used += snprintf(text + used, sizeof *texts - (size_t)used, "%s--%s %d", used ? " x " : "",
                             names[i], degrees[i]);
    return text;
}

static void check_ranks(MeshShape s, int ranks) {
    int64_t rest = (int64_t)s.pp * s.cp * s.tp, all = rest * s.dp;
    if (all == ranks) return;
    if (ranks % rest == 0)
        fatal("%s needs %lld rank%s, and there %s %d: --ranks %lld would fit, or --dp %lld",
              degrees_text(s, true), (long long)all, plural(all), ranks == 1 ? "is" : "are", ranks,
              (long long)all, (long long)(ranks / rest));
    fatal(
        "%s needs %lld ranks, and there %s %d: --ranks %lld would fit; with %d rank%s %s does not, "
        "whatever --dp",
        degrees_text(s, true), (long long)all, ranks == 1 ? "is" : "are", ranks, (long long)all, ranks,
        plural(ranks), degrees_text(s, false));
}

static void check_experts(MeshShape s) {
    int within = s.dp * s.cp * s.tp;
    if (within % s.ep == 0) return;
    MeshShape product = {.dp = s.dp, .pp = 1, .cp = s.cp, .tp = s.tp};
    char fits[256] = "";
    for (int ep = 1, used = 0; ep <= within && used < (int)sizeof fits - 16; ep++)
        if (within % ep == 0)
            used += snprintf(fits + used, sizeof fits - (size_t)used, "%s%d", used ? ", " : "", ep);
    fatal("--ep %d does not divide %s: %s would", s.ep, degrees_text(product, true), fits);
}

void mesh_check(MeshShape s, int ranks) {
    const char *const names[] = {"dp", "pp", "cp", "tp", "ep"};
    s = complete(s);
    int degrees[] = {s.dp, s.pp, s.cp, s.tp, s.ep};
    enum { MOST = 1 << 15 };  // so that the product of four axes fits in 64 bits
    for (int i = 0; i < 5; i++)
        CHECK(degrees[i] >= 1 && degrees[i] <= MOST, "--%s %d is out of bounds: it is from 1 to %d",
              names[i], degrees[i], MOST);
    check_ranks(s, ranks);
    check_experts(s);
}

Mesh mesh_new(MeshShape s) {
    int ranks = comm_ranks();
    mesh_check(s, ranks);
    s = complete(s);
    Mesh mesh;
    int *members = host_alloc(sizeof *members * (size_t)ranks);
    for (int axis = 0; axis < MESH_AXES; axis++) {
        int size = mesh_members(s, axis, comm_rank(), members);
        *mesh_group(&mesh, axis) = comm_group(axes[axis].name, axes[axis].line, members, size);
    }
    free(members);
    return mesh;
}

static void check_runs(Group group, int k) {
    CHECK(group.size == 1 || (k >= 1 && group.size % k == 0),
          "group %s: its %d ranks do not divide into runs of %d", group.name ? group.name : "?", group.size,
          k);
}

// `count` members of the group, from the first on, each `stride` after the one before.
static Group every(Group group, int first, int stride, int count, const char *name, Line line) {
    if (group.size == 1) return group;
    int *members = host_alloc(sizeof *members * (size_t)count);
    for (int i = 0; i < count; i++) members[i] = group.member[first + i * stride];
    Group part = comm_group(name, line, members, count);
    free(members);
    return part;
}

Group mesh_inside(Group group, int k, const char *name, Line line) {
    check_runs(group, k);
    return every(group, group.rank / k * k, 1, k, name, line);
}

Group mesh_across(Group group, int k, const char *name, Line line) {
    check_runs(group, k);
    return every(group, group.rank % k, k, group.size / k, name, line);
}

// "4 ranks on vm", "8 ranks on 2 hosts: a (4), b (4)"
static void print_hosts(void) {
    int ranks = comm_ranks(), hosts = 0;
    char text[512] = "";
    int used = 0;
    for (int r = 0; r < ranks; r++) {
        int before = 0, here = 0;  // ranks of this host: below r, and all
        for (int i = 0; i < ranks; i++)
            if (!strcmp(comm_host(i), comm_host(r))) here++, before += i < r;
        if (before) continue;
        if (used < (int)sizeof text - 80)
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%s (%d)", hosts ? ", " : "",
                             comm_host(r), here);
        hosts++;
    }
    const char *carrier = comm_carrier(), *before = *carrier ? ", " : "";
    if (hosts == 1) say("%d rank%s on %s%s%s", ranks, plural(ranks), comm_host(0), before, carrier);
    else say("%d ranks on %d hosts: %s%s%s", ranks, hosts, text, before, carrier);
}

// "dp 2: {0 2} {1 3} {4 6} {5 7}"
static void print_axis(MeshShape shape, MeshAxis axis, int ranks, int *members) {
    enum { WIDTH = 96 };
    char text[WIDTH + 16];
    int used = 0;
    for (int r = 0; r < ranks; r++) {
        int size = mesh_members(shape, axis, r, members);
        if (size == 1) return;
        if (r == 0) used = snprintf(text, sizeof text, "%s %d:", axes[axis].name, size);
        if (members[0] != r) continue;
        for (int j = 0; j < size && used < WIDTH; j++)
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%d", j ? " " : " {", members[j]);
        if (used < WIDTH) used += snprintf(text + used, sizeof text - (size_t)used, "}");
    }
    say("  %s%s", text, used < WIDTH ? "" : " …");
}

void mesh_print(const Mesh *mesh, MeshShape shape) {
    static const MeshAxis printed[] = {AXIS_DP, AXIS_PP, AXIS_CP, AXIS_TP, AXIS_EP};
    print_hosts();
    int ranks = mesh->world.size, *members = host_alloc(sizeof *members * (size_t)ranks);
    for (size_t i = 0; i < sizeof printed / sizeof *printed; i++)
        print_axis(shape, printed[i], ranks, members);
    free(members);
}
