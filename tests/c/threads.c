// Many threads on the handles of one process: `threads SERVICE`, a recoverable job of two tasks, both in this process.
#include "checks.h"

#include <pthread.h>

enum { WORKERS = 8, ROUNDS = 25 };

static muster_agent *agents[2];
static muster_cancellation *stop;

static pthread_t start(void *(*run)(void *), void *argument) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, run, argument) == 0);
    return thread;
}

static void join_thread(pthread_t thread) { CHECK(pthread_join(thread, NULL) == 0); }

static const char *service;

static void *join_one(void *task) {
    agents[(intptr_t)task] = join_as(service, (intptr_t)task, 2);
    return NULL;
}

// Each worker has its own keys, its own barrier, and its own error.
static void *work(void *number) {
    const intptr_t worker = (intptr_t)number;
    muster_agent *agent = agents[worker % 2];
    const uint32_t task = (uint32_t)(worker % 2);
    char key[64], text[64];
    for (int round = 0; round < ROUNDS; round++) {
        muster_bytes value;
        snprintf(key, sizeof key, "worker/%d", (int)worker);
        snprintf(text, sizeof text, "round %d", round);
        OK(muster_put(agent, key, (const uint8_t *)text, strlen(text), true, PATIENCE_MS, NULL));
        OK(muster_get(agent, key, PATIENCE_MS, stop, &value));
        CHECK(strcmp((const char *)value.data, text) == 0);
        OK(muster_bytes_free(&value));
        OK(muster_barrier(agent, key, &task, 1, PATIENCE_MS, NULL, NULL));
        snprintf(text, sizeof text, "index %d\xff", (int)worker);
        RETURNS(MUSTER_STATUS_INVALID_ARGUMENT, muster_get(agent, text, PATIENCE_MS, NULL, &value));
        CHECK(strcmp(muster_error_message(), "key is not UTF-8") == 0);
        muster_buffer *buffer = NULL;
        muster_transfer *transfer = NULL;
        muster_launch_options options;
        OK(muster_buffer_allocate(4096, &buffer));
        OK(muster_launch_options_init(&options, sizeof options));
        options.channel = (uint32_t)(worker / 2);
        const uint32_t here = muster_device(task, 0), there = muster_device(1 - task, 0);
        void *data = NULL;
        OK(muster_buffer_data(buffer, &data, NULL));
        fill(data, 4096, task == 0 ? (uint64_t)round : 999);
        const muster_transfer_spec spec = {.direction = task == 0 ? MUSTER_SEND : MUSTER_RECEIVE,
                                           .from = task == 0 ? here : there,
                                           .to = task == 0 ? there : here,
                                           .key = (uint64_t)round,
                                           .buffer = buffer,
                                           .len = 4096};
        OK(muster_transfer_start(agent, &spec, 1, &options, &transfer));
        OK(muster_transfer_wait(transfer, PATIENCE_MS, round % 2 == 0 ? stop : NULL, NULL));
        OK(muster_transfer_free(transfer));
        check_contents(data, 4096, (uint64_t)round);
        OK(muster_buffer_free(buffer));
    }
    return NULL;
}

static void *wait_for_nothing(void *number) {
    muster_bytes value;
    muster_members members;
    switch ((intptr_t)number % 4) {
    case 0:
        RETURNS(MUSTER_STATUS_INTERRUPTED, muster_get(agents[0], "nothing", PATIENCE_MS, stop, &value));
        break;
    case 1:
        RETURNS(MUSTER_STATUS_INTERRUPTED, muster_barrier(agents[0], "nobody", NULL, 0, PATIENCE_MS, stop, NULL));
        break;
    case 2:
        RETURNS(MUSTER_STATUS_INTERRUPTED, muster_live_set(agents[0], PATIENCE_MS, stop, &members));
        break;
    default:
        RETURNS(MUSTER_STATUS_INTERRUPTED, muster_wait_for_end(agents[1], PATIENCE_MS, stop));
    }
    return NULL;
}

static void *wait_until_freed(void *number) {
    muster_bytes value;
    (void)number;
    REFUSES(MUSTER_STATUS_INVALID_HANDLE, "", muster_get(agents[0], "nothing", PATIENCE_MS, NULL, &value));
    return NULL;
}

static int freed_once = 0;

static void *free_agent(void *number) {
    (void)number;
    muster_status status = muster_agent_free(agents[0]);
    CHECK(status == MUSTER_STATUS_OK || status == MUSTER_STATUS_INVALID_HANDLE);
    if (status == MUSTER_STATUS_OK) {
        __atomic_add_fetch(&freed_once, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    service = argv[1];
    pthread_t threads[WORKERS];
    for (intptr_t task = 0; task < 2; task++) {
        threads[task] = start(join_one, (void *)task);
    }
    join_thread(threads[0]);
    join_thread(threads[1]);
    OK(muster_wait_for_engines(agents[0], NULL, 0, PATIENCE_MS, NULL));
    OK(muster_wait_for_engines(agents[1], NULL, 0, PATIENCE_MS, NULL));
    OK(muster_cancellation_new(&stop));

    for (intptr_t worker = 0; worker < WORKERS; worker++) {
        threads[worker] = start(work, (void *)worker);
    }
    for (int worker = 0; worker < WORKERS; worker++) {
        join_thread(threads[worker]);
    }

    // Waits that nobody satisfies end when they are cancelled, those that begin later too.
    for (intptr_t waiter = 0; waiter < 4; waiter++) {
        threads[waiter] = start(wait_for_nothing, (void *)waiter);
    }
    sleep_ms(100);
    OK(muster_cancellation_cancel(stop));
    for (int waiter = 0; waiter < 4; waiter++) {
        join_thread(threads[waiter]);
    }
    wait_for_nothing((void *)0);
    OK(muster_cancellation_free(stop));

    // A call that waits while its agent is freed, by several threads at once.
    threads[0] = start(wait_until_freed, NULL);
    sleep_ms(100);
    for (int number = 1; number < 5; number++) {
        threads[number] = start(free_agent, NULL);
    }
    for (int number = 0; number < 5; number++) {
        join_thread(threads[number]);
    }
    CHECK(freed_once == 1);
    OK(muster_agent_free(agents[1]));
    CHECK(muster_handle_count() == 0);
    printf("DONE\n");
    return 0;
}
