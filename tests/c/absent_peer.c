// Transfers with a task that has left and joins again: `absent_peer SERVICE`, a recoverable job of two tasks, both in this
// process.
#include "two_agents.h"

enum { LEN = 100000 };

static muster_buffer *new_buffer(unsigned char **data, uint64_t seed) {
    muster_buffer *buffer = NULL;
    void *memory = NULL;
    size_t len = 0;
    OK(muster_buffer_allocate(LEN, &buffer));
    OK(muster_buffer_data(buffer, &memory, &len));
    fill(memory, LEN, seed);
    *data = memory;
    return buffer;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    muster_agent *first = NULL, *second = NULL;
    join_both(argv[1], &first, &second);
    muster_members both, left;
    OK(muster_connected(first, &both));
    while (both.len != 2) {
        OK(muster_watch(first, both.items, both.len, PATIENCE_MS, NULL, &left));
        OK(muster_members_free(&both));
        both = left;
    }
    OK(muster_leave(second, PATIENCE_MS, NULL));
    OK(muster_agent_free(second));
    OK(muster_watch(first, both.items, both.len, PATIENCE_MS, NULL, &left));
    CHECK(left.len == 1);
    OK(muster_members_free(&both));
    OK(muster_members_free(&left));

    unsigned char *sent[2], *received[2];
    muster_buffer *from[2], *into[2];
    for (int i = 0; i < 2; i++) {
        from[i] = new_buffer(&sent[i], (uint64_t)i + 1);
        into[i] = new_buffer(&received[i], 9);
    }

    // Four sends to the absent task: it will take the first and the last.
    muster_transfer *kept = NULL, *late = NULL, *cancelled = NULL, *last = NULL;
    bool is_over = true;
    OK(muster_send(first, from[0], 1, 1, &kept));
    OK(muster_transfer_poll(kept, &is_over, NULL));
    CHECK(!is_over);
    REFUSES(MUSTER_STATUS_TIMED_OUT, "waits for the transfer engines of the tasks 1 after 50 ms",
            muster_transfer_wait(kept, 50, NULL, NULL));

    muster_launch_options options;
    muster_transfer_spec spec = {
        .direction = MUSTER_SEND, .from = muster_device(0, 0), .to = muster_device(1, 0), .key = 2, .buffer = from[0], .len = LEN};
    OK(muster_launch_options_init(&options, sizeof options));
    options.deadline_ms = 100;
    OK(muster_transfer_start(first, &spec, 1, &options, &late));
    REFUSES(MUSTER_STATUS_DEADLINE, "task 1", muster_transfer_wait(late, PATIENCE_MS, NULL, NULL));
    RETURNS(MUSTER_STATUS_DEADLINE, muster_transfer_poll(late, &is_over, NULL));
    CHECK(is_over);

    OK(muster_send(first, from[0], 1, 3, &cancelled));
    OK(muster_transfer_cancel(cancelled, "changed its mind", PATIENCE_MS));
    REFUSES(MUSTER_STATUS_CANCELLED, "changed its mind", muster_transfer_wait(cancelled, PATIENCE_MS, NULL, NULL));

    OK(muster_send(first, from[1], 1, 4, &last));

    // To prepare is a call that waits.
    muster_prepared *prepared = NULL;
    REFUSES(MUSTER_STATUS_TIMED_OUT, "task 1", muster_prepare(first, &spec, 1, NULL, 100, NULL, &prepared));

    // A request that is wrong on this side fails at once, and takes no place.
    muster_transfer *wrong = NULL;
    muster_transfer_spec twice[2] = {spec, spec};
    OK(muster_transfer_start(first, twice, 2, NULL, &wrong));
    RETURNS(MUSTER_STATUS_DUPLICATE_KEY, muster_transfer_wait(wrong, 0, NULL, NULL));
    OK(muster_transfer_free(wrong));

    // A task that the job does not have is not waited for.
    muster_transfer *unknown = NULL;
    OK(muster_send(first, from[0], 2, 5, &unknown));
    RETURNS(MUSTER_STATUS_UNKNOWN_DEVICE, muster_transfer_wait(unknown, PATIENCE_MS, NULL, NULL));
    OK(muster_transfer_free(unknown));

    second = join_as(argv[1], 1, 2);
    muster_transfer *receives[4];
    muster_buffer *targets[4] = {into[0], into[1], into[1], into[1]};
    for (uint64_t i = 0; i < 4; i++) {
        OK(muster_receive(second, targets[i], 0, i + 1, &receives[i]));
        bool is_sent = i == 0 || i == 3;
        muster_status status = muster_transfer_wait(receives[i], PATIENCE_MS, NULL, NULL);
        CHECK(is_sent ? status == MUSTER_STATUS_OK : status != MUSTER_STATUS_OK && status != MUSTER_STATUS_TIMED_OUT);
        OK(muster_transfer_free(receives[i]));
    }
    check_contents(received[0], LEN, 1);
    check_contents(received[1], LEN, 2);
    OK(muster_transfer_wait(kept, PATIENCE_MS, NULL, NULL));
    OK(muster_transfer_wait(last, PATIENCE_MS, NULL, NULL));

    muster_transfer *all[] = {kept, late, cancelled, last};
    for (int i = 0; i < 4; i++) {
        OK(muster_transfer_free(all[i]));
    }
    for (int i = 0; i < 2; i++) {
        OK(muster_buffer_free(from[i]));
        OK(muster_buffer_free(into[i]));
    }
    OK(muster_agent_free(second));
    OK(muster_agent_free(first));
    printf("DONE\n");
    return 0;
}
