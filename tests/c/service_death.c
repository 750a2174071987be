// A task whose service is killed: `service_death SERVICE`. SIGPIPE and other signals have their default actions.
#include "checks.h"

int main(int argc, char **argv) {
    CHECK(argc == 2);
    muster_agent *agent = join_as(argv[1], 0, 1);
    muster_status status = MUSTER_STATUS_OK;
    printf("JOINED\n");
    fflush(stdout);
    for (int call = 0; status == MUSTER_STATUS_OK && call < PATIENCE_MS; call++) {
        sleep_ms(1);
        status = muster_put(agent, "key", (const uint8_t *)"value", 5, true, 300, NULL);
    }
    CHECK(status == MUSTER_STATUS_TIMED_OUT || status == MUSTER_STATUS_UNREACHABLE);
    muster_bytes value;
    for (int call = 0; call < 3; call++) {
        status = muster_try_get(agent, "key", 0, NULL, &value);
        CHECK(status == MUSTER_STATUS_TIMED_OUT || status == MUSTER_STATUS_UNREACHABLE);
    }
    status = muster_leave(agent, 100, NULL);
    CHECK(status == MUSTER_STATUS_TIMED_OUT || status == MUSTER_STATUS_UNREACHABLE);
    OK(muster_agent_free(agent));
    CHECK(muster_handle_count() == 0);
    printf("DONE\n");
    return 0;
}
