// mesh.c: the grid of ranks. Rank numbers are written in a mixed base, tp the fastest digit:
//
//     rank = ((pp DP + dp) CP + cp) TP + tp
//
// An axis's group of a rank is the line through it along that digit.
#include "mesh.h"

#include <stdlib.h>
#include <string.h>

#include "comm.h"

Mesh mesh_single(void) {
    const Group one = {.size = 1, .rank = 0, .name = "single"};
    return (Mesh){.world = one, .dp = one, .pp = one, .cp = one, .tp = one, .ep = one};
}

// Members of the line through `rank`: `size` ranks, `stride` apart.
static void line(int rank, int stride, int size, int *members) {
    int first = rank - rank / stride % size * stride;
    for (int i = 0; i < size; i++) members[i] = first + i * stride;
}

typedef struct Axis {
    const char *name;
    int stride, size;
} Axis;

// In the order of Mesh, without the world. ep's lines are parts of dp's.
static void axes_of(MeshShape s, Axis *axes) {
    int dp_stride = s.tp * s.cp;
    axes[0] = (Axis){"dp", dp_stride, s.dp};
    axes[1] = (Axis){"pp", dp_stride * s.dp, s.pp};
    axes[2] = (Axis){"cp", s.tp, s.cp};
    axes[3] = (Axis){"tp", 1, s.tp};
    axes[4] = (Axis){"ep", dp_stride, s.ep};
}

static Group axis_group(Axis axis, int *members) {
    line(comm_rank(), axis.stride, axis.size, members);
    return comm_group(axis.name, members, axis.size);
}

// The degrees as flags, those of 1 left out: "--pp 2 x --tp 3".
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

Mesh mesh_new(MeshShape s) {
    const char *const names[] = {"dp", "pp", "cp", "tp", "ep"};
    int degrees[] = {s.dp, s.pp, s.cp, s.tp, s.ep}, ranks = comm_ranks();
    for (int i = 0; i < 5; i++)
        CHECK(degrees[i] >= 1 && degrees[i] <= 1 << 20, "--%s %d is out of bounds: at least 1", names[i],
              degrees[i]);
    int64_t rest = (int64_t)s.pp * s.cp * s.tp, all = rest * s.dp;
    if (all != ranks && ranks % rest == 0)
        fatal("%s needs %lld ranks, and there are %d: --ranks %lld would fit, or --dp %lld",
              degrees_text(s, true), (long long)all, ranks, (long long)all, (long long)(ranks / rest));
    if (all != ranks)
        fatal(
            "%s needs %lld ranks, and there are %d: --ranks %lld would fit; with %d ranks %s does not, "
            "whatever --dp",
            degrees_text(s, true), (long long)all, ranks, (long long)all, ranks, degrees_text(s, false));
    if (s.dp % s.ep != 0) {
        char fits[256] = "";
        for (int ep = 1, used = 0; ep <= s.dp && used < (int)sizeof fits - 16; ep++)
            if (s.dp % ep == 0)
                used += snprintf(fits + used, sizeof fits - (size_t)used, "%s%d", used ? ", " : "", ep);
        fatal("--ep %d does not divide --dp %d: %s would", s.ep, s.dp, fits);
    }
    Axis axes[5];
    axes_of(s, axes);
    int *members = host_alloc(sizeof *members * (size_t)ranks);
    line(0, 1, ranks, members);
    Mesh mesh = {.world = comm_group("world", members, ranks)};
    Group *groups[] = {&mesh.dp, &mesh.pp, &mesh.cp, &mesh.tp, &mesh.ep};
    for (int i = 0; i < 5; i++) *groups[i] = axis_group(axes[i], members);
    free(members);
    return mesh;
}

// "4 ranks on vm", "8 ranks on 2 hosts: a (4), b (4)"
static void print_hosts(void) {
    int ranks = comm_ranks(), hosts = 0, here = 0;
    char text[512] = "";
    int used = 0;
    for (int r = 0; r < ranks; r++) {
        here++;
        if (r + 1 < ranks && !strcmp(comm_host(r), comm_host(r + 1))) continue;
        if (used < (int)sizeof text - 80)
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%s (%d)", hosts ? ", " : "",
                             comm_host(r), here);
        hosts++;
        here = 0;
    }
    const char *carrier = comm_carrier(), *before = *carrier ? ", " : "";
    if (hosts == 1) say("%d rank%s on %s%s%s", ranks, ranks == 1 ? "" : "s", comm_host(0), before, carrier);
    else say("%d ranks on %d hosts: %s%s%s", ranks, hosts, text, before, carrier);
}

void mesh_print(const Mesh *mesh, MeshShape shape) {
    enum { WIDTH = 96 };
    print_hosts();
    Axis axes[5];
    axes_of(shape, axes);
    int ranks = mesh->world.size, *members = host_alloc(sizeof *members * (size_t)ranks);
    for (int i = 0; i < 5; i++) {
        if (axes[i].size == 1) continue;
        char text[WIDTH + 16];
        int used = snprintf(text, sizeof text, "%s %d:", axes[i].name, axes[i].size);
        for (int r = 0; r < ranks; r++) {
            line(r, axes[i].stride, axes[i].size, members);
            if (members[0] != r) continue;
            for (int j = 0; j < axes[i].size && used < WIDTH; j++)
                used +=
                    snprintf(text + used, sizeof text - (size_t)used, "%s%d", j ? " " : " {", members[j]);
            if (used < WIDTH) used += snprintf(text + used, sizeof text - (size_t)used, "}");
        }
        say("  %s%s", text, used < WIDTH ? "" : " …");
    }
    free(members);
}
