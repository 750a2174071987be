// A task that joins a job of three alone: `missing SERVICE`.
#include "checks.h"

int main(int argc, char **argv) {
    CHECK(argc == 2);
    muster_join_options options;
    muster_agent *agent = NULL;
    OK(muster_join_options_init(&options, sizeof options));
    options.service = argv[1];
    options.task = 1;
    REFUSES(MUSTER_STATUS_TASKS_MISSING, ": 0, 2 (", muster_join(&options, 1000, NULL, &agent));
    CHECK(strstr(muster_error_message(), "2 of 3 tasks have not registered") != NULL && agent == NULL);
    muster_cancellation *now = NULL;
    OK(muster_cancellation_new(&now));
    OK(muster_cancellation_cancel(now));
    RETURNS(MUSTER_STATUS_INTERRUPTED, muster_join(&options, PATIENCE_MS, now, &agent));
    OK(muster_cancellation_free(now));
    printf("DONE\n");
    return 0;
}
