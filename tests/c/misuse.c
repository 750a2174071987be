// Every function used wrongly: `misuse SERVICE`, a job of one task. Nothing may crash, and each error says what is wrong.
#include "checks.h"

#define ARGUMENT(words, call) REFUSES(MUSTER_STATUS_INVALID_ARGUMENT, words, call)
#define HANDLE(call) REFUSES(MUSTER_STATUS_INVALID_HANDLE, "no handle", call)

static const int64_t NEGATIVE = -1, TOO_LONG = MUSTER_TIMEOUT_MAX_MS + 1;

static void refuse_joins(const char *service) {
    muster_join_options options;
    muster_agent *agent = NULL;
    ARGUMENT("options is NULL", muster_join_options_init(NULL, sizeof options));
    ARGUMENT("size is 0", muster_join_options_init(&options, 0));
    ARGUMENT("size is 1000000", muster_join_options_init(&options, 1000000));
    OK(muster_join_options_init(&options, sizeof options));
    options.service = service;
    options.task = 0;
    ARGUMENT("options is NULL", muster_join(NULL, PATIENCE_MS, NULL, &agent));
    ARGUMENT("agent is NULL", muster_join(&options, PATIENCE_MS, NULL, NULL));
    ARGUMENT("timeout_ms is -1", muster_join(&options, NEGATIVE, NULL, &agent));
    ARGUMENT("timeout_ms is", muster_join(&options, TOO_LONG, NULL, &agent));
    HANDLE(muster_join(&options, PATIENCE_MS, (const muster_cancellation *)(uintptr_t)12345, &agent));

#define JOIN_REFUSES(status, words, field, value)                                                                      \
    do {                                                                                                               \
        muster_join_options wrong = options;                                                                           \
        wrong.field = value;                                                                                           \
        REFUSES(status, words, muster_join(&wrong, PATIENCE_MS, NULL, &agent));                                        \
    } while (0)
    JOIN_REFUSES(MUSTER_STATUS_INVALID_ARGUMENT, "options->size is 0", size, 0);
    JOIN_REFUSES(MUSTER_STATUS_INVALID_ARGUMENT, "options->size is", size, SIZE_MAX);
    JOIN_REFUSES(MUSTER_STATUS_INVALID_ARGUMENT, "service is not UTF-8", service, "\xff\xfe");
    JOIN_REFUSES(MUSTER_STATUS_INVALID_ARGUMENT, "task is -2", task, -2);
    JOIN_REFUSES(MUSTER_STATUS_INVALID_ARGUMENT, "tasks is", tasks, (int64_t)1 << 40);
    JOIN_REFUSES(MUSTER_STATUS_INVALID_ARGUMENT, "heartbeat_timeout_ms", heartbeat_timeout_ms, -5);
    JOIN_REFUSES(MUSTER_STATUS_SETTINGS, "heartbeat timeout", heartbeat_timeout_ms, 1);
    JOIN_REFUSES(MUSTER_STATUS_SETTINGS, "devices", devices, 0);
    JOIN_REFUSES(MUSTER_STATUS_INVALID_ARGUMENT, "transport is 99", transport, 99);
    JOIN_REFUSES(MUSTER_STATUS_INVALID_ARGUMENT, "listen is \"nowhere\"", listen, "nowhere");
    JOIN_REFUSES(MUSTER_STATUS_SETTINGS, "listen 0.0.0.0:0 can be reached", listen, "0.0.0.0:0");
    JOIN_REFUSES(MUSTER_STATUS_INVALID_ARGUMENT, "token is NULL", token_len, 16);
    JOIN_REFUSES(MUSTER_STATUS_INVALID_ARGUMENT, "cert and key", cert, "cert.pem");
    JOIN_REFUSES(MUSTER_STATUS_INVALID_ARGUMENT, "transfer_cert", transfer_key, "key.pem");
    JOIN_REFUSES(MUSTER_STATUS_TLS, "ca", ca, "/nothing/ca.pem");
    JOIN_REFUSES(MUSTER_STATUS_SETTINGS, "this worker was told 3", tasks, 3);
    JOIN_REFUSES(MUSTER_STATUS_SETTINGS, "a b", job, "a b");
    JOIN_REFUSES(MUSTER_STATUS_CLUSTER_ENV, "MUSTER_PROCESS_ID", task, -1);
    JOIN_REFUSES(MUSTER_STATUS_CLUSTER_ENV, "JAX_COORDINATOR_ADDRESS", service, NULL);

    options.service = "127.0.0.1:1";
    for (int64_t timeout_ms = 0; timeout_ms <= 100; timeout_ms += 100) {
        // The last attempt may be cut short by the timeout.
        const muster_status status = muster_join(&options, timeout_ms, NULL, &agent);
        CHECK(status == MUSTER_STATUS_UNREACHABLE || status == MUSTER_STATUS_TIMED_OUT);
        CHECK(strstr(muster_error_message(), "`muster s") != NULL);
    }
    CHECK(agent == NULL);

    // A newer header has more fields: zeros are accepted, other values are not.
    struct {
        muster_join_options known;
        uint64_t unknown[2];
    } newer;
    OK(muster_join_options_init(&newer.known, sizeof newer));
    CHECK(newer.known.size == sizeof newer && newer.unknown[0] == 0 && newer.unknown[1] == 0);
    newer.known.service = service;
    newer.known.task = 0;
    newer.unknown[1] = 1;
    ARGUMENT("does not have", muster_join(&newer.known, PATIENCE_MS, NULL, &agent));
    newer.unknown[1] = 0;
    OK(muster_join(&newer.known, PATIENCE_MS, NULL, &agent));
    OK(muster_leave(agent, PATIENCE_MS, NULL));
    OK(muster_agent_free(agent));
}

