// codec.c: see codec.h. All-gathers of comm.h send the coded tensors; comm_wait decodes them at the end.
#include "codec.h"

#include <stdlib.h>

#include "comm_inside.h"

typedef struct Coded {
    const Codec *codec;
    Tensor out;
    int64_t *counts;  // (members) elements of each part
    int members;
    Tensor all[CODEC_TENSORS];       // of all members, one after another
    Request *before[CODEC_TENSORS];  // requests of the tensors; comm_wait of the last one waits for all
} Coded;

// Elements of each member's part of a coded tensor: sets counts (members), and returns their sum.
static int64_t coded_counts(const Coded *c, int tensor, int64_t *counts) {
    int64_t total = 0;
    for (int i = 0; i < c->members; total += counts[i++])
        counts[i] = c->counts[i] > 0 ? c->codec->count(c->codec->context, tensor, c->counts[i]) : 0;
    return total;
}

// A member's part of each coded tensor: borrowed views.
static void coded_part(const Coded *c, int member, Tensor *part) {
    int64_t counts[c->members];
    for (int i = 0; i < c->codec->tensors; i++) {
        int64_t first = 0;
        coded_counts(c, i, counts);
        for (int before = 0; before < member; before++) first += counts[before];
        part[i] = tensor_view(c->all[i], first, SHAPE(counts[member]));
    }
}

// What comm_wait does when the last of the all-gathers has ended.
static void decode_all(void *context) {
    Coded *c = context;
    int64_t first = 0;
    Tensor part[CODEC_TENSORS];
    for (int i = 0; i < c->codec->tensors - 1; i++) comm_wait(c->before[i]);
    for (int member = 0; member < c->members; first += c->counts[member++]) {
        if (c->counts[member] == 0) continue;
        coded_part(c, member, part);
        c->codec->decode(c->codec->context, tensor_view(c->out, first, SHAPE(c->counts[member])), part);
    }
    for (int i = 0; i < c->codec->tensors; i++) tensor_free(&c->all[i]);
    tensor_free(&c->out);
    free(c->counts);
    free(c);
}

Request *comm_all_gather_coded(Tensor out, Tensor in, const int64_t *counts, const Codec *codec,
                               Group group) {
    if (!codec) return comm_all_gather(out, in, counts, group);
    int n = group.size, last = codec->tensors - 1;
    Coded *c = host_alloc(sizeof *c);
    *c = (Coded){.codec = codec, .out = tensor_share(out), .members = n};
    c->counts = host_alloc((size_t)n * sizeof *c->counts);
    int64_t total = 0, each[n];
    for (int i = 0; i < n; i++) total += c->counts[i] = counts ? counts[i] : tensor_count(in);
    CHECK(last >= 0 && last < CODEC_TENSORS, "the codec %s has %d tensors; it may have 1 to %d",
          codec->name, codec->tensors, CODEC_TENSORS);
    CHECK(total == tensor_count(out) && c->counts[group.rank] == tensor_count(in),
          "all_gather by %s: out has %lld elements and in %lld, where the parts have %lld and %lld",
          codec->name, (long long)tensor_count(out), (long long)tensor_count(in), (long long)total,
          (long long)c->counts[group.rank]);
    CHECK(in.storage != out.storage, "all_gather by %s: in is a part of out, which it decodes into",
          codec->name);
    for (int i = 0; i <= last; i++)
        c->all[i] = tensor_new(MEMORY_COMMUNICATION, codec->dtype[i], SHAPE(coded_counts(c, i, each)));
    Tensor own[CODEC_TENSORS];
    coded_part(c, group.rank, own);
    codec->encode(codec->context, own, in, group);
    for (int i = 0; i <= last; i++) {
        coded_counts(c, i, each);
        c->before[i] = comm_all_gather(c->all[i], own[i], each, group);
    }
    c->before[last]->then = decode_all;
    c->before[last]->then_context = c;
    request_claim(c->before[last], out, true);
    return c->before[last];
}
