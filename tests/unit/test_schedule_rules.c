// Pipeline schedules: invalid ones are refused, naming the rule, as lists and as text.
#include "schedules.h"

static const Durations ones = {1, 1, 1, 3, 0};

// ---- invalid schedules are refused, naming the rule ----

// One action of a list is replaced, or removed if there is no replacement.
static void put(Schedule *s, int rank, int position, Action action) {
    ActionList *list = &s->list[rank];
    if (action.passes) list->action[position] = action;
    else
        memmove(&list->action[position], &list->action[position + 1],
                sizeof action * (size_t)(--list->count - position));
}

static void refused(Schedule s, ScheduleRule rule, int rank, int position) {
    ScheduleFault fault;
    if (schedule_verify(&s, &fault)) fail_msg("\"%s\" was not enforced", schedule_rule_text(rule));
    char begin[64];
    snprintf(begin, sizeof begin, "rank %d, position %d (", rank, position);
    if (fault.rule != rule || strncmp(fault.sentence, begin, strlen(begin)))
        fail_msg("expected \"%s\" at rank %d, position %d; got: %s", schedule_rule_text(rule), rank,
                 position, fault.sentence);
    assert_non_null(strstr(fault.sentence, schedule_rule_text(rule)));
    assert_true(isnan(play(&s, ones)));
    schedule_free(&s);
}

static Schedule swapped(ScheduleKind kind, int p, int m, int rank, int i, int j) {
    Schedule s = make(kind, p, m);
    Action action = s.list[rank].action[i];
    s.list[rank].action[i] = s.list[rank].action[j];
    s.list[rank].action[j] = action;
    return s;
}

static Schedule with(ScheduleKind kind, int p, int m, int rank, int position, Action action) {
    Schedule s = make(kind, p, m);
    put(&s, rank, position, action);
    return s;
}

static void each_rule_refuses_what_breaks_it(void **context) {
    (void)context;
    const Action none = {0};
    // zb_h1, p = 2, m = 2: rank 0: F0 F1 B0 W0 B1 W1; rank 1: F0 B0 F1 B1 W0 W1
    refused(with(ZB_H1, 2, 2, 0, 1, (Action){1, {{PASS_F, 2, 1, 0}}}), RULE_KNOWN, 0, 1);
    refused(with(ZB_H1, 2, 2, 0, 1, (Action){1, {{PASS_F, 0, 2, 0}}}), RULE_KNOWN, 0, 1);
    refused(with(ZB_H1, 2, 2, 0, 1, (Action){1, {{PASS_F, 0, 1, 1}}}), RULE_KNOWN, 0, 1);
    refused(with(DUALPIPE, 2, 4, 0, 0, (Action){1, {{PASS_F, 0, 0, 1}}}), RULE_DIRECTION, 0, 0);
    refused(with(ZB_H1, 2, 2, 0, 1, (Action){1, {{PASS_F, 1, 1, 0}}}), RULE_PLACE, 0, 1);
    refused(with(ZB_H1, 2, 2, 0, 1, (Action){1, {{PASS_F, 0, 0, 0}}}), RULE_TWICE, 0, 1);
    refused(with(ZB_H1, 2, 2, 0, 3, (Action){1, {{PASS_BW, 0, 0, 0}}}), RULE_TWICE, 0, 3);
    refused(with(ZB_H1, 2, 2, 0, 1, (Action){2, {{PASS_F, 0, 1, 0}, {PASS_B, 0, 0, 0}}}), RULE_PAIR, 0, 1);
    refused(with(ZB_H1, 2, 2, 0, 1, none), RULE_F_MISSING, 0, 5);
    refused(with(ZB_H1, 2, 2, 1, 3, none), RULE_B_MISSING, 1, 5);
    refused(with(ZB_H1, 2, 2, 1, 5, none), RULE_W_MISSING, 1, 5);
    refused(with(ONE_F_ONE_B, 2, 2, 1, 3, (Action){1, {{PASS_B, 1, 1, 0}}}), RULE_W_MISSING, 1, 4);
    refused(swapped(ZB_H1, 2, 2, 1, 0, 1), RULE_B_AFTER_F, 1, 0);
    refused(swapped(ZB_H1, 2, 2, 0, 2, 3), RULE_W_AFTER_B, 0, 2);
    // the turn of a V is on one rank: p = 1, stages 0 and 1
    refused(swapped(ZB_V, 1, 1, 0, 0, 1), RULE_F_AFTER_F, 0, 0);
    refused(swapped(ZB_V, 1, 1, 0, 2, 4), RULE_B_AFTER_B, 0, 2);
    // p = 2, m = 2, rank 0 waits for a B before it sends the F that it takes: F0 B1 F1 …
    Schedule s = make(ZB_H1, 2, 2);
    Action f1 = s.list[0].action[1], b0 = s.list[0].action[2], last_f = s.list[1].action[2],
           b = s.list[1].action[1];
    put(&s, 0, 1, b0), put(&s, 0, 2, f1), put(&s, 1, 1, last_f), put(&s, 1, 2, b);
    refused(s, RULE_DEADLOCK, 0, 1);
}