// Calls every function of an agent with this handle, which is none.
static void refuse_handles(const muster_agent *agent) {
    muster_identity identity;
    muster_bytes bytes;
    muster_members members;
    muster_entries entries;
    muster_buffer *buffer = NULL;
    muster_transfer *transfer = NULL;
    muster_prepared *prepared = NULL;
    bool yes = false;
    OK(muster_buffer_allocate(8, &buffer));
    const muster_transfer_spec spec = {.direction = MUSTER_SEND, .from = 0, .to = 2048, .key = 1, .buffer = buffer, .len = 8};
    HANDLE(muster_agent_identity(agent, &identity));
    HANDLE(muster_wait_for_end(agent, 0, NULL));
    HANDLE(muster_barrier(agent, "b", NULL, 0, 0, NULL, NULL));
    HANDLE(muster_live_set(agent, 0, NULL, &members));
    HANDLE(muster_put(agent, "k", NULL, 0, false, 0, NULL));
    HANDLE(muster_get(agent, "k", 0, NULL, &bytes));
    HANDLE(muster_try_get(agent, "k", 0, NULL, &bytes));
    HANDLE(muster_list(agent, "k", 0, NULL, &entries));
    HANDLE(muster_delete(agent, "k", 0, NULL));
    HANDLE(muster_connected(agent, &members));
    HANDLE(muster_watch(agent, NULL, 0, 0, NULL, &members));
    HANDLE(muster_notice(agent, &bytes));
    HANDLE(muster_drain(agent, 0, NULL));
    HANDLE(muster_reached_sync_point(agent, 1, 0, NULL, &yes));
    HANDLE(muster_leave(agent, 0, NULL));
    HANDLE(muster_wait_for_engines(agent, NULL, 0, 0, NULL));
    HANDLE(muster_transfer_start(agent, &spec, 1, NULL, &transfer));
    HANDLE(muster_send(agent, buffer, 1, 1, &transfer));
    HANDLE(muster_receive(agent, buffer, 1, 1, &transfer));
    HANDLE(muster_prepare(agent, &spec, 1, NULL, 0, NULL, &prepared));
    OK(muster_buffer_free(buffer));
}

