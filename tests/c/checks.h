// Shared by the test programs in C: checks that end the program with the error of the library, and contents of buffers.
#ifndef CHECKS_H
#define CHECKS_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "muster.h"

// The timeout of everything that must happen: generous for a machine that compiles meanwhile.
#define PATIENCE_MS 60000

#define FAIL(...)                                                                                                      \
    do {                                                                                                               \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                                                \
        fprintf(stderr, __VA_ARGS__);                                                                                  \
        fprintf(stderr, "\n  the last error: %s\n", muster_error_message());                                           \
        exit(1);                                                                                                       \
    } while (0)

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            FAIL("not so: %s", #condition);                                                                            \
        }                                                                                                              \
    } while (0)

// Checks that a call returns this status.
#define RETURNS(wanted, call)                                                                                          \
    do {                                                                                                               \
        muster_status returned_ = (call);                                                                              \
        if (returned_ != (wanted)) {                                                                                   \
            FAIL("%s returned %s, not %s", #call, muster_status_name(returned_), muster_status_name(wanted));          \
        }                                                                                                              \
    } while (0)

#define OK(call) RETURNS(MUSTER_STATUS_OK, call)

// Checks that a call returns this status and a text that contains `words`.
#define REFUSES(wanted, words, call)                                                                                   \
    do {                                                                                                               \
        RETURNS(wanted, call);                                                                                         \
        if (strstr(muster_error_message(), words) == NULL) {                                                           \
            FAIL("%s: its text has no \"%s\"", #call, words);                                                          \
        }                                                                                                              \
    } while (0)

static inline void sleep_ms(int64_t milliseconds) {
    struct timespec time = {milliseconds / 1000, (milliseconds % 1000) * 1000000};
    nanosleep(&time, NULL);
}

static inline muster_agent *join_as(const char *service, int64_t task, int64_t tasks) {
    muster_join_options options;
    muster_agent *agent = NULL;
    OK(muster_join_options_init(&options, sizeof options));
    options.service = service;
    options.task = task;
    options.tasks = tasks;
    OK(muster_join(&options, PATIENCE_MS, NULL, &agent));
    CHECK(agent != NULL);
    return agent;
}

// The byte at `at` of the contents with this seed.
static inline unsigned char byte_of(uint64_t seed, size_t at) {
    uint64_t mixed = (seed + 1) * 0x9e3779b97f4a7c15u + (uint64_t)at * 0xbf58476d1ce4e5b9u;
    return (unsigned char)(mixed >> 56);
}

static inline void fill(void *data, size_t len, uint64_t seed) {
    for (size_t at = 0; at < len; at++) {
        ((unsigned char *)data)[at] = byte_of(seed, at);
    }
}

static inline void check_contents(const void *data, size_t len, uint64_t seed) {
    for (size_t at = 0; at < len; at++) {
        if (((const unsigned char *)data)[at] != byte_of(seed, at)) {
            FAIL("byte %zu of %zu is wrong", at, len);
        }
    }
}

// Counts what was released, and frees it: a release callback.
static inline void free_and_count(void *context, void *data, size_t len) {
    (void)len;
    free(data);
    __atomic_add_fetch((int *)context, 1, __ATOMIC_ACQ_REL);
}

// Waits until a release callback has counted so many.
static inline void wait_for_releases(const int *released, int wanted) {
    static const int64_t step_ms = 10;
    for (int64_t waited = 0; __atomic_load_n(released, __ATOMIC_ACQUIRE) != wanted; waited += step_ms) {
        if (waited > PATIENCE_MS) {
            FAIL("%d of %d buffers were released", __atomic_load_n(released, __ATOMIC_ACQUIRE), wanted);
        }
        sleep_ms(step_ms);
    }
}

#endif
