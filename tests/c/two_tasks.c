// One of two tasks that do together what the interface offers: `two_tasks SERVICE TASK`.
#include "checks.h"

#include <dirent.h>

static const size_t LARGE = (1 << 20) + 3;

static void share_keys(muster_agent *agent, uint32_t task) {
    static const unsigned char bytes[] = {0, 'b', 'y', 't', 'e', 's', 0xff};
    char own[32], other[32];
    muster_bytes value;
    muster_entries entries;
    snprintf(own, sizeof own, "shared/%" PRIu32, task);
    snprintf(other, sizeof other, "shared/%" PRIu32, 1 - task);

    OK(muster_put(agent, own, bytes, sizeof bytes, false, PATIENCE_MS, NULL));
    OK(muster_get(agent, other, PATIENCE_MS, NULL, &value));
    CHECK(value.len == sizeof bytes && memcmp(value.data, bytes, sizeof bytes) == 0 && value.data[value.len] == 0);
    OK(muster_bytes_free(&value));
    CHECK(value.data == NULL && value.len == 0);
    OK(muster_bytes_free(&value));
    // Neither writes its key again before the other has read it.
    OK(muster_barrier(agent, "read", NULL, 0, PATIENCE_MS, NULL, NULL));

    OK(muster_try_get(agent, "shared/nothing", PATIENCE_MS, NULL, &value));
    CHECK(value.data == NULL);
    REFUSES(MUSTER_STATUS_REFUSED, "overwrite", muster_put(agent, own, bytes, 1, false, PATIENCE_MS, NULL));
    CHECK(muster_error_service_code() == 6);
    OK(muster_put(agent, own, NULL, 0, true, PATIENCE_MS, NULL));
    OK(muster_try_get(agent, own, PATIENCE_MS, NULL, &value));
    CHECK(value.data != NULL && value.len == 0);
    OK(muster_bytes_free(&value));

    OK(muster_barrier(agent, "written", NULL, 0, PATIENCE_MS, NULL, NULL));
    OK(muster_list(agent, "shared", PATIENCE_MS, NULL, &entries));
    CHECK(entries.len == 2);
    CHECK(strcmp(entries.items[0].key, "shared/0") == 0 && strcmp(entries.items[1].key, "shared/1") == 0);
    CHECK(entries.items[0].len == 0 && entries.items[1].value[0] == 0);
    OK(muster_entries_free(&entries));
    OK(muster_barrier(agent, "listed", NULL, 0, PATIENCE_MS, NULL, NULL));
    if (task == 0) {
        OK(muster_delete(agent, "shared", PATIENCE_MS, NULL));
    }
    OK(muster_barrier(agent, "deleted", NULL, 0, PATIENCE_MS, NULL, NULL));
    OK(muster_list(agent, "shared", PATIENCE_MS, NULL, &entries));
    CHECK(entries.len == 0);
    OK(muster_entries_free(&entries));
}

static void see_members(muster_agent *agent, const muster_identity *identity) {
    muster_members members, live;
    OK(muster_connected(agent, &members));
    while (members.len != 2) {
        muster_members news;
        OK(muster_watch(agent, members.items, members.len, PATIENCE_MS, NULL, &news));
        OK(muster_members_free(&members));
        members = news;
    }
    RETURNS(MUSTER_STATUS_TIMED_OUT, muster_watch(agent, members.items, members.len, 50, NULL, &live));
    OK(muster_live_set(agent, PATIENCE_MS, NULL, &live));
    CHECK(live.len == 2 && live.items[0].task == 0 && live.items[1].task == 1);
    CHECK(live.items[identity->task].incarnation == identity->incarnation);
    CHECK(memcmp(live.items, members.items, 2 * sizeof *live.items) == 0);
    OK(muster_members_free(&live));
    OK(muster_members_free(&members));
}

