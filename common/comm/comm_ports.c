// comm_ports.c: how much a call sends to which member, through which port of the modelled machine, and when.
#include <string.h>

#include "comm_inside.h"
#include "tensor/clock.h"

// The port to the ranks of the same node, and the port to those of other nodes.
enum { PORT_NODE, PORT_NETWORK, PORTS };

// The port that leads to this member; -1: this rank itself.
static int port_to(Group group, int member) {
    if (member == group.rank) return -1;
    int mine = clock_node(world_rank(group, group.rank));
    return clock_node(world_rank(group, member)) == mine ? PORT_NODE : PORT_NETWORK;
}

// ---- what a call sends, and through which port ----

// Elements that this rank sends to another member, as comm.h says for each kind.
static int64_t elements_to(const Collective *c, int member) {
    const int64_t *in = c->in_counts, *out = c->out_counts;
    int me = c->group.rank;
    bool from_root = me == c->root, to_root = member == c->root;
    if (c->kind == ALL_REDUCE) return in[member] + in[me];  // the member's piece, and the sum of mine
    if (c->kind == REDUCE) return in[member] + (to_root ? in[me] : 0);
    if (c->kind == REDUCE_SCATTER || c->kind == ALL_TO_ALL) return in[member];
    if (c->kind == ALL_GATHER) return out[me];
    if (c->kind == GATHER) return to_root ? out[me] : 0;
    if (c->kind == SCATTER) return from_root ? in[member] : 0;
    if (c->kind == BROADCAST) return from_root ? in[0] : 0;
    return 0;  // a barrier
}

// Adds bytes to or from a member to the traffic of the port that leads there.
static void add_traffic(Group group, Traffic *traffic, int member, double sent, double received) {
    int port = port_to(group, member);
    if (port < 0) return;
    traffic[port].peers++;
    traffic[port].sent += sent;
    traffic[port].received += received;
}

// Sets by port what a call sends and, for direct messages, what it receives, which the clock needs.
static void add_call(const Collective *c, Traffic *traffic) {
    double size = (double)dtype_size(c->dtype);
    for (int i = 0; i < c->group.size && c->kind != TRANSFERS; i++)
        add_traffic(c->group, traffic, i, size * (double)elements_to(c, i),
                    c->kind == ALL_TO_ALL ? size * (double)c->out_counts[i] : 0);
    for (int i = 0; i < c->transfer_count; i++) {
        const Transfer *t = &c->transfers[i];
        double bytes = (double)tensor_bytes(t->t);
        add_traffic(c->group, traffic, t->peer, t->send ? bytes : 0, t->send ? 0 : bytes);
    }
}

// ---- how long that takes, and when ----

// On the modelled machine: the nodes that have members of a group, the smallest number on any of them,
// where a ring is narrowest, and the number on one member's.
typedef struct Spread {
    int nodes, least, beside;
} Spread;

static Spread spread_of(Group group, int member) {
    Spread s = {.least = group.size};
    int count = 0;
    for (int i = 0; i < group.size; i++) {
        int node = clock_node(world_rank(group, i));
        if (node >= count) count = node + 1;
    }
    int here[count];
    memset(here, 0, sizeof here);
    for (int i = 0; i < group.size; i++) here[clock_node(world_rank(group, i))]++;
    for (int node = 0; node < count; node++) {
        if (here[node] > 0) s.nodes++;
        if (here[node] > 0 && here[node] < s.least) s.least = here[node];
    }
    s.beside = here[clock_node(world_rank(group, member))];
    return s;
}

static double seconds_of(const Request *r, Traffic node, Traffic network) {
    const Collective *c = &r->call;
    if (c->kind == TRANSFERS) return clock_transfers_seconds(node, network);
    if (c->kind == ALL_TO_ALL) return clock_all_to_all_seconds(node, network);
    double bytes = (double)r->total * (double)dtype_size(c->dtype);
    bool direct = c->kind == GATHER || c->kind == SCATTER;
    Spread s = spread_of(c->group, direct ? c->root : 0);
    return clock_collective_seconds(kind_names[c->kind], bytes, c->group.size, s.nodes,
                                    direct ? s.beside : s.least);
}

// Which ports a call uses. A receive uses none: it occupies the sender's port.
static void used_ports(const Collective *c, const Traffic *traffic, bool *used) {
    for (int port = 0; port < PORTS; port++) used[port] = c->kind != TRANSFERS && traffic[port].peers > 0;
    for (int i = 0; i < c->transfer_count; i++) {
        int port = c->transfers[i].send ? port_to(c->group, c->transfers[i].peer) : -1;
        if (port >= 0) used[port] = true;
    }
}

double port_free_at[PORTS];

// The time at which this rank has reached the call and its ports are free. It then takes them for the
// call's duration, as if the other members were ready: what others do later must not change times already
// given out.
static double pass_ports(const bool *used, double now, double seconds) {
    for (int port = 0; port < PORTS; port++)
        if (used[port] && port_free_at[port] > now) now = port_free_at[port];
    for (int port = 0; port < PORTS; port++)
        if (used[port]) port_free_at[port] = now + seconds;
    return now;
}

void request_take_ports(Request *r) {
    Traffic traffic[PORTS] = {0};
    bool used[PORTS];
    add_call(&r->call, traffic);
    r->across = (int64_t)traffic[PORT_NETWORK].sent;
    r->bytes = (int64_t)traffic[PORT_NODE].sent + r->across;
    r->seconds = seconds_of(r, traffic[PORT_NODE], traffic[PORT_NETWORK]);
    used_ports(&r->call, traffic, used);
    r->called = pass_ports(used, clock_model_now(), r->seconds);
}