static void refuse_calls(muster_agent *agent) {
    muster_bytes bytes;
    muster_members members;
    muster_entries entries;
    bool yes = false;
    static const char wrong[] = "\xc3(";
    ARGUMENT("identity is NULL", muster_agent_identity(agent, NULL));
    ARGUMENT("name is NULL", muster_barrier(agent, NULL, NULL, 0, PATIENCE_MS, NULL, NULL));
    ARGUMENT("name is not UTF-8", muster_barrier(agent, wrong, NULL, 0, PATIENCE_MS, NULL, NULL));
    ARGUMENT("tasks is NULL", muster_barrier(agent, "b", NULL, 3, PATIENCE_MS, NULL, NULL));
    ARGUMENT("timeout_ms is -1", muster_barrier(agent, "b", NULL, 0, NEGATIVE, NULL, NULL));
    ARGUMENT("members is NULL", muster_live_set(agent, PATIENCE_MS, NULL, NULL));
    ARGUMENT("key is NULL", muster_put(agent, NULL, NULL, 0, false, PATIENCE_MS, NULL));
    ARGUMENT("value is NULL", muster_put(agent, "k", NULL, 7, false, PATIENCE_MS, NULL));
    ARGUMENT("which no memory holds", muster_put(agent, "k", (const uint8_t *)"v", SIZE_MAX, false, PATIENCE_MS, NULL));
    ARGUMENT("value is NULL", muster_get(agent, "k", PATIENCE_MS, NULL, NULL));
    ARGUMENT("key is not UTF-8", muster_get(agent, wrong, PATIENCE_MS, NULL, &bytes));
    ARGUMENT("value is NULL", muster_try_get(agent, "k", PATIENCE_MS, NULL, NULL));
    ARGUMENT("directory is NULL", muster_list(agent, NULL, PATIENCE_MS, NULL, &entries));
    ARGUMENT("entries is NULL", muster_list(agent, "k", PATIENCE_MS, NULL, NULL));
    ARGUMENT("key is NULL", muster_delete(agent, NULL, PATIENCE_MS, NULL));
    ARGUMENT("members is NULL", muster_connected(agent, NULL));
    ARGUMENT("known is NULL", muster_watch(agent, NULL, 1, PATIENCE_MS, NULL, &members));
    muster_member nobody = {.task = 0, .reserved = 0, .incarnation = 0};
    ARGUMENT("incarnation 0", muster_watch(agent, &nobody, 1, PATIENCE_MS, NULL, &members));
    ARGUMENT("notice is NULL", muster_notice(agent, NULL));
    ARGUMENT("timeout_ms is", muster_drain(agent, TOO_LONG, NULL));
    ARGUMENT("reached is NULL", muster_reached_sync_point(agent, 1, PATIENCE_MS, NULL, NULL));
    const uint32_t unknown = 9;
    ARGUMENT("task 9 does not exist", muster_wait_for_engines(agent, &unknown, 1, PATIENCE_MS, NULL));
    // An address that no struct has.
    char raw[sizeof(muster_members) + 8];
    void *odd = raw + 1 + (((uintptr_t)raw & 1) ? 1 : 0);
    ARGUMENT("misaligned", muster_connected(agent, odd));
    ARGUMENT("misaligned", muster_bytes_free(odd));
    ARGUMENT("misaligned", muster_watch(agent, odd, 1, PATIENCE_MS, NULL, &members));

    // A timeout of 0 does not wait for other tasks, and finds what is there.
    RETURNS(MUSTER_STATUS_TIMED_OUT, muster_get(agent, "nothing", 0, NULL, &bytes));
    RETURNS(MUSTER_STATUS_TIMED_OUT, muster_wait_for_end(agent, 0, NULL));
    OK(muster_put(agent, "there", NULL, 0, false, 0, NULL));
    OK(muster_try_get(agent, "there", 0, NULL, &bytes));
    OK(muster_bytes_free(&bytes));
    OK(muster_reached_sync_point(agent, 1, 0, NULL, &yes));

    // The service refuses, with its status.
    REFUSES(MUSTER_STATUS_REFUSED, "AlreadyExists", muster_put(agent, "there", NULL, 0, false, PATIENCE_MS, NULL));
    CHECK(muster_error_service_code() == 6 && muster_error_task() == -1);
}

