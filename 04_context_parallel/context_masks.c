// context_masks.c: who computes which block of the scores, in which hop of the ring. Playbook: the two
// masks of "Zig-Zag Ring Attention – A Balanced Compute Implementation".
//
// A row is a chunk of queries, a column a chunk of keys, 2 N of each, in the order of the sequence. A digit
// is the hop h in which the rank r at the left computes that block: the keys come from rank r - h. What
// matters is how often each digit occurs in a rank's rows: a hop lasts as long as its busiest rank.
//
// Bytes sent: none. This file has no main: zigzag_ring_attention.c shows it.
#include <stdlib.h>

#include "context_parallel.h"

// The rank of each of 2 cp chunks, which have one token each.
static void owners_of(const SequenceLayout *layout, int cp, int *owner) {
    int32_t *tokens = host_alloc((size_t)(2 * cp) * sizeof *tokens);
    for (int rank = 0; rank < cp; rank++) {
        layout->tokens(2 * cp, cp, rank, tokens);
        for (int64_t i = 0; i < layout->count(2 * cp, cp, rank); i++) owner[tokens[i]] = rank;
    }
    free(tokens);
}

static int hop_of(int cp, int queries, int keys) {
    int hop = 0;
    while (hop_owner(cp, queries, hop) != keys) hop++;
    return hop;
}

// One line of a picture: "rank 2  1 1 0 0 . . . ."
static void picture_line(const int *owner, int cp, int row, char *line, size_t room) {
    int used = snprintf(line, room, "rank %-2d ", owner[row]);
    for (int column = 0; column < 2 * cp; column++)
        if (column <= row)
            used +=
                snprintf(line + used, room - (size_t)used, "%2d", hop_of(cp, owner[row], owner[column]));
        else used += snprintf(line + used, room - (size_t)used, " .");
}

void context_print_masks(int cp) {
    enum { MOST = 8 };
    if (cp > MOST) return;
    int contiguous[2 * MOST], zigzag[2 * MOST];
    owners_of(&sequence_contiguous, cp, contiguous);
    owners_of(&sequence_zigzag, cp, zigzag);
    say("\nWhich hop computes a block of scores (rows: queries, columns: keys, %d chunks of each):\n",
        2 * cp);
    say("  %-*s   %s", 8 + 4 * cp, "contiguous", "zig-zag");
    for (int row = 0; row < 2 * cp; row++) {
        char left[128], right[128];
        picture_line(contiguous, cp, row, left, sizeof left);
        picture_line(zigzag, cp, row, right, sizeof right);
        say("  %s   %s", left, right);
    }
}

// Counts what each rank's attention computes, against the closed forms of sequence_layout.c.
void context_balance(Mesh mesh, const Config *config) {
    const SequenceLayout *const layout[] = {&sequence_contiguous, &sequence_zigzag, &sequence_striped};
    int cp = mesh.cp.size;
    Config c = *config;
    config_set(&c, "context", CONTEXT_RING);
    config_set(&c, "documents", -1);
    say("\nScore entries of a head, s = %ld on %d rank%s:\n", c.seq, cp, plural(cp));
    say("  %-12s %14s %14s %10s %24s\n", "", "busiest rank", "idlest rank", "ratio",
        "slowest ranks, all hops");
    for (int i = 0; i < 3; i++) {
        config_set(&c, "layout", i + 1);
        ContextCost cost = context_attention_cost(mesh, &c);
        double predicted = sequence_rank_pairs(layout[i], c.seq, cp, mesh.cp.rank);
        double counted = cost.entries / (double)c.micro_batch;
        double most = comm_max(counted, mesh.cp), least = -comm_max(-counted, mesh.cp), slowest = 0;
        for (int h = 0; h < cp; h++)
            slowest += comm_max(layout[i]->pairs(c.seq, cp, mesh.cp.rank, hop_owner(cp, mesh.cp.rank, h)),
                                mesh.cp);
        say("  %-12s %14.0f %14.0f %10.2f %24.0f\n", layout[i]->name, most, least, most / least, slowest);
        char *name = format_text("entries, %s, all ranks", layout[i]->name);
        report_equal(name, comm_sum(predicted, mesh.world), comm_sum(counted, mesh.world), "");
        free(name);
        report_that(predicted == counted, "%s: this rank computes %.0f entries, by the formula %.0f",
                    layout[i]->name, counted, predicted);
        // If 2 cp does not divide s, a rank may have one more token (up to s more entries), and its chunks
        // may begin later (fewer than s more).
        double bound = c.seq % (2 * cp) ? 2.0 * (double)c.seq : 0;
        report_that(layout[i] != &sequence_zigzag || most - least <= bound,
                    "zig-zag: ranks differ by %.0f entries, and may by %.0f", most - least, bound);
    }
}