// Each task sends to the other and receives from it, in one launch.
static void exchange(muster_agent *agent, uint32_t task, int *released) {
    muster_buffer *out = NULL, *in = NULL;
    muster_transfer *transfer = NULL;
    muster_transfer_stats stats;
    void *sent = malloc(LARGE), *received = NULL;
    size_t len = 0;
    uint32_t here = muster_device(task, 0), there = muster_device(1 - task, 0);
    CHECK(sent != NULL);
    fill(sent, LARGE, task);
    OK(muster_buffer_register(sent, LARGE, free_and_count, released, &out));
    OK(muster_buffer_allocate(LARGE, &in));
    OK(muster_buffer_data(in, &received, &len));
    CHECK(len == LARGE);

    muster_transfer_spec specs[2] = {
        {.direction = MUSTER_SEND, .from = here, .to = there, .key = 7, .buffer = out, .len = LARGE},
        {.direction = MUSTER_RECEIVE, .from = there, .to = here, .key = 7, .buffer = in, .len = LARGE},
    };
    OK(muster_transfer_start(agent, specs, 2, NULL, &transfer));
    OK(muster_transfer_wait(transfer, PATIENCE_MS, NULL, &stats));
    CHECK(stats.sent == LARGE && stats.received == LARGE);
    check_contents(received, LARGE, 1 - task);
    bool is_over = false;
    OK(muster_transfer_poll(transfer, &is_over, &stats));
    CHECK(is_over && stats.sent == LARGE);
    is_over = false;
    OK(muster_transfer_poll_one(transfer, 1, &is_over));
    CHECK(is_over);
    OK(muster_transfer_cancel(transfer, "it is over already", PATIENCE_MS));
    OK(muster_transfer_wait(transfer, 0, NULL, NULL));
    OK(muster_transfer_free(transfer));

    // The same transfers, prepared once and launched with other contents each time.
    muster_prepared *prepared = NULL;
    muster_launch_options options;
    OK(muster_launch_options_init(&options, sizeof options));
    options.channel = 1;
    options.priority = MUSTER_CLASS_LATENCY;
    options.deadline_ms = PATIENCE_MS;
    OK(muster_prepare(agent, specs, 2, &options, PATIENCE_MS, NULL, &prepared));
    for (uint64_t round = 0; round < 3; round++) {
        fill(sent, LARGE, 100 * (round + 1) + task);
        OK(muster_launch(prepared, &transfer));
        OK(muster_transfer_wait(transfer, PATIENCE_MS, NULL, NULL));
        OK(muster_transfer_free(transfer));
        check_contents(received, LARGE, 100 * (round + 1) + 1 - task);
    }
    OK(muster_prepared_free(prepared));

    // Within a task, the engine copies what both sides of a transfer name.
    muster_transfer_spec copy[2] = {specs[0], specs[1]};
    copy[0].to = copy[1].from = copy[1].to = here;
    OK(muster_transfer_start(agent, copy, 2, NULL, &transfer));
    OK(muster_transfer_wait(transfer, PATIENCE_MS, NULL, &stats));
    CHECK(stats.sent == LARGE && stats.received == LARGE);
    OK(muster_transfer_free(transfer));
    check_contents(received, LARGE, 300 + task);

    // Both sides must agree on the layout before a byte moves.
    uint64_t rows = 0, columns = 0;
    static const uint64_t shape[] = {3, 5};
    OK(muster_array_layout("float32", 4, shape, 2, "rows", &rows));
    OK(muster_array_layout("float32", 4, shape, 2, "columns", &columns));
    CHECK(rows != columns);
    muster_transfer_spec part = task == 0 ? specs[0] : specs[1];
    part.len = 60;
    part.key = 8;
    part.layout = task == 0 ? rows : columns;
    memset(received, 0x5a, 60);
    OK(muster_transfer_start(agent, &part, 1, NULL, &transfer));
    REFUSES(MUSTER_STATUS_LAYOUT_MISMATCH, "layouts differ", muster_transfer_wait(transfer, PATIENCE_MS, NULL, NULL));
    CHECK(((unsigned char *)received)[0] == 0x5a);
    OK(muster_transfer_free(transfer));

    // Handles may be freed while a transfer is in flight: it keeps what it uses.
    OK(task == 0 ? muster_send(agent, out, 1, 9, &transfer) : muster_receive(agent, in, 0, 9, &transfer));
    OK(muster_buffer_free(out));
    OK(muster_transfer_wait(transfer, PATIENCE_MS, NULL, NULL));
    OK(muster_transfer_free(transfer));
    if (task == 1) {
        check_contents(received, LARGE, 300);
    }
    OK(muster_buffer_free(in));
    wait_for_releases(released, 1);
}