// What stands against the action that is refused: where, and on which rank.
static void told(Schedule s, const char *words) {
    ScheduleFault fault;
    assert_false(schedule_verify(&s, &fault));
    if (!strstr(fault.sentence, words)) fail_msg("expected \"%s\"; got: %s", words, fault.sentence);
    schedule_free(&s);
}

static void what_breaks_a_rule_is_told_with_what_stands_against_it(void **context) {
    (void)context;
    told(with(ZB_H1, 2, 2, 0, 1, (Action){1, {{PASS_F, 2, 1, 0}}}), "2 stages, 2 micro-batches, 1 ");
    told(with(DUALPIPE, 2, 4, 0, 0, (Action){1, {{PASS_F, 0, 0, 1}}}), "micro-batch 0 goes in direction 0");
    told(with(ZB_H1, 2, 2, 0, 1, (Action){1, {{PASS_F, 1, 1, 0}}}), "stage 1 of direction 0 is on rank 1");
    told(with(ZB_H1, 2, 2, 0, 1, (Action){1, {{PASS_F, 0, 0, 0}}}), "F0.0.0 stands at position 0 already");
    told(swapped(ZB_H1, 2, 2, 1, 0, 1), "F1.0.0 stands at position 1");
    told(swapped(ZB_H1, 2, 2, 0, 2, 3), "B0.0.0 stands at position 3");
    // rank 1 takes F2 before F1; 1F1B: rank 0: F0 F1 BW0 F2 …; rank 1: F0 BW0 F1 BW1 F2 BW2
    Schedule s = swapped(ONE_F_ONE_B, 2, 3, 1, 2, 4);
    ScheduleFault fault;
    assert_false(schedule_message_order(&s, QUEUE_PAIR_AND_KIND, &fault));
    const char *words = "message 1 from rank 0 is for F1.1.0, sent at position 1 there";
    if (fault.rank != 1 || fault.position != 2 || !strstr(fault.sentence, words))
        fail_msg("expected \"%s\"; got: %s", words, fault.sentence);
    schedule_free(&s);
}

static void what_cannot_be_made_is_refused_by_its_flag(void **context) {
    (void)context;
    ScheduleWish odd = {3, 6, 2, 0, false, 0, papers}, short_group = {4, 8, 2, 3, false, 0, papers};
    assert_non_null(strstr(schedule_refusal(DUALPIPE, &odd), "--stages"));
    assert_null(schedule_refusal(DUALPIPE_V, &odd));
    assert_non_null(strstr(schedule_refusal(INTERLEAVED, &short_group), "--group"));
    short_group.group = 4;
    assert_null(schedule_refusal(INTERLEAVED, &short_group));
    ScheduleWish many = {64, 8, 16, 0, false, 0, papers};
    assert_non_null(strstr(schedule_refusal(INTERLEAVED, &many), "--chunks"));
    many.chunks = 8;
    assert_null(schedule_refusal(INTERLEAVED, &many));
}

