// Shared by the test programs in C in which both tasks of a job are in one process.
#ifndef TWO_AGENTS_H
#define TWO_AGENTS_H

#include "checks.h"

#include <pthread.h>

struct joining {
    const char *service;
    muster_agent *agent;
};

static inline void *join_second(void *argument) {
    struct joining *joining = argument;
    joining->agent = join_as(joining->service, 1, 2);
    return NULL;
}

// Joins as task 0 and as task 1 of two; each of the calls waits for the other.
static inline void join_both(const char *service, muster_agent **first, muster_agent **second) {
    struct joining joining = {service, NULL};
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, join_second, &joining) == 0);
    *first = join_as(service, 0, 2);
    CHECK(pthread_join(thread, NULL) == 0);
    *second = joining.agent;
}

#endif