// The tasks agree on a step, and both save before the same one.
static void save_together(muster_agent *agent, uint32_t task) {
    muster_bytes notice;
    bool reached = false;
    char key[32], text[32];
    uint64_t step = 0;
    OK(muster_reached_sync_point(agent, step, PATIENCE_MS, NULL, &reached));
    CHECK(!reached);
    OK(muster_notice(agent, &notice));
    CHECK(notice.data == NULL);
    OK(muster_barrier(agent, "before the drain", NULL, 0, PATIENCE_MS, NULL, NULL));
    if (task == 1) {
        OK(muster_drain(agent, PATIENCE_MS, NULL));
        OK(muster_drain(agent, PATIENCE_MS, NULL));
    }
    while (!reached) {
        sleep_ms(1);
        OK(muster_reached_sync_point(agent, ++step, PATIENCE_MS, NULL, &reached));
    }
    OK(muster_notice(agent, &notice));
    CHECK(notice.len > 0);
    OK(muster_bytes_free(&notice));
    snprintf(key, sizeof key, "step/%" PRIu32, task);
    snprintf(text, sizeof text, "%" PRIu64, step);
    OK(muster_put(agent, key, (const uint8_t *)text, strlen(text), false, PATIENCE_MS, NULL));
    muster_bytes other;
    snprintf(key, sizeof key, "step/%" PRIu32, 1 - task);
    OK(muster_get(agent, key, PATIENCE_MS, NULL, &other));
    CHECK(strcmp((const char *)other.data, text) == 0);
    OK(muster_bytes_free(&other));
}

// No signal of the program is handled on a thread of the library, and none of those can raise SIGPIPE.
static void check_signal_masks(void) {
    const unsigned long long wanted = (1ull << (13 - 1)) | (1ull << (15 - 1)); // SIGPIPE, SIGTERM
    int checked = 0;
    char own[32], path[300], line[256];
    snprintf(own, sizeof own, "%ld", (long)getpid());
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    for (struct dirent *thread; (thread = readdir(tasks)) != NULL;) {
        if (thread->d_name[0] == '.' || strcmp(thread->d_name, own) == 0) {
            continue;
        }
        snprintf(path, sizeof path, "/proc/self/task/%s/status", thread->d_name);
        FILE *status = fopen(path, "r");
        while (status != NULL && fgets(line, sizeof line, status) != NULL) {
            unsigned long long blocked = 0;
            if (sscanf(line, "SigBlk: %llx", &blocked) == 1) {
                if ((blocked & wanted) != wanted) {
                    FAIL("thread %s does not block signals: %s", thread->d_name, line);
                }
                checked++;
            }
        }
        if (status != NULL) {
            fclose(status);
        }
    }
    closedir(tasks);
    CHECK(checked >= 4);
}

int main(int argc, char **argv) {
    CHECK(argc == 3 && muster_abi_version() == MUSTER_ABI_VERSION);
    const uint32_t task = (uint32_t)atoi(argv[2]);
    int released = 0;
    muster_identity identity;
    muster_agent *agent = join_as(argv[1], task, 2);
    OK(muster_agent_identity(agent, &identity));
    CHECK(identity.task == task && identity.tasks == 2 && identity.incarnation != 0 && identity.run != 0);
    for (int64_t wanted = 0; wanted < 2; wanted++) {
        int64_t instance = -1;
        OK(muster_barrier(agent, "start", NULL, 0, PATIENCE_MS, NULL, &instance));
        CHECK(instance == wanted);
    }
    OK(muster_barrier(agent, task == 0 ? "alone/0" : "alone/1", &task, 1, PATIENCE_MS, NULL, NULL));
    share_keys(agent, task);
    see_members(agent, &identity);
    OK(muster_wait_for_engines(agent, NULL, 0, PATIENCE_MS, NULL));
    exchange(agent, task, &released);
    check_signal_masks();
    save_together(agent, task);
    RETURNS(MUSTER_STATUS_TIMED_OUT, muster_wait_for_end(agent, 0, NULL));
    OK(muster_barrier(agent, "end", NULL, 0, PATIENCE_MS, NULL, NULL));
    OK(muster_leave(agent, PATIENCE_MS, NULL));
    REFUSES(MUSTER_STATUS_LIFE_ENDED, "has left", muster_barrier(agent, "late", NULL, 0, PATIENCE_MS, NULL, NULL));
    OK(muster_agent_free(agent));
    CHECK(released == 1 && muster_handle_count() == 0);
    printf("DONE %" PRIu32 "\n", task);
    return 0;
}