static void refuse_transfers(muster_agent *agent) {
    char memory[64] = {0};
    void *data = NULL;
    muster_buffer *buffer = NULL, *empty = NULL;
    muster_transfer *transfer = NULL;
    muster_prepared *prepared = NULL;
    muster_launch_options options;
    bool yes = false;
    uint64_t layout = 0;
    ARGUMENT("buffer is NULL", muster_buffer_register(memory, sizeof memory, NULL, NULL, NULL));
    ARGUMENT("data is NULL", muster_buffer_register(NULL, 1, NULL, NULL, &buffer));
    ARGUMENT("which no memory holds", muster_buffer_register(memory, SIZE_MAX, NULL, NULL, &buffer));
    ARGUMENT("buffer is NULL", muster_buffer_allocate(1, NULL));
    RETURNS(MUSTER_STATUS_SYSTEM, muster_buffer_allocate((size_t)1 << 62, &buffer));
    RETURNS(MUSTER_STATUS_SYSTEM, muster_buffer_allocate(SIZE_MAX, &buffer));
    OK(muster_buffer_register(NULL, 0, NULL, NULL, &empty));
    OK(muster_buffer_data(empty, &data, NULL));
    CHECK(data == NULL);
    OK(muster_buffer_register(memory, sizeof memory, NULL, NULL, &buffer));
    ARGUMENT("data is NULL", muster_buffer_data(buffer, NULL, NULL));
    HANDLE(muster_buffer_data(NULL, &data, NULL));

    muster_transfer_spec spec = {
        .direction = MUSTER_SEND, .from = muster_device(0, 0), .to = muster_device(1, 0), .key = 1, .buffer = buffer, .len = 64};
    ARGUMENT("specs is NULL", muster_transfer_start(agent, NULL, 1, NULL, &transfer));
    ARGUMENT("transfer is NULL", muster_transfer_start(agent, &spec, 1, NULL, NULL));
    ARGUMENT("which no memory holds", muster_transfer_start(agent, &spec, SIZE_MAX, NULL, &transfer));
#define SPEC_REFUSES(status, words, field, value)                                                                      \
    do {                                                                                                               \
        muster_transfer_spec wrong = spec;                                                                             \
        wrong.field = value;                                                                                           \
        REFUSES(status, words, muster_transfer_start(agent, &wrong, 1, NULL, &transfer));                              \
    } while (0)
    SPEC_REFUSES(MUSTER_STATUS_INVALID_ARGUMENT, "direction is 2", direction, 2);
    SPEC_REFUSES(MUSTER_STATUS_INVALID_HANDLE, "muster_buffer", buffer, NULL);
    SPEC_REFUSES(MUSTER_STATUS_INVALID_HANDLE, "muster_buffer", buffer, (const muster_buffer *)(uintptr_t)agent);
    SPEC_REFUSES(MUSTER_STATUS_OUT_OF_RANGE, "64", len, 65);
    SPEC_REFUSES(MUSTER_STATUS_OUT_OF_RANGE, "64", offset, 1);
    SPEC_REFUSES(MUSTER_STATUS_OUT_OF_RANGE, "64", offset, SIZE_MAX);

    // Errors that only the engine can find become the outcome of the launch.
#define OUTCOME(status, call)                                                                                          \
    do {                                                                                                               \
        OK(call);                                                                                                      \
        RETURNS(status, muster_transfer_wait(transfer, PATIENCE_MS, NULL, NULL));                                      \
        OK(muster_transfer_cancel(transfer, "", PATIENCE_MS));                                                         \
        OK(muster_transfer_free(transfer));                                                                            \
    } while (0)
    OUTCOME(MUSTER_STATUS_EMPTY, muster_transfer_start(agent, NULL, 0, NULL, &transfer));
    OUTCOME(MUSTER_STATUS_UNKNOWN_DEVICE, muster_transfer_start(agent, &spec, 1, NULL, &transfer));
    OUTCOME(MUSTER_STATUS_UNKNOWN_DEVICE, muster_send(agent, buffer, UINT32_MAX, 1, &transfer));
    OUTCOME(MUSTER_STATUS_SAME_TASK, muster_receive(agent, buffer, 0, 1, &transfer));

    ARGUMENT("options is NULL", muster_launch_options_init(NULL, sizeof options));
    OK(muster_launch_options_init(&options, sizeof options));
    options.priority = 7;
    ARGUMENT("priority is 7", muster_transfer_start(agent, &spec, 1, &options, &transfer));
    OK(muster_launch_options_init(&options, sizeof options));
    options.deadline_ms = -2;
    ARGUMENT("deadline_ms is -2", muster_prepare(agent, &spec, 1, &options, PATIENCE_MS, NULL, &prepared));
    RETURNS(MUSTER_STATUS_UNKNOWN_DEVICE, muster_prepare(agent, &spec, 1, NULL, PATIENCE_MS, NULL, &prepared));
    RETURNS(MUSTER_STATUS_EMPTY, muster_prepare(agent, NULL, 0, NULL, PATIENCE_MS, NULL, &prepared));
    CHECK(prepared == NULL);

    HANDLE(muster_transfer_wait(NULL, 0, NULL, NULL));
    HANDLE(muster_transfer_poll(NULL, &yes, NULL));
    HANDLE(muster_transfer_cancel(NULL, "", 0));
    HANDLE(muster_launch(NULL, &transfer));
    OK(muster_send(agent, buffer, 1, 1, &transfer));
    ARGUMENT("is_over is NULL", muster_transfer_poll(transfer, NULL, NULL));
    ARGUMENT("index is 1", muster_transfer_poll_one(transfer, 1, &yes));
    ARGUMENT("reason is NULL", muster_transfer_cancel(transfer, NULL, 0));
    RETURNS(MUSTER_STATUS_UNKNOWN_DEVICE, muster_transfer_poll(transfer, &yes, NULL));
    CHECK(yes);
    OK(muster_transfer_free(transfer));
    HANDLE(muster_transfer_wait(transfer, 0, NULL, NULL));
    HANDLE(muster_transfer_free(transfer));
    OK(muster_transfer_free(NULL));
    OK(muster_prepared_free(NULL));

    ARGUMENT("element is NULL", muster_array_layout(NULL, 4, NULL, 0, "", &layout));
    const uint64_t shape[] = {(uint64_t)1 << 40, (uint64_t)1 << 40};
    ARGUMENT("2^64", muster_array_layout("f4", 4, shape, 2, "", &layout));
    CHECK(muster_device(UINT32_MAX, 0) == UINT32_MAX && muster_device(0, UINT32_MAX) == UINT32_MAX);

    HANDLE(muster_agent_free((muster_agent *)(uintptr_t)buffer));
    OK(muster_buffer_free(empty));
    OK(muster_buffer_free(buffer));
    HANDLE(muster_buffer_free(buffer));
    OK(muster_buffer_free(NULL));
}

