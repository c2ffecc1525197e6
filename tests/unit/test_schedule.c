// Pipeline schedules: all generators are valid and cost what their papers say, and the clock is right. The
// checks are implemented a second time here, in another way.
#include "schedules.h"

#define ASSERT_SAME(got, expected)                                                             \
    do {                                                                                       \
        double got_ = (got), expected_ = (expected);                                           \
        if (got_ != expected_) fail_msg("%s is %.17g, expected %.17g", #got, got_, expected_); \
    } while (0)

// ---- all generators ----

typedef void Each(ScheduleKind kind, const ScheduleWish *wish, const Schedule *s);

// Every kind in every size of the chapter; under sanitizers, which are fifteen times slower, up to 3 ranks.
#ifdef __SANITIZE_ADDRESS__
enum { SIZES = 3 };
#else
enum { SIZES = 6 };
#endif
static void for_all(Each *each) {
    static const int ranks[] = {1, 2, 3, 4, 6, 8};
    for (int kind = 0; kind < SCHEDULE_KINDS; kind++)
        for (int i = 0; i < SIZES; i++)
            for (int j = 0; j < 6; j++)
                for (int v = 1; v <= (kind == INTERLEAVED ? 3 : 1); v++)
                    for (int variant = 0; variant < 2; variant++) {
                        int p = ranks[i], m = (const int[]){1, p - 1, p, p + 1, 2 * p, 4 * p}[j];
                        if (m == 0) continue;
                        ScheduleWish wish = {p, m, v, 0, false, 0, papers};
                        if (variant) wish.split = true, wish.group = m > p ? m : p, wish.limit = 2 * p - 1;
                        if (schedule_refusal((ScheduleKind)kind, &wish)) continue;
                        Schedule s = schedule_make((ScheduleKind)kind, &wish);
                        each((ScheduleKind)kind, &wish, &s);
                        schedule_free(&s);
                    }
}

static void check_sound(ScheduleKind kind, const ScheduleWish *wish, const Schedule *s) {
    ScheduleFault fault;
    const Durations odd = {7, 11, 5, 19, 3};
    (void)kind;
    if (!schedule_verify(s, &fault)) fail_msg("%s: %s", s->name, fault.sentence);
    if (!schedule_message_order(s, QUEUE_PAIR_AND_KIND, &fault))
        fail_msg("%s: %s", s->name, fault.sentence);
    ScheduleTimes times = schedule_times(s, odd);
    double makespan = play(s, odd);
    if (!(fabs(times.makespan - makespan) < 1e-9))
        fail_msg("%s p=%d m=%d: makespan %g, not %g", s->name, wish->ranks, wish->micro_batches,
                 times.makespan, makespan);
    assert_true(schedule_period(s, odd, NULL) <= times.makespan);
    schedule_times_free(&times, s);
}

static void all_generators_are_sound_for_every_size(void **context) {
    (void)context;
    for_all(check_sound);
}

static void check_costs(ScheduleKind kind, const ScheduleWish *wish, const Schedule *s) {
    double weights = 0;
    int activations = 0, gradients = 0, hops = 0, per_rank = s->stages / s->ranks;
    bool straight = kind != ZB_V && kind != DUALPIPE && kind != DUALPIPE_V;
    for (int r = 0; r < s->ranks; r++) {
        RankCosts costs = schedule_costs(s, r);
        activations += costs.activations;
        gradients += costs.gradients;
        weights += costs.weights;
        HeldFormula held = schedule_rank_held_formula(kind, wish, r);
        if (fabs(held.to_b - costs.held_to_b) > 1e-12 || fabs(held.to_w - costs.held_to_w) > 1e-12)
            fail_msg("%s p=%d m=%d v=%d: rank %d holds %g to B, %g to W; by its formula %g, %g", s->name,
                     wish->ranks, wish->micro_batches, wish->chunks, r, costs.held_to_b, costs.held_to_w,
                     held.to_b, held.to_w);
        assert_true(costs.held_to_b <= costs.held_to_w);
        if (!straight || s->ranks == 1) continue;
        // Each of a rank's stages sends every micro-batch on, except the model's last stage in forward and
        // its first in backward.
        assert_int_equal(costs.activations, s->micro_batches * (per_rank - (r == s->ranks - 1)));
        assert_int_equal(costs.gradients, s->micro_batches * (per_rank - (r == 0)));
    }
    for (int i = 0; i < s->micro_batches; i++)
        for (int k = 1; k < s->stages; k++) {
            const int *place = s->place + s->direction[i] * s->stages;
            hops += place[k] != place[k - 1];
        }
    assert_int_equal(activations, hops);
    assert_int_equal(gradients, hops);
    assert_int_equal(activations + gradients, schedule_messages_formula(kind, wish));
    ASSERT_SAME(weights, s->ranks * (kind == DUALPIPE ? 2 : 1));
}

static void messages_and_held_micro_batches_are_those_of_the_formulas(void **context) {
    (void)context;
    for_all(check_costs);
}

static void check_formulas(ScheduleKind kind, const ScheduleWish *wish, const Schedule *s) {
    static const double values[] = {4, 5, 6, 12};
    for (int i = 0; i < 64 && kind != ZB_AUTO; i++) {
        ScheduleWish other = *wish;
        Durations d = {values[i % 4], values[i / 4 % 4], values[i / 16], 0, 0};
        d.pair = d.F + d.B + d.W;
        other.durations = d;
        double bubble = schedule_bubble_formula(kind, &other),
               period = schedule_period_formula(kind, &other), clocked;
        bool dual = kind == DUALPIPE_V || (kind == DUALPIPE && wish->micro_batches % 2 == 0);
        if (dual && wish->micro_batches >= 2 * wish->ranks && d.W <= d.F && d.F <= d.B)
            assert_false(isnan(bubble));
        if (isnan(bubble)) continue;
        ScheduleTimes times = schedule_times(s, d);
        schedule_period(s, d, &clocked);
        if (fabs(times.bubble - bubble) > 1e-9 || fabs(clocked - period) > 1e-9)
            fail_msg("%s p=%d m=%d v=%d F=%g B=%g W=%g: bubble %g, period %g; by the formulas %g, %g",
                     s->name, wish->ranks, wish->micro_batches, wish->chunks, d.F, d.B, d.W, times.bubble,
                     clocked, bubble, period);
        schedule_times_free(&times, s);
    }
}

static void bubbles_are_those_of_the_formulas_for_all_durations(void **context) {
    (void)context;
    for_all(check_formulas);
}

// No order of one stage a rank, with the memory that this one takes, has less.
static void check_least(ScheduleKind kind, const ScheduleWish *wish, const Schedule *s) {
    (void)kind;
    static const Durations some[] = {{10, 12, 8, 30, 0}, {10, 10, 10, 30, 3}, {4, 12, 5, 21, 1}};
    ScheduleWish other = *wish;
    other.limit = (int)schedule_most(s).held_to_w;
    for (int i = 0; i < 3 && s->stages == s->ranks && s->directions == 1; i++) {
        ScheduleTimes times = schedule_times(s, some[i]);
        other.durations = some[i];
        if (times.bubble < schedule_least_bubble(&other) - 1e-9)
            fail_msg("%s p=%d m=%d, durations %d: bubble %g, and none is below %g", s->name, wish->ranks,
                     wish->micro_batches, i, times.bubble, schedule_least_bubble(&other));
        schedule_times_free(&times, s);
    }
}

static void no_bubble_is_below_the_least(void **context) {
    (void)context;
    for_all(check_least);
    // ZB-H1 and ZB-H2 reach it where F = B = W.
    ScheduleWish wish = {.ranks = 4, .micro_batches = 8, .durations = {10, 10, 10, 30, 0}};
    ASSERT_SAME(schedule_least_bubble(&wish), 30);
    wish.limit = 2;
    ASSERT_SAME(schedule_least_bubble(&wish), 50);
    // A hop there and one back before the second micro-batch that is held may begin; and one there at least.
    wish.durations.hop = 3;
    ASSERT_SAME(schedule_least_bubble(&wish), 50 + 2 * 3 * 3);
    wish.limit = 8;
    ASSERT_SAME(schedule_least_bubble(&wish), 30 + 3 * 3);
}

// The three steps from which zero_bubble_v.c has its formulas.
static void a_v_waits_where_its_formula_says(void **context) {
    (void)context;
    for (int p = 2; p <= 8; p++)
        for (int m = 2 * p; m <= 4 * p; m += p) {
            Schedule s = make(ZB_V, p, m);
            ScheduleTimes times = schedule_times(&s, papers);
            double ends[RANKS_MOST];
            for (int r = 0; r < p; r++) {
                int i = 0, last = s.list[r].count - 1;
                while (s.list[r].action[i].pass[0].kind == PASS_F) i++;
                assert_int_equal(i, 2 * p);
                ASSERT_SAME(times.begin[r][i], p * papers.F + r * papers.B / 2);
                ends[r] = times.end[r][last];
            }
            ASSERT_SAME(ends[p - 1] - times.begin[p - 1][2 * p] + p * papers.F,
                        m * (papers.F + papers.B + papers.W));  // it no longer waits
            ASSERT_SAME(ends[p - 1] - ends[0], (p - 1) * (papers.W - papers.B / 2));
            schedule_times_free(&times, &s);
            schedule_free(&s);
        }
}

static void check_same_again(ScheduleKind kind, const ScheduleWish *wish, const Schedule *s) {
    size_t size, again_size, parsed_size;
    Schedule again = schedule_make(kind, wish), parsed;
    char *text = text_of(s, &size), *again_text = text_of(&again, &again_size);
    assert_string_equal(text, again_text);
    char *fault = schedule_parse(&parsed, text, size);
    if (fault) fail_msg("%s: %s", s->name, fault);
    char *parsed_text = text_of(&parsed, &parsed_size);
    assert_string_equal(text, parsed_text);
    free(text);
    free(again_text);
    free(parsed_text);
    schedule_free(&again);
    schedule_free(&parsed);
}

static void the_same_wish_gives_the_same_schedule_and_its_text_gives_it_back(void **context) {
    (void)context;
    for_all(check_same_again);
}

// ---- each of the papers' points ----

static void each_rank_holds_what_its_paper_says(void **context) {
    (void)context;
    int p = 4, m = 8;
    for (int r = 0; r < p; r++) {
        Schedule s[] = {make(AFAB, p, m),  make(ONE_F_ONE_B, p, m), make(ZB_H1, p, m),
                        make(ZB_H2, p, m), make(ZB_V, p, m),        make(DUALPIPE, p, m)};
        const double to_w[] = {m, p - r, p, 2 * p - 1, p, p + 1};
        const double to_b[] = {m, p - r, p - r, 2 * (p - r) - 1, p, p + 1};
        for (int i = 0; i < 6; i++) {
            RankCosts costs = schedule_costs(&s[i], r);
            ASSERT_SAME(costs.held_to_w, to_w[i]);
            ASSERT_SAME(costs.held_to_b, to_b[i]);
            schedule_free(&s[i]);
        }
    }
}

// With an odd number of ranks, the one in the middle has the same stage in both directions.
static void a_stage_of_both_directions_is_stored_once(void **context) {
    (void)context;
    Schedule s = schedule_new("both", 3, 2, 3, 2);
    for (int k = 0; k < 3; k++) s.place[3 + k] = 2 - k;
    const double weights[] = {2, 1, 2};
    for (int r = 0; r < 3; r++) {
        ASSERT_SAME(schedule_costs(&s, r).weights, weights[r]);
        for (int k = 0; k < 3; k++) assert_int_equal(schedule_has_stage(&s, r, k), k == r || k == 2 - r);
    }
    schedule_free(&s);
}

// What other implementations do if p does not divide m: the last group of micro-batches is short.
static Schedule unchecked_last_group(int p, int m, int v) {
    Schedule s = schedule_new("unchecked", p, m, p * v, 1);
    int chunk[512], micro_batch[512], turns = 0;
    for (int first = 0; first < m; first += p)
        for (int c = 0; c < v; c++)
            for (int i = first; i < m && i < first + p; i++) chunk[turns] = c, micro_batch[turns++] = i;
    for (int r = 0; r < p; r++) {
        int ahead = 2 * (p - 1 - r) + (v - 1) * p;
        for (int k = -ahead; k < turns; k++) {
            if (k + ahead < turns)
                schedule_add(&s, r, PASS_F, chunk[k + ahead] * p + r, micro_batch[k + ahead]);
            if (k >= 0) schedule_add(&s, r, PASS_BW, (v - 1 - chunk[k]) * p + r, micro_batch[k]);
        }
    }
    return s;
}

static double bubble_of(Schedule s, Durations d) {
    ScheduleTimes times = schedule_times(&s, d);
    double bubble = times.bubble;
    schedule_times_free(&times, &s);
    schedule_free(&s);
    return bubble;
}

static void an_unchecked_last_group_of_interleaved_deadlocks_and_a_planned_one_runs(void **context) {
    (void)context;
    ScheduleFault fault;
    for (int m = 8; m <= 16; m++) {
        Schedule s = unchecked_last_group(8, m, 2);
        assert_int_equal(schedule_verify(&s, &fault), m < 10 || m > 13);
        assert_int_equal(fault.rule, m < 10 || m > 13 ? RULE_SOUND : RULE_DEADLOCK);
        schedule_free(&s);
    }
    ASSERT_SAME(bubble_of(unchecked_last_group(4, 9, 2), papers), 100);
    ASSERT_SAME(bubble_of(make(INTERLEAVED, 4, 9), papers), 75);
    ASSERT_SAME(bubble_of(make(INTERLEAVED, 4, 8), papers), 45);
    ASSERT_SAME(bubble_of(make(INTERLEAVED, 4, 16), (Durations){10, 12, 8, 30, 1}), 59);
    for (int p = 2; p <= 8; p++)
        for (int m = 1; m <= 3 * p; m++) {
            Schedule s = unchecked_last_group(p, m, 2);
            double planned = bubble_of(make(INTERLEAVED, p, m), papers);
            if (schedule_verify(&s, &fault)) assert_true(planned <= bubble_of(s, papers));
            else schedule_free(&s);
        }
}

static void one_queue_for_a_pair_of_ranks_misorders_what_goes_both_ways(void **context) {
    (void)context;
    ScheduleFault fault;
    const ScheduleKind ordered[] = {AFAB, ONE_F_ONE_B, ZB_H1, ZB_H2, ZB_AUTO, INTERLEAVED};
    for (int i = 0; i < 6; i++) {
        Schedule s = make(ordered[i], 8, 16);
        assert_true(schedule_message_order(&s, QUEUE_PAIR, &fault));
        schedule_free(&s);
    }
    const ScheduleKind both[] = {ZB_V, DUALPIPE, DUALPIPE_V};
    for (int i = 0; i < 3; i++) {
        Schedule s = make(both[i], 8, 16);
        assert_false(schedule_message_order(&s, QUEUE_PAIR, &fault));
        assert_int_equal(fault.rule, RULE_MESSAGE_ORDER);
        assert_true(schedule_message_order(&s, QUEUE_PAIR_AND_KIND, &fault));
        schedule_free(&s);
    }
    // Two forwards, of which the second rank takes the later one first: valid, but not in order.
    Schedule s = make(AFAB, 2, 2);
    Action first = s.list[1].action[0];
    s.list[1].action[0] = s.list[1].action[1];
    s.list[1].action[1] = first;
    assert_true(schedule_verify(&s, &fault));
    assert_false(schedule_message_order(&s, QUEUE_PAIR_AND_KIND, &fault));
    assert_int_equal(fault.rank, 1);
    assert_int_equal(fault.position, 0);
    schedule_free(&s);
}

static void the_greedy_scheduler_keeps_its_limit_and_is_no_worse_than_hand_made_ones(void **context) {
    (void)context;
    static const Durations some[] = {{10, 12, 8, 30, 0}, {10, 10, 10, 30, 0}, {8, 16, 6, 30, 0},
                                     {12, 9, 12, 33, 0}, {10, 12, 8, 30, 6},  {5, 20, 5, 30, 1}};
    for (int i = 0; i < 6; i++)
        for (int p = 2; p <= 5; p++)
            for (int limit = 1; limit <= 2 * p; limit++) {
                Schedule s = schedule_zero_bubble_auto(p, 3 * p, some[i], limit);
                assert_true(schedule_most(&s).held_to_w <= limit);
                double bubble = bubble_of(s, some[i]);
                double h1 = bubble_of(schedule_zero_bubble(p, 3 * p, 1), some[i]);
                double h2 = bubble_of(schedule_zero_bubble(p, 3 * p, 2), some[i]);
                if ((limit >= p && bubble > h1) || (limit >= 2 * p - 1 && bubble > h2))
                    fail_msg("durations %d, p=%d, limit %d: bubble %g; ZB-H1 has %g, ZB-H2 %g", i, p, limit,
                             bubble, h1, h2);
            }
}

static void the_greedy_scheduler_uses_all_memory_that_it_is_given(void **context) {
    (void)context;
    static const struct {
        int limit;
        double bubble, period, bubble_with_hops;
    } expected[] = {{4, 42, 42, 146}, {5, 34, 34, 104}, {6, 30, 26, 66}, {7, 30, 18, 54}, {8, 30, 12, 48}};
    const Durations hops = {10, 12, 8, 30, 6};
    ASSERT_SAME(bubble_of(make(ZB_AUTO, 4, 16), papers), 42);  // asked for no limit, it takes 1F1B's
    for (int i = 0; i < 5; i++) {
        Schedule s = schedule_zero_bubble_auto(4, 16, papers, expected[i].limit);
        ScheduleTimes times = schedule_times(&s, papers);
        ASSERT_SAME(times.bubble, expected[i].bubble);
        double period;
        schedule_period(&s, papers, &period);
        ASSERT_SAME(period, expected[i].period);
        schedule_times_free(&times, &s);
        schedule_free(&s);
        Schedule far = schedule_zero_bubble_auto(4, 16, hops, expected[i].limit);
        ASSERT_SAME(bubble_of(far, hops), expected[i].bubble_with_hops);
    }
}

// ---- the clock ----

static void one_micro_batch_takes_the_sum_of_its_way(void **context) {
    (void)context;
    const Durations d = {10, 12, 8, 30, 5};
    for (int p = 1; p <= 8; p++) {
        Schedule s = make(ONE_F_ONE_B, p, 1);
        ScheduleTimes times = schedule_times(&s, d);
        ASSERT_SAME(times.makespan, p * 30 + 2 * (p - 1) * 5);
        ASSERT_SAME(schedule_period(&s, d, NULL), times.makespan);  // rank 0 is the first and the last
        for (int r = 0; r < p; r++) ASSERT_SAME(times.idle[r], times.makespan - 30);
        schedule_times_free(&times, &s);
        schedule_free(&s);
    }
    // A V turns without a message: 2 p - 2 hops each way; B' and B are on the way, and W' B W on rank 0.
    Schedule v = schedule_new("v", 2, 1, 4, 1);
    v.place[2] = 1;
    v.place[3] = 0;
    for (int k = 0; k < 4; k++) schedule_add(&v, v.place[k], PASS_F, k, 0);
    for (int k = 3; k >= 0; k--) schedule_add(&v, v.place[k], PASS_BW, k, 0);
    ScheduleTimes times = schedule_times(&v, d);
    ASSERT_SAME(times.makespan, 4 * 15 + 4 * 5);
    schedule_times_free(&times, &v);
    schedule_free(&v);
}

static void a_pair_takes_its_own_time_and_its_outputs_leave_at_its_end(void **context) {
    (void)context;
    Durations d = {10, 12, 8, 24, 0};
    Schedule s = make(DUALPIPE, 2, 4);
    for (int r = 0; r < 2; r++) {
        ScheduleTimes times = schedule_times(&s, d);
        for (int i = 0; i < s.list[r].count; i++) {
            double length = times.end[r][i] - times.begin[r][i];
            if (s.list[r].action[i].passes == 2) ASSERT_SAME(length, 24);
        }
        schedule_times_free(&times, &s);
    }
    schedule_free(&s);
    ASSERT_SAME(bubble_of(make(DUALPIPE, 4, 8), papers) - bubble_of(make(DUALPIPE, 4, 8), d), 24);
}

static void a_shorter_pair_leaves_the_middle_of_dualpipe_idle_by_the_formula(void **context) {
    (void)context;
    for (int p = 4; p <= 16; p += 2)
        for (int B = 10; B <= 20; B += 2)
            for (int pair = B + 8; pair <= B + 20; pair += 2) {
                const Durations d = {10, B, 8, pair, 0};
                Schedule s = make(DUALPIPE, p, 2 * p);
                ScheduleTimes times = schedule_times(&s, d);
                double turns = p / 2 - 1, by_F = turns * (pair + d.F - 2 * d.W),
                       by_B = turns * (pair + d.B - 2 * d.W) - d.F;
                for (int r = p / 2 - 1; r <= p / 2; r++) ASSERT_SAME(times.idle[r], fmax(by_F, by_B));
                schedule_times_free(&times, &s);
                schedule_free(&s);
            }
}

// The same lists repeated, with new micro-batches.
static Schedule repeated(const Schedule *s, int times) {
    Schedule all = schedule_new("repeated", s->ranks, s->micro_batches * times, s->stages, s->directions);
    memcpy(all.place, s->place, sizeof(int) * (size_t)(s->stages * s->directions));
    for (int i = 0; i < all.micro_batches; i++) all.direction[i] = s->direction[i % s->micro_batches];
    for (int t = 0; t < times; t++)
        for (int r = 0; r < s->ranks; r++)
            for (int i = 0; i < s->list[r].count; i++) {
                Action action = s->list[r].action[i];
                for (int j = 0; j < action.passes; j++) action.pass[j].micro_batch += t * s->micro_batches;
                schedule_append(&all, r, action);
            }
    return all;
}

static void check_period(ScheduleKind kind, int p, int m, Durations d) {
    enum { LONG = 12 };  // a circuit of up to p = 4 ranks: periods of 12 steps are whole
    Schedule s = make(kind, p, m), first = repeated(&s, LONG), second = repeated(&s, 2 * LONG);
    double period = schedule_period(&s, d, NULL);
    double measured = (play(&second, d) - play(&first, d)) / LONG;
    if (fabs(period - measured) > 1e-9) fail_msg("%s: period %g, measured %g", s.name, period, measured);
    schedule_free(&s);
    schedule_free(&first);
    schedule_free(&second);
}

static void the_period_is_what_repeated_steps_cost(void **context) {
    (void)context;
    for (int kind = 0; kind < SCHEDULE_KINDS; kind++)
        for (int hop = 0; hop < 6; hop += 5)
            check_period((ScheduleKind)kind, 4, 6, (Durations){10, 12, 8, 30, hop});
    // Two ranks that wait for each other in turn: no rank's own circuit is the longest.
    check_period(DUALPIPE, 2, 4, (Durations){1, 5, 2, 8, 60});
}

// ---- the search ----

// All orders of F, B and W of two micro-batches on one rank, as digits.
static int orders(int order[100][6], int at, int f, int b, int w, int count, int *prefix) {
    if (at == 6) {
        memcpy(order[count], prefix, sizeof order[0]);
        return count + 1;
    }
    for (int kind = 0; kind < 3; kind++) {
        int done = kind == 0 ? f : kind == 1 ? b : w, most = kind == 0 ? 2 : kind == 1 ? f : b;
        if (done == most) continue;
        prefix[at] = kind;
        count = orders(order, at + 1, f + (kind == 0), b + (kind == 1), w + (kind == 2), count, prefix);
    }
    return count;
}

static void the_search_finds_what_trying_all_orders_finds(void **context) {
    (void)context;
    int order[100][6], prefix[6], count = orders(order, 0, 0, 0, 0, 0, prefix);
    static const Durations some[] = {
        {10, 12, 8, 30, 0}, {1, 1, 1, 3, 0}, {4, 1, 6, 11, 0}, {2, 5, 3, 10, 0}};
    for (int i = 0; i < 4; i++)
        for (int limit = 1; limit <= 2; limit++) {
            double best = INFINITY;
            for (int pair = 0; pair < count * count; pair++) {
                Schedule s = schedule_new("any", 2, 2, 2, 1);
                for (int r = 0; r < 2; r++)
                    for (int k = 0, next[3] = {0}; k < 6; k++) {
                        int kind = order[r ? pair / count : pair % count][k];
                        schedule_add(&s, r, (PassKind)kind, r, next[kind]++);
                    }
                double makespan = schedule_most(&s).held_to_w <= limit ? play(&s, some[i]) : NAN;
                if (makespan < best) best = makespan;
                schedule_free(&s);
            }
            Schedule like = schedule_zero_bubble_auto(2, 2, some[i], limit);
            assert_true(schedule_can_search(&like, some[i]));
            ASSERT_SAME(schedule_best_makespan(&like, some[i]), best);
            schedule_free(&like);
        }
}

// It takes what it can count in whole units, of which the longest pass has 30, in any order of single passes.
static void the_search_takes_no_more_than_it_can_count(void **context) {
    (void)context;
    static const struct {
        ScheduleKind kind;
        int p, m;
        Durations d;
        bool can;
    } cases[] = {
        {AFAB, 2, 2, {30, 1, 1, 2, 0}, true},       {AFAB, 2, 2, {31, 1, 1, 2, 0}, false},
        {AFAB, 2, 2, {62, 2, 4, 6, 0}, false},      {AFAB, 2, 2, {60, 2, 4, 6, 0}, true},
        {AFAB, 2, 2, {1.5, 1, 1, 2, 0}, true},      {AFAB, 2, 2, {1.25, 1, 1, 2, 0}, false},
        {AFAB, 2, 2, {1, 1, 0, 1, 0}, false},       {AFAB, 2, 2, {1, 1, 1, 2, 1}, false},
        {AFAB, 3, 3, {1, 1, 1, 2, 0}, true},        {AFAB, 4, 3, {1, 1, 1, 2, 0}, false},
        {AFAB, 3, 4, {1, 1, 1, 2, 0}, false},       {DUALPIPE, 2, 2, {1, 1, 1, 3, 0}, false},
        {INTERLEAVED, 3, 3, {1, 1, 1, 2, 0}, true},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Schedule s = make(cases[i].kind, cases[i].p, cases[i].m);
        if (schedule_can_search(&s, cases[i].d) != cases[i].can) fail_msg("case %zu: it says otherwise", i);
        schedule_free(&s);
    }
}

// With the fewest micro-batches for which a formula is stated, there is one.
static void formulas_begin_where_they_say(void **context) {
    (void)context;
    static const ScheduleKind kinds[] = {ZB_H1, ZB_H2, ZB_V, DUALPIPE, DUALPIPE_V};
    for (int p = 2; p <= 8; p += 2)
        for (int i = 0; i < 5; i++) {
            const int fewest[] = {p, 2 * p - 1, 2 * p - 1, 2 * p, 2 * p};
            for (int fewer = 0; fewer < 2; fewer++) {
                ScheduleWish wish = {.ranks = p, .micro_batches = fewest[i] - fewer, .durations = papers};
                const double bubble = schedule_bubble_formula(kinds[i], &wish);
                if (isnan(bubble) != fewer)
                    fail_msg("kind %d, p=%d m=%d: %g", (int)kinds[i], p, wish.micro_batches, bubble);
            }
        }
}

// What a step needs most of may be on any rank: here stages 0 and 2 are on rank 0, which sends on twice.
static void the_most_is_of_the_rank_that_has_it(void **context) {
    (void)context;
    enum { P = 3, STAGES = 4, M = 2 };
    static const int place[STAGES] = {0, 1, 0, 2};
    Schedule s = schedule_new("mine", P, M, STAGES, 1);
    for (int k = 0; k < STAGES; k++) s.place[k] = place[k];
    for (int i = 0; i < M; i++)
        for (int k = 0; k < STAGES; k++) schedule_add(&s, place[k], PASS_F, k, i);
    for (int i = 0; i < M; i++)
        for (int k = STAGES - 1; k >= 0; k--) {
            schedule_add(&s, place[k], PASS_B, k, i);
            schedule_add(&s, place[k], PASS_W, k, i);
        }
    const RankCosts most = schedule_most(&s);
    assert_int_equal(most.activations, 2 * M);
    assert_int_equal(most.gradients, M);
    ASSERT_SAME(most.weights, 2.0 * P / STAGES);
    ASSERT_SAME(most.held_to_w, 2.0 * M * P / STAGES);
    schedule_free(&s);
}

static void the_search_takes_stages_of_a_rank_one_after_the_other(void **context) {
    (void)context;
    for (int m = 1; m <= 3; m++) {
        Schedule one = make(ZB_V, 1, m), two = make(ZB_V, 2, m), loop = make(INTERLEAVED, 2, m);
        ASSERT_SAME(schedule_best_makespan(&one, papers), 30 * m);  // nothing to wait for
        // rank 1 begins half an F later; and one micro-batch alone is a chain: 2 F, 2 B, and W of half a
        // rank
        assert_true(schedule_best_makespan(&two, papers) >= 30 * m + 5);
        if (m == 1) ASSERT_SAME(schedule_best_makespan(&two, papers), 2 * (10 + 12) + 4);
        if (m == 1) ASSERT_SAME(schedule_best_makespan(&loop, papers), 2 * (10 + 12) + 4);
        schedule_free(&one);
        schedule_free(&two);
        schedule_free(&loop);
    }
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_generators_are_sound_for_every_size),
        cmocka_unit_test(messages_and_held_micro_batches_are_those_of_the_formulas),
        cmocka_unit_test(bubbles_are_those_of_the_formulas_for_all_durations),
        cmocka_unit_test(the_same_wish_gives_the_same_schedule_and_its_text_gives_it_back),
        cmocka_unit_test(each_rank_holds_what_its_paper_says),
        cmocka_unit_test(a_stage_of_both_directions_is_stored_once),
        cmocka_unit_test(an_unchecked_last_group_of_interleaved_deadlocks_and_a_planned_one_runs),
        cmocka_unit_test(one_queue_for_a_pair_of_ranks_misorders_what_goes_both_ways),
        cmocka_unit_test(no_bubble_is_below_the_least),
        cmocka_unit_test(a_v_waits_where_its_formula_says),
        cmocka_unit_test(the_greedy_scheduler_keeps_its_limit_and_is_no_worse_than_hand_made_ones),
        cmocka_unit_test(the_greedy_scheduler_uses_all_memory_that_it_is_given),
        cmocka_unit_test(one_micro_batch_takes_the_sum_of_its_way),
        cmocka_unit_test(a_pair_takes_its_own_time_and_its_outputs_leave_at_its_end),
        cmocka_unit_test(a_shorter_pair_leaves_the_middle_of_dualpipe_idle_by_the_formula),
        cmocka_unit_test(the_period_is_what_repeated_steps_cost),
        cmocka_unit_test(the_search_finds_what_trying_all_orders_finds),
        cmocka_unit_test(the_search_takes_no_more_than_it_can_count),
        cmocka_unit_test(formulas_begin_where_they_say),
        cmocka_unit_test(the_most_is_of_the_rank_that_has_it),
        cmocka_unit_test(the_search_takes_stages_of_a_rank_one_after_the_other),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