// ---- 10,000 random changes ----

static uint64_t random_state;
static int random_below(int n) {  // splitmix64
    uint64_t x = random_state += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (int)((x ^ x >> 31) % (uint64_t)n);
}

static void change(Schedule *s) {
    int r = random_below(s->ranks), other = random_below(s->ranks);
    ActionList *list = &s->list[r];
    int i = random_below(list->count), j = random_below(list->count);
    StagePass *pass = &list->action[i].pass[0];
    Action action = list->action[i];
    switch (random_below(8)) {
        case 0:  // between two ranks
            j = random_below(s->list[other].count);
            list->action[i] = s->list[other].action[j];
            s->list[other].action[j] = action;
            break;
        case 1:
            pass->micro_batch = random_below(s->micro_batches + 1);
            break;
        case 2:
            pass->stage = random_below(s->stages + 1);
            break;
        case 3:
            pass->direction = random_below(3) - 1;
            break;
        case 4:
            pass->kind = (PassKind)random_below(4);
            break;
        default:  // mostly: two actions of a list
            list->action[i] = list->action[j];
            list->action[j] = action;
    }
}

#ifdef __SANITIZE_ADDRESS__
enum { CHANGED = 2000 };  // fifteen times as slow
#else
enum { CHANGED = 10000 };
#endif
static void random_changes_are_refused_or_still_run(void **context) {
    (void)context;
    int sound = 0, broken = 0;
    for (int i = 0; i < CHANGED; i++) {
        random_state = (uint64_t)i;
        int kind = random_below(SCHEDULE_KINDS), p = 2 + 2 * random_below(2), m = 1 + random_below(2 * p);
        Schedule s = make((ScheduleKind)kind, p, m);
        for (int changes = 1 + random_below(2); changes > 0; changes--) change(&s);
        ScheduleFault fault;
        bool verdict = schedule_verify(&s, &fault), runs = !isnan(play(&s, ones));
        if (verdict != runs)
            fail_msg("change %d of %s, p=%d m=%d: %s, but played it %s", i, s.name, p, m,
                     verdict ? "sound" : fault.sentence, runs ? "runs" : "does not run");
        if (verdict) {
            ScheduleTimes times = schedule_times(&s, ones);
            assert_true(fabs(times.makespan - play(&s, ones)) < 1e-9);
            schedule_times_free(&times, &s);
        }
        sound += verdict, broken += !verdict;
        schedule_free(&s);
    }
    // Both must happen, or the test would show little.
    assert_true(sound > CHANGED / 10 && broken > CHANGED / 10);
}

// ---- text ----

