// schedule_search.c: the best schedule there is, of a small pipeline. Playbook: "Zero Bubble and
// DualPipe", where it says that one would solve an integer program.
//
// Something changes only when a pass ends. At each such moment everything that idle ranks can begin is tried,
// and waiting as well. The result is a state: how many F, B and W each stage has begun, and what each rank is
// running for how much longer. Two ways to the same state have the same future, so states are taken in order
// of time, each once, and the first in which nothing is left to do is the best. (Micro-batches are alike, and
// may pass a stage in their order: exchanging two would change no time.)
//
// A state is dropped if it cannot reach the end before a bound, because of the work that a rank has left, or
// of the chain of passes that the last micro-batch has left. If no state remains, the bound is raised by one
// unit of time.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hash.h"
#include "schedule.h"

// Passes of at most 30 units, of 3 kinds, 6 stages and 3 micro-batches, end before MOST_TIME even one after
// the other.
enum { MOST_RANKS = 3, MOST_STAGES = 6, MOST_MICRO_BATCHES = 3, MOST_UNITS = 30, MOST_TIME = 2048 };

typedef struct State {
    uint8_t begun[MOST_STAGES][3];                                  // F, B, W
    uint8_t stage[MOST_RANKS], kind[MOST_RANKS], left[MOST_RANKS];  // of what runs; left 0: idle
} State;

typedef struct States {
    State *state;
    int count, room;
} States;

typedef struct Search {
    const Schedule *s;
    int length[3], held, bound;  // times in whole units; what does not end before `bound` is dropped
    States at[MOST_TIME];        // by time
    State *seen;                 // a hash table of what was expanded
    size_t seen_count, seen_room;
    int now;
} Search;

static int greatest_divisor(int a, int b) { return b ? greatest_divisor(b, a % b) : a; }

bool schedule_can_search(const Schedule *s, Durations d) {
    const double length[3] = {d.F * s->ranks, d.B * s->ranks, d.W * s->ranks};
    int most = 0, unit = 0;
    for (int kind = 0; kind < 3; kind++) {
        if (length[kind] != floor(length[kind]) || length[kind] < 1 || length[kind] > 1e6) return false;
        unit = greatest_divisor(unit, (int)length[kind]);
        if (length[kind] > most) most = (int)length[kind];
    }
    return most / unit <= MOST_UNITS && d.hop <= 0 && s->ranks <= MOST_RANKS && s->stages <= MOST_STAGES &&
           s->micro_batches <= MOST_MICRO_BATCHES && s->directions == 1;
}

// ---- the set of states ----

static size_t hash(const State *state) {
    uint64_t h = hash_bytes(HASH_SEED, state, sizeof *state);
    return (size_t)(h ^ h >> 29);
}

static State *find(Search *search, const State *state) {
    size_t i = hash(state) & (search->seen_room - 1);
    while (search->seen[i].kind[0] && memcmp(&search->seen[i], state, sizeof *state))
        i = (i + 1) & (search->seen_room - 1);
    return &search->seen[i];
}

// Whether the state is new; from then on it is not. kind[0] is never 0 in a state: 0 marks a free place.
static bool remember(Search *search, const State *state) {
    if (2 * search->seen_count >= search->seen_room) {
        State *old = search->seen;
        size_t room = search->seen_room;
        search->seen_room = room ? 2 * room : 1 << 12;
        search->seen = calloc(search->seen_room, sizeof(State));
        CHECK(search->seen, "out of host memory for a search");
        for (size_t i = 0; i < room; i++)
            if (old[i].kind[0]) *find(search, &old[i]) = old[i];
        free(old);
    }
    State *place = find(search, state);
    if (place->kind[0]) return false;
    *place = *state;
    search->seen_count++;
    return true;
}

static void push(Search *search, int time, const State *state) {
    States *list = &search->at[time];
    if (list->count == list->room) {
        list->room = list->room ? 2 * list->room : 16;
        list->state = realloc(list->state, sizeof *state * (size_t)list->room);
        CHECK(list->state, "out of host memory for a search");
    }
    list->state[list->count++] = *state;
}

// ---- what may be done ----

// Passes of this stage and kind that have ended: all that have begun, less one that is still running.
static int ended(const State *state, const Search *search, int stage, int kind) {
    int r = search->s->place[stage];
    bool runs = state->left[r] && state->stage[r] == stage && state->kind[r] == kind + 1;
    return state->begun[stage][kind] - runs;
}

