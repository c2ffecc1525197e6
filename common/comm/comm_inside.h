// comm_inside.h: what the files of comm's front share: comm.c (start, end, groups), comm_agreement.c
// (notices, lines, waiting), comm_sentences.c, comm_requests.c (the calls of comm.h, and their counts),
// comm_ports.c (what they send to whom), and codec.c.
#ifndef COMM_INSIDE_H
#define COMM_INSIDE_H

#include "transport.h"

// Kinds of notices other than collectives: a rank's last one, the question what a rank waits for, and the
// making of a group.
enum { FINISHED = COLLECTIVE_KINDS, WHERE, GROUP };

struct Request {
    Request *next;                      // the one started after this on its line
    Request *live_before, *live_after;  // list of all requests not yet waited for, the latest first
    Collective call;
    Tensor out, in;  // shared with the caller: even if it frees them, they live until the request ends
    Transfer *transfers;
    int64_t *open;    // by transfer: not 0 once its other end has come (transport.h)
    bool *met;        // by member or by transfer: whether its notice has come
    int64_t *before;  // by the same: how many calls this rank shared with that one earlier, on any line
    int64_t *room;    // behind `before`: for the call's in_counts and out_counts
    int missing;      // notices that have not come
    double *values;   // sums on the host, the making of a group: everyone's, (members, value_count)
    int *got;         // by member: values that have come
    int value_count;
    bool host, given, agreed, done;
    bool trusted;          // it sends no notices and waits for none
    bool launched;         // the transport has been given all of it, or needs none of it
    int64_t index, total;  // which call of this rank, from 1; elements
    uint64_t parts;        // hash of unequal counts
    double called, ready, start, end, seconds;  // model clock; seconds: what the machine needs
    double began, waited, blocked;  // wall clock: the call, the end of its wait, and the wait's length
    int64_t bytes, across;          // sent by this rank; of these to other nodes (clock_node)
    Group made;                     // the group that a GROUP makes
    Operation *operation;
    void (*then)(void *context);  // what comm_wait does when the request has ended and is gone; or NULL
    void *then_context;
};

// What another rank has sent on one line and this one has not asked for: notices of one call.
typedef struct Inbox {
    Notice *notice;
    int count, room;
} Inbox;

// What stands between this rank and another.
typedef struct Peer {
    int64_t launched;       // calls that this rank has started and the other takes part in
    int unmet[COMM_LINES];  // of them, those that the other's notices have not come for
    Inbox inbox[COMM_LINES];
    bool ended;  // it has called comm_finish, with this status
    int ended_status;
} Peer;

typedef struct Identity {
    uint64_t binary, arguments;
    uint64_t machine;  // hash of the host's name and boot id, as two hosts may have the same name
    uint64_t numbers;  // hash of that and of the namespace of its process ids: a container may have its own
    int32_t pid;
    char host[64];
} Identity;

typedef struct GroupMade {
    Group group;
    bool moves;  // it can move bytes: those of a dry run have no communicator
} GroupMade;

extern struct Comm {
    bool started, alone, finished;  // alone: no transport, as before comm_start
    int rank, ranks, here;          // here: ranks of this machine
    double timeout, patience;       // patience: the timeout before one began to work
    bool check;                     // comm_set_check
    bool for_all;                   // comm_stand_for_all
    int acts_as;                    // comm_act_as
    Identity *identity;             // of each rank
    Peer *peer;                     // each rank
    GroupMade *group;               // all groups that were made, by handle - 1
    int groups;
    struct {
        Request *last, *noticing, *moving;
        double end;  // model clock: of the last agreed request
    } line[COMM_LINES];
    Request *live;
    const Request *waiting;  // the one that comm_wait waits for now
    int64_t calls;
    bool pushing;  // lines_push is under way
    bool claimed;  // this rank is the one that says why all end
    bool told;     // this rank has said where it waits, because another gave up
} comm;

// ---- comm.c ----

static inline int world_rank(Group group, int member) {
    return group.member ? group.member[member] : comm.rank;
}
Operation *group_operation(const Request *r);
// A rank that has died, or -1.
int find_dead(void);
// Whether this rank is the one that may say why all end.
bool claim_last_word(void);

// ---- comm_agreement.c ----

static inline Line line_of(const Request *r) { return r->call.group.line; }
// A request has a notice for each member, itself included; a batch has one for each transfer.
static inline int notices_of(const Request *r) {
    return r->call.kind == TRANSFERS ? r->call.transfer_count : r->call.group.size;
}
static inline int notice_rank(const Request *r, int i) {
    return world_rank(r->call.group, r->call.kind == TRANSFERS ? r->transfers[i].peer : i);
}
static inline bool notice_is_own(const Request *r, int i) {
    return comm.for_all || notice_rank(r, i) == comm.rank;
}
Notice notice_of(const Request *r, int i);
void notices_take(void);
// Puts a request at the end of its line, and calls lines_push.
void line_append(Request *r);
// Advances all requests as far as possible without waiting.
void lines_push(void);
// A loop that waits calls wait_turn, then looks for what it waits for and, if that has not come, calls
// wait_pause, which yields or sleeps, and returns whether it is time to look for faults, too. Of the time
// between two pauses at most a second counts towards the timeout: a rank that was stopped, or did not get a
// core, did not look in that time.
typedef struct Wait {
    double began, looked, waited;  // waited: the seconds that count
    int64_t turn;
    bool may_sleep;
    uint32_t rung;  // doorbell_count before it looked
} Wait;
Wait wait_begin(void);
void wait_turn(Wait *wait);
bool wait_pause(Wait *wait);
// Whether it is time to call look_after_all again.
bool look_is_due(double now);
// Ends all if a rank or what moves the bytes has failed.
void look_after_all(void);
// Returns when the request is done.
void request_await(Request *r);

// ---- comm_sentences.c ----

extern const char *const kind_names[COLLECTIVE_KINDS];
// "all_reduce(1024 f32)". Rotates over 4 static buffers.
const char *notice_text(const Notice *notice);
const char *notice_group(const Notice *notice);
// Ends all with "rank 2 called all_gather(…) where rank 0 called all_reduce(…), in group dp".
void notice_mismatch(int mine_rank, const Notice *mine, int their_rank, const Notice *theirs,
                     const char *why) NO_RETURN;
// What this rank waits for, as a text that follows "rank 1: ".
void describe_wait(char *text, size_t size);

// ---- comm_ports.c ----

// For a call that this rank has reached: sets bytes, across, seconds and called, and takes its ports.
void request_take_ports(Request *r);
extern double port_free_at[];  // by port, on the model clock

// ---- comm_requests.c ----

// Adds wall seconds of communication outside its calls, moving bytes while this rank computes.
void count_push(double seconds);
// A new request for a call; the caller fills in the rest.
Request *request_new(CollectiveKind kind, Group group, int root, DType dtype);
void request_release(Request *r);
// The tensor belongs to the request until it is waited for.
void request_claim(Request *r, Tensor t, bool writes);

#endif
