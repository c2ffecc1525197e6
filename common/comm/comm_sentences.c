// comm_sentences.c: what a user reads when the calls of ranks do not match or a wait is too long.
#include "comm_inside.h"

const char *const kind_names[COLLECTIVE_KINDS] = {"all_reduce", "reduce",   "reduce_scatter", "all_gather",
                                                  "gather",     "scatter",  "broadcast",      "all_to_all",
                                                  "barrier",    "transfers"};

const char *notice_text(const Notice *n) {
    static char texts[4][128];
    static int turn;
    char *text = texts[turn++ % 4];
    size_t size = sizeof *texts;
    const char *type = n->dtype >= 0 && n->dtype < DTYPES ? dtype_name((DType)n->dtype) : "?";
    const char *max = n->op == REDUCE_MAX ? " max" : "", *host = n->host ? " on the host" : "";
    long long count = n->count, expected = n->expected;
    switch (n->kind) {
        case FINISHED:
            snprintf(text, size, "comm_finish (or left the program)");
            break;
        case BARRIER:
            snprintf(text, size, "barrier()");
            break;
        case GROUP:
            snprintf(text, size, "comm_group (for its group %lld)", count);
            break;
        case TRANSFERS:
            snprintf(text, size, "%s(%lld %s %s rank %d)", n->send ? "send" : "receive", count, type,
                     n->send ? "to" : "from", n->peer);
            break;
        case ALL_TO_ALL:
            if (count == expected) snprintf(text, size, "all_to_all(%lld %s each way)", count, type);
            else
                snprintf(text, size, "all_to_all(%lld %s to rank %d, %lld from it)", count, type, n->peer,
                         expected);
            break;
        case REDUCE:
        case GATHER:
        case SCATTER:
        case BROADCAST:
            snprintf(text, size, "%s(%lld %s%s %s rank %d)", kind_names[n->kind], count, type, max,
                     n->kind == REDUCE || n->kind == GATHER ? "to" : "from", n->root);
            break;
        default:
            snprintf(text, size, "%s(%lld %s%s%s)", kind_names[n->kind], count, type, max, host);
    }
    return text;
}

const char *notice_group(const Notice *n) {
    static char text[64];
    if (n->kind == FINISHED || n->group == 0) return "world";
    if (n->group <= comm.groups) return comm.group[n->group - 1].group.name;
    snprintf(text, sizeof text, "%d (not made on rank %d)", n->group, comm.rank);
    return text;
}

// The lower rank's call is taken as the right one.
void notice_mismatch(int mine_rank, const Notice *mine, int their_rank, const Notice *theirs,
                     const char *why) {
    if (mine_rank > their_rank) {
        const Notice *notice = mine;
        mine = theirs, theirs = notice;
        int rank = mine_rank;
        mine_rank = their_rank, their_rank = rank;
    }
    if (mine->group != theirs->group && mine->kind != FINISHED && theirs->kind != FINISHED)
        fatal("rank %d called %s in group %s where rank %d called %s in group %s%s", their_rank,
              notice_text(theirs), notice_group(theirs), mine_rank, notice_text(mine), notice_group(mine),
              why);
    fatal("rank %d called %s where rank %d called %s, in group %s%s", their_rank, notice_text(theirs),
          mine_rank, notice_text(mine), notice_group(mine->kind == FINISHED ? theirs : mine), why);
}

void describe_wait(char *text, size_t size) {
    const Request *r = comm.waiting;
    if (!r) {
        snprintf(text, size, "waits for nobody, after %lld calls", (long long)comm.calls);
        return;
    }
    if (comm.line[line_of(r)].noticing) r = comm.line[line_of(r)].noticing;
    else if (comm.line[line_of(r)].moving) r = comm.line[line_of(r)].moving;
    const Collective *c = &r->call;
    int first = 0;
    while (!r->agreed && first < notices_of(r) - 1 && r->met[first]) first++;
    Notice mine = notice_of(r, first);
    int used = snprintf(text, size, "waits in %s, its call %lld, in group %s", notice_text(&mine),
                        (long long)r->index, c->group.name ? c->group.name : "of one");
    if (r->agreed) {
        snprintf(text + used, size - (size_t)used, ", for data");
        return;
    }
    const char *before = ", for rank ";
    int named = -1;
    for (int i = 0; i < notices_of(r); i++) {
        int rank = notice_rank(r, i);
        if (r->met[i] || rank == named || used > (int)size - 32) continue;
        used += snprintf(text + used, size - (size_t)used, "%s%d", before, rank);
        before = ", ";
        named = rank;
    }
}