static void refuse_values(void) {
    ARGUMENT("cancellation is NULL", muster_cancellation_new(NULL));
    HANDLE(muster_cancellation_cancel(NULL));
    muster_cancellation *cancellation = NULL;
    OK(muster_cancellation_new(&cancellation));
    OK(muster_cancellation_free(cancellation));
    HANDLE(muster_cancellation_cancel(cancellation));
    HANDLE(muster_cancellation_free(cancellation));
    OK(muster_cancellation_free(NULL));
    OK(muster_bytes_free(NULL));
    OK(muster_members_free(NULL));
    OK(muster_entries_free(NULL));
    CHECK(strcmp(muster_status_name(MUSTER_STATUS_TIMED_OUT), "TIMED_OUT") == 0);
    CHECK(strcmp(muster_status_name((muster_status)99999), "UNKNOWN") == 0);
    CHECK(strlen(muster_version()) > 0);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    CHECK(strcmp(muster_error_message(), "") == 0 && muster_error_service_code() == 0 && muster_error_task() == -1);
    refuse_values();
    refuse_handles(NULL);
    refuse_handles((const muster_agent *)(uintptr_t)0x1000);
    refuse_joins(argv[1]);
    muster_agent *agent = join_as(argv[1], 0, 1);
    refuse_calls(agent);
    refuse_transfers(agent);
    OK(muster_agent_free(agent));
    refuse_handles(agent);
    HANDLE(muster_agent_free(agent));
    OK(muster_agent_free(NULL));
    CHECK(muster_handle_count() == 0);
    printf("DONE\n");
    return 0;
}
