// Transfers that end early: `cancel SERVICE`, a recoverable job of two tasks, both in this process.
#include "two_agents.h"

// A callback that misuses the library: it is told so.
static void release_badly(void *context, void *data, size_t len) {
    muster_agent **agent = context;
    (void)len;
    free(data);
    RETURNS(MUSTER_STATUS_IN_CALLBACK, muster_barrier(*agent, "never", NULL, 0, PATIENCE_MS, NULL, NULL));
    RETURNS(MUSTER_STATUS_IN_CALLBACK, muster_agent_free(*agent));
    *agent = NULL;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    muster_agent *first = NULL, *second = NULL;
    join_both(argv[1], &first, &second);
    OK(muster_wait_for_engines(first, NULL, 0, PATIENCE_MS, NULL));
    OK(muster_wait_for_engines(second, NULL, 0, PATIENCE_MS, NULL));

    enum { LEN = 100000 };
    int released = 0;
    unsigned char *memory = malloc(LEN), *source = malloc(LEN);
    muster_buffer *into = NULL, *from = NULL;
    muster_transfer *receive = NULL, *send = NULL;
    muster_cancellation *now = NULL;
    bool is_over = true;
    CHECK(memory != NULL && source != NULL);
    memset(memory, 0x5a, LEN);
    fill(source, LEN, 1);
    OK(muster_buffer_register(memory, LEN, free_and_count, &released, &into));
    OK(muster_buffer_register(source, LEN, free_and_count, &released, &from));

    // The receive waits for a send that comes later.
    OK(muster_receive(first, into, 1, 5, &receive));
    OK(muster_transfer_poll(receive, &is_over, NULL));
    CHECK(!is_over);
    REFUSES(MUSTER_STATUS_TIMED_OUT, "goes on", muster_transfer_wait(receive, 0, NULL, NULL));
    RETURNS(MUSTER_STATUS_TIMED_OUT, muster_transfer_wait(receive, 50, NULL, NULL));
    OK(muster_cancellation_new(&now));
    RETURNS(MUSTER_STATUS_TIMED_OUT, muster_transfer_wait(receive, 50, now, NULL));
    OK(muster_cancellation_cancel(now));
    RETURNS(MUSTER_STATUS_INTERRUPTED, muster_transfer_wait(receive, PATIENCE_MS, now, NULL));
    OK(muster_cancellation_free(now));

    // Its cancellation is proven, and the other side learns the reason.
    OK(muster_transfer_cancel(receive, "the step was skipped", PATIENCE_MS));
    REFUSES(MUSTER_STATUS_CANCELLED, "the step was skipped", muster_transfer_wait(receive, 0, NULL, NULL));
    OK(muster_send(second, from, 0, 5, &send));
    REFUSES(MUSTER_STATUS_CANCELLED, "the step was skipped", muster_transfer_wait(send, PATIENCE_MS, NULL, NULL));
    for (size_t at = 0; at < LEN; at++) {
        CHECK(memory[at] == 0x5a);
    }
    OK(muster_transfer_free(receive));
    OK(muster_transfer_free(send));

    // The next launch of both sides succeeds.
    OK(muster_receive(first, into, 1, 6, &receive));
    OK(muster_send(second, from, 0, 6, &send));
    OK(muster_transfer_wait(receive, PATIENCE_MS, NULL, NULL));
    OK(muster_transfer_wait(send, PATIENCE_MS, NULL, NULL));
    check_contents(memory, LEN, 1);
    OK(muster_transfer_free(receive));
    OK(muster_transfer_free(send));

    // A deadline that nobody meets.
    muster_launch_options options;
    OK(muster_launch_options_init(&options, sizeof options));
    options.deadline_ms = 50;
    options.channel = 3;
    muster_transfer_spec spec = {.direction = MUSTER_RECEIVE,
                                 .from = muster_device(1, 0),
                                 .to = muster_device(0, 0),
                                 .key = 7,
                                 .buffer = into,
                                 .offset = 10,
                                 .len = 20};
    OK(muster_transfer_start(first, &spec, 1, &options, &receive));
    RETURNS(MUSTER_STATUS_DEADLINE, muster_transfer_wait(receive, PATIENCE_MS, NULL, NULL));
    OK(muster_transfer_free(receive));

    // The end of an agent ends its transfers. Its peer learns it as the death of the task.
    OK(muster_receive(first, into, 1, 8, &receive));
    muster_transfer *other = NULL;
    options.deadline_ms = -1;
    options.channel = 4;
    spec = (muster_transfer_spec){.direction = MUSTER_RECEIVE,
                                  .from = muster_device(0, 0),
                                  .to = muster_device(1, 0),
                                  .key = 9,
                                  .buffer = from,
                                  .len = LEN};
    OK(muster_transfer_start(second, &spec, 1, &options, &other));
    OK(muster_agent_free(first));
    RETURNS(MUSTER_STATUS_CLOSED, muster_transfer_wait(receive, PATIENCE_MS, NULL, NULL));
    muster_status lost = muster_transfer_wait(other, PATIENCE_MS, NULL, NULL);
    CHECK(lost == MUSTER_STATUS_PEER_DEAD || lost == MUSTER_STATUS_STALE_INCARNATION);
    CHECK(muster_error_task() == 0);
    OK(muster_transfer_free(receive));
    OK(muster_transfer_free(other));
    OK(muster_buffer_free(into));
    OK(muster_buffer_free(from));
    wait_for_releases(&released, 2);

    // A callback must not wait.
    muster_agent *seen = second;
    muster_buffer *bad = NULL;
    OK(muster_buffer_register(malloc(16), 16, release_badly, &seen, &bad));
    OK(muster_buffer_free(bad));
    CHECK(seen == NULL);
    OK(muster_agent_free(second));
    CHECK(muster_handle_count() == 0);
    printf("DONE\n");
    return 0;
}