static bool may_begin(const State *state, const Search *search, int stage, int kind) {
    const Schedule *s = search->s;
    int i = state->begun[stage][kind], held = 0;
    if (i == s->micro_batches) return false;
    StagePass needed;
    if (schedule_needs(s, (StagePass){(PassKind)kind, stage, i, 0}, &needed) &&
        ended(state, search, needed.stage, (int)needed.kind) <= i)
        return false;
    if (kind != PASS_F) return true;
    for (int k = 0; k < s->stages; k++)
        if (s->place[k] == s->place[stage])
            held += state->begun[k][PASS_F] - ended(state, search, k, PASS_W);
    return held < search->held;
}

// A lower bound of the time, from now on, in which all that is left can be done.
static int at_least(const State *state, const Search *search) {
    const Schedule *s = search->s;
    const int *length = search->length;
    int most = 0;
    for (int r = 0; r < s->ranks; r++) {
        int work = state->left[r];
        for (int k = 0; k < s->stages; k++)
            for (int kind = 0; kind < 3 && s->place[k] == r; kind++)
                work += (s->micro_batches - state->begun[k][kind]) * length[kind];
        if (work > most) most = work;
    }
    // the last micro-batch: its Fs not begun, its Bs, and W of the first stage
    int chain = 0;
    for (int k = 0; k < s->stages; k++) {
        chain += state->begun[k][PASS_F] < s->micro_batches ? length[PASS_F] : 0;
        chain += state->begun[k][PASS_B] < s->micro_batches ? length[PASS_B] : 0;
    }
    if (state->begun[0][PASS_W] < s->micro_batches) chain += length[PASS_W];
    return chain > most ? chain : most;
}

// Time goes on to the next end of a pass.
static void pass_time(Search *search, State state) {
    int step = 0;
    for (int r = 0; r < search->s->ranks; r++)
        if (state.left[r] && (!step || state.left[r] < step)) step = state.left[r];
    if (!step || search->now + at_least(&state, search) >= search->bound) return;
    for (int r = 0; r < search->s->ranks; r++) {
        if (!state.left[r]) continue;
        state.left[r] = (uint8_t)(state.left[r] - step);
        if (!state.left[r]) state.stage[r] = 0, state.kind[r] = 1;
    }
    push(search, search->now + step, &state);
}

// Tries all that ranks from r on can begin now.
static void choose(Search *search, State state, int r) {
    const Schedule *s = search->s;
    if (r == s->ranks || r == MOST_RANKS) {
        pass_time(search, state);
        return;
    }
    choose(search, state, r + 1);  // goes on with what it does, or waits
    if (state.left[r]) return;
    for (int k = 0; k < s->stages; k++)
        for (int kind = 0; kind < 3; kind++) {
            if (s->place[k] != r || !may_begin(&state, search, k, kind)) continue;
            State next = state;
            next.begun[k][kind]++;
            next.stage[r] = (uint8_t)k;
            next.kind[r] = (uint8_t)(kind + 1);
            next.left[r] = (uint8_t)search->length[kind];
            choose(search, next, r + 1);
        }
}

static void forget(Search *search) {
    for (int t = 0; t < MOST_TIME; t++) free(search->at[t].state);
    free(search->seen);
    memset(search->at, 0, sizeof search->at);
    search->seen = NULL;
    search->seen_count = search->seen_room = 0;
}

// Whether all can be done before the bound.
static bool can_end(Search *search, const State *start) {
    bool ends = false;
    push(search, 0, start);
    for (search->now = 0; search->now < search->bound && !ends; search->now++) {
        States *list = &search->at[search->now];
        for (int i = 0; i < list->count && !ends; i++) {
            State state = list->state[i];
            if (!remember(search, &state)) continue;
            ends = at_least(&state, search) == 0;
            if (!ends) choose(search, state, 0);
        }
    }
    forget(search);
    return ends;
}

double schedule_best_makespan(const Schedule *s, Durations d) {
    const double length[3] = {d.F * s->ranks, d.B * s->ranks, d.W * s->ranks};
    Search *search = calloc(1, sizeof *search);
    CHECK(search, "out of host memory for a search");
    search->s = s;
    int unit = 0;
    for (int kind = 0; kind < 3; kind++) unit = greatest_divisor(unit, (int)length[kind]);
    for (int kind = 0; kind < 3; kind++) search->length[kind] = (int)length[kind] / unit;
    search->held = (int)lround(schedule_most(s).held_to_w * s->stages / s->ranks);
    State start = {0};
    for (int r = 0; r < s->ranks; r++) start.kind[r] = 1;
    // Bounds that are too tight are soon refuted: raising the bound step by step costs the least search.
    search->bound = at_least(&start, search) + 1;
    while (search->bound < MOST_TIME && !can_end(search, &start)) search->bound++;
    double best = (double)(search->bound - 1) * unit / s->stages;
    free(search);
    return best;
}
