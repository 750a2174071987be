// A process that forks: `fork SERVICE`, a job of one task.
#include "checks.h"

#include <sys/wait.h>

static void end_well(pid_t child) {
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(int argc, char **argv) {
    CHECK(argc == 2);
    // Before the parent uses the library, a child may.
    pid_t child = fork();
    if (child == 0) {
        muster_agent *agent = join_as(argv[1], 0, 1);
        OK(muster_leave(agent, PATIENCE_MS, NULL));
        OK(muster_agent_free(agent));
        _exit(0);
    }
    end_well(child);

    muster_agent *agent = join_as(argv[1], 0, 1);
    muster_buffer *buffer = NULL;
    muster_bytes value;
    OK(muster_put(agent, "a", NULL, 0, false, PATIENCE_MS, NULL));
    OK(muster_buffer_allocate(16, &buffer));
    child = fork();
    if (child == 0) {
        REFUSES(MUSTER_STATUS_FORKED, "forked", muster_try_get(agent, "a", PATIENCE_MS, NULL, &value));
        RETURNS(MUSTER_STATUS_FORKED, muster_agent_free(agent));
        RETURNS(MUSTER_STATUS_FORKED, muster_buffer_free(buffer));
        RETURNS(MUSTER_STATUS_FORKED, muster_buffer_allocate(16, &buffer));
        RETURNS(MUSTER_STATUS_FORKED, muster_bytes_free(&value));
        CHECK(muster_handle_count() == 0);
        _exit(0);
    }
    end_well(child);
    OK(muster_try_get(agent, "a", PATIENCE_MS, NULL, &value));
    CHECK(value.data != NULL);
    OK(muster_bytes_free(&value));
    OK(muster_buffer_free(buffer));
    OK(muster_leave(agent, PATIENCE_MS, NULL));
    OK(muster_agent_free(agent));
    CHECK(muster_handle_count() == 0);
    printf("DONE\n");
    return 0;
}