static void malformed_text_is_refused_with_its_line(void **context) {
    (void)context;
    static const char *const good[] = {"# pp-schedule name=x p=1 m=1 stages=1 dirs=1\n", "place 0: 0\n",
                                       "mbs 0: 0\n", "rank 0: F0.0.0 BW0.0.0\n"};
    static const struct {
        int line;
        const char *text, *words;
    } bad[] = {
        {1, "", "# pp-schedule"},
        {1, "pp-schedule\n", "# pp-schedule"},
        {1, "# pp-schedule name= p=1 m=1 stages=1 dirs=1\n", "name"},
        {1, "# pp-schedule name=a<b p=1 m=1 stages=1 dirs=1\n", "the name may have letters, digits"},
        {1, "# pp-schedule name=x m=1 p=1 stages=1 dirs=1\n", "\"p=\" is missing"},
        {1, "# pp-schedule name=x p=0 m=1 stages=1 dirs=1\n", "p= is not a number from 1 to 64"},
        {1, "# pp-schedule name=x p=99999999999999999999 m=1 stages=1 dirs=1\n", "from 1 to 64"},
        {1, "# pp-schedule name=x p=1 m=1 stages=1 dirs=3\n", "dirs= is not a number from 1 to 2"},
        {1, "# pp-schedule name=x p=1 m=1 stages=1 dirs=1 more\n", "more on it"},
        {2, "place 1: 0\n", "\"place 0:\" is missing"},
        {2, "place 0: 1\n", "the rank of a stage is not a number from 0 to 0"},
        {2, "place 0:\n", "the rank of a stage is missing"},
        {2, "place 0: 0 0\n", "more on it"},
        {3, "mbs 0: 1\n", "a micro-batch is not a number from 0 to 0"},
        {3, "mbs 0: 0 0\n", "has a direction already"},
        {4, "", "\"rank 0:\" is missing"},
        {4, "rank 0: G0.0.0\n", "begins with F, B, W or BW"},
        {4, "rank 0: F0.0\n", "\".\" is missing"},
        {4, "rank 0: F0.0.0BW0.0.0\n", "an action ends with its direction"},
        {4, "rank 0: F0.0.0+\n", "begins with F, B, W or BW"},
        {4, "rank 0: F-1.0.0\n", "a stage is missing"},
        {4, "rank 0: F0.0.0 BW0.0.0\nrank 1:\n", "nothing comes after"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[400] = "", begin[32];
        for (int line = 1; line <= 4; line++)
            strcat(text, line == bad[i].line ? bad[i].text : good[line - 1]);
        snprintf(begin, sizeof begin, "line %d: ", bad[i].line + (strstr(bad[i].text, "rank 1") != NULL));
        Schedule s;
        char *fault = schedule_parse(&s, text, strlen(text));
        if (!fault) fail_msg("\"%s\" was taken", bad[i].text);
        if (!strstr(fault, bad[i].words) || strncmp(fault, begin, strlen(begin)))
            fail_msg("\"%s\": expected %s… %s, got: %s", bad[i].text, begin, bad[i].words, fault);
        free(fault);
    }
    // Two directions, one of which lacks a micro-batch; and blanks and empty lines, which are allowed.
    Schedule s;
    const char *lacking =
        "# pp-schedule name=x p=1 m=3 stages=1 dirs=2\nplace 0: 0\nplace 1: 0\nmbs 0: 0\nmbs 1:\n";
    char *fault = schedule_parse(&s, lacking, strlen(lacking));
    assert_non_null(strstr(fault, "a direction is missing for 2 of 3"));
    free(fault);
    const char *loose =
        "# pp-schedule  name=x p=1 m=1\tstages=1 dirs=1\r\n\nplace 0: 0 \n mbs 0: 0\n\n\nrank 0: F0.0.0  "
        "B0.0.0 W0.0.0";
    fault = schedule_parse(&s, loose, strlen(loose));
    if (fault) fail_msg("%s", fault);
    ScheduleFault broken;
    assert_true(schedule_verify(&s, &broken));
    schedule_free(&s);
}

static void the_format_is_the_one_that_tools_read(void **context) {
    (void)context;
    Schedule s = make(DUALPIPE, 2, 4);
    size_t size;
    char *text = text_of(&s, &size);
    assert_string_equal(text,
                        "# pp-schedule name=dualpipe p=2 m=4 stages=2 dirs=2\n"
                        "place 0: 0 1\nplace 1: 1 0\nmbs 0: 0 1\nmbs 1: 2 3\n"
                        "rank 0: F0.0.0 F1.2.1 F0.1.0 BW1.2.1 F1.3.1+BW0.0.0 BW1.3.1 B0.1.0 W0.1.0\n"
                        "rank 1: F0.2.1 F1.0.0 F0.3.1 BW1.0.0 F1.1.0+BW0.2.1 BW1.1.0 B0.3.1 W0.3.1\n");
    free(text);
    schedule_free(&s);
}

static void the_picture_in_letters_is_exact(void **context) {
    (void)context;
    Schedule s = make(ONE_F_ONE_B, 3, 3);
    ScheduleTimes times = schedule_times(&s, (Durations){1, 1, 1, 3, 0});
    char *letters = schedule_letters(&s, &times, 42);
    assert_string_equal(letters,
                        "rank 0  |F0F1F2........D0--..D1--..D2--\n"
                        "rank 1  |..F0F1....D0--F2D1--..D2--....\n"
                        "rank 2  |....F0D0--F1D1--F2D2--........");
    free(letters);
    schedule_times_free(&times, &s);
    schedule_free(&s);
}

// A number that is cut short would be another one; equal times are as wide as their sixths let them be.
static void the_picture_cuts_no_number_and_no_sixth(void **context) {
    (void)context;
    Schedule s = make(AFAB, 1, 11);
    ScheduleTimes times = schedule_times(&s, (Durations){1, 1, 1, 3, 0});
    char *letters = schedule_letters(&s, &times, 9 + 2 * 11 + 2 * 33);
    assert_non_null(strstr(letters, "|F0F1F2F3F4F5F6F7F8F9F-D0--D1--"));
    assert_non_null(strstr(letters, "D9--D10-"));
    free(letters);
    schedule_times_free(&times, &s);
    schedule_free(&s);
    s = make(AFAB, 1, 2);
    times = schedule_times(&s, (Durations){6, 4, 3, 7, 0});
    letters = schedule_letters(&s, &times, 9 + 26 + 5);  // a unit of F, B + W = 6, 7 is one column
    assert_string_equal(letters, "rank 0  |F0----F1----D0-----D1-----");
    free(letters);
    schedule_times_free(&times, &s);
    schedule_free(&s);
}

// ranks, micro-batches, stages, directions
static void make_by_hand(const void *sizes) {
    const int *of = sizes;
    Schedule s = schedule_new("mine", of[0], of[1], of[2], of[3]);
    schedule_free(&s);
}
static Schedule mine;
static void append_to(const void *rank) {
    schedule_append(&mine, *(const int *)rank, (Action){1, {{PASS_F, 0, 0, 0}}});
}

static void sizes_beyond_the_arrays_are_refused(void **context) {
    (void)context;
    const int most[] = {RANKS_MOST, MICRO_BATCHES_MOST, STAGES_MOST, DIRECTIONS_MOST};
    for (int i = 0; i < 4; i++)
        for (int beyond = 0; beyond < 2; beyond++) {
            int sizes[] = {2, 2, 2, 1};
            assert_null(refusal(make_by_hand, sizes));
            sizes[i] = most[i];
            assert_null(refusal(make_by_hand, sizes));
            sizes[i] = beyond ? most[i] + 1 : 0;
            const char *why = refusal(make_by_hand, sizes);
            assert_non_null(why);
            assert_non_null(strstr(why, "of which there are 1 to 64, 4096, 512 and 2"));
        }
    mine = schedule_new("mine", 2, 1, 2, 1);
    for (int rank = -1; rank < 3; rank++) {
        const char *why = refusal(append_to, &rank);
        if (rank >= 0 && rank < 2) assert_null(why);
        else assert_non_null(strstr(why, "schedule mine: there is no rank"));
    }
    schedule_free(&mine);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_rule_refuses_what_breaks_it),
        cmocka_unit_test(what_breaks_a_rule_is_told_with_what_stands_against_it),
        cmocka_unit_test(what_cannot_be_made_is_refused_by_its_flag),
        cmocka_unit_test(random_changes_are_refused_or_still_run),
        cmocka_unit_test(malformed_text_is_refused_with_its_line),
        cmocka_unit_test(the_format_is_the_one_that_tools_read),
        cmocka_unit_test(the_picture_in_letters_is_exact),
        cmocka_unit_test(the_picture_cuts_no_number_and_no_sixth),
        cmocka_unit_test(sizes_beyond_the_arrays_are_refused),
    };
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
