// Two tasks that move memory until one of them is killed: `peer_death SERVICE TASK TRANSPORT`. Task 0 survives.
#include "checks.h"

static const size_t LEN = 3 << 20;

int main(int argc, char **argv) {
    CHECK(argc == 4);
    const uint32_t task = (uint32_t)atoi(argv[2]);
    int released = 0;
    muster_join_options options;
    muster_agent *agent = NULL;
    OK(muster_join_options_init(&options, sizeof options));
    options.service = argv[1];
    options.task = task;
    options.transport = (uint32_t)atoi(argv[3]);
    OK(muster_join(&options, PATIENCE_MS, NULL, &agent));
    OK(muster_wait_for_engines(agent, NULL, 0, PATIENCE_MS, NULL));
    muster_members both, members;
    OK(muster_connected(agent, &both));
    CHECK(both.len == 2);

    void *sent = malloc(LEN), *received = malloc(LEN);
    muster_buffer *out = NULL, *in = NULL;
    muster_transfer *transfer = NULL;
    CHECK(sent != NULL && received != NULL);
    fill(sent, LEN, task);
    OK(muster_buffer_register(sent, LEN, free_and_count, &released, &out));
    OK(muster_buffer_register(received, LEN, free_and_count, &released, &in));
    const uint32_t here = muster_device(task, 0), there = muster_device(1 - task, 0);
    const muster_transfer_spec specs[2] = {
        {.direction = MUSTER_SEND, .from = here, .to = there, .key = 1, .buffer = out, .len = LEN},
        {.direction = MUSTER_RECEIVE, .from = there, .to = here, .key = 1, .buffer = in, .len = LEN},
    };
    muster_status status = MUSTER_STATUS_OK;
    for (int round = 0; status == MUSTER_STATUS_OK; round++) {
        OK(muster_transfer_start(agent, specs, 2, NULL, &transfer));
        status = muster_transfer_wait(transfer, PATIENCE_MS, NULL, NULL);
        if (round == 0) {
            check_contents(received, LEN, 1 - task);
            printf("MOVING\n");
            fflush(stdout);
        }
        if (status == MUSTER_STATUS_OK) {
            OK(muster_transfer_free(transfer));
        }
    }
    CHECK(status == MUSTER_STATUS_PEER_DEAD || status == MUSTER_STATUS_STALE_INCARNATION ||
          status == MUSTER_STATUS_TRANSPORT || status == MUSTER_STATUS_UNKNOWN_DEVICE);
    CHECK(strlen(muster_error_message()) > 0);
    // The memory is the program's again.
    OK(muster_transfer_cancel(transfer, "its peer is gone", PATIENCE_MS));
    memset(received, 0x5a, LEN);
    RETURNS(status, muster_transfer_wait(transfer, 0, NULL, NULL));
    OK(muster_transfer_free(transfer));
    OK(muster_buffer_free(out));
    OK(muster_buffer_free(in));
    wait_for_releases(&released, 2);

    // The service has noticed too.
    OK(muster_watch(agent, both.items, both.len, PATIENCE_MS, NULL, &members));
    CHECK(members.len == 1 && members.items[0].task == task);
    OK(muster_members_free(&members));
    OK(muster_members_free(&both));
    OK(muster_live_set(agent, PATIENCE_MS, NULL, &members));
    CHECK(members.len == 1);
    OK(muster_members_free(&members));
    OK(muster_leave(agent, PATIENCE_MS, NULL));
    OK(muster_agent_free(agent));
    CHECK(muster_handle_count() == 0);
    printf("SURVIVED %s\n", muster_status_name(status));
    return 0;
}
