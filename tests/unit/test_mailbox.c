// test_mailbox.c: notices come in the order in which they were sent, also those that found no free slot.
#include "comm/mailbox.h"

// cmocka.h needs these before it
// clang-format off
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
// clang-format on

static void send_next(int64_t *sent) {
    assert_true(mailbox_send(&(Notice){.count = (*sent)++}, 1));
}

static void receive_next(int64_t *received) {
    Notice notice;
    int from;
    assert_true(mailbox_receive(&notice, &from));
    assert_int_equal(from, 1);
    assert_int_equal(notice.count, (*received)++);
}

// One mailbox both ways: what this rank sends to rank 1 comes back from there.
static void notices_come_in_order(void **state) {
    (void)state;
    static Mailbox box;
    mailboxes_use(2);
    assert_false(mailbox_send(&(Notice){0}, 1));  // not joined yet
    assert_false(mailboxes_reach_all());
    mailbox_join(1, &box, &box);
    assert_true(mailboxes_reach_all());
    int64_t sent = 0, received = 0;
    while (sent < 3 * MAILBOX_SLOTS) send_next(&sent);
    for (int round = 0; round < 3 * MAILBOX_SLOTS; round++) {  // there are always some without a slot
        receive_next(&received);
        send_next(&sent);
    }
    while (received < sent) receive_next(&received);
    mailboxes_flush();
    Notice notice;
    int from;
    assert_false(mailbox_receive(&notice, &from));
    mailboxes_use(0);
}

int main(int argc, char **argv) {
    base_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(notices_come_in_order)};
    cmocka_set_message_output(CM_OUTPUT_TAP);
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
