// One of two tasks that reach the service by mutual TLS and each other by encrypted TCP, with a token:
// `secure SERVICE TASK FOLDER`, where the folder has the certificates.
#include "checks.h"

static char paths[6][512];

static const char *in_folder(const char *folder, const char *name) {
    static int used = 0;
    char *path = paths[used++];
    snprintf(path, sizeof paths[0], "%s/%s.pem", folder, name);
    return path;
}

int main(int argc, char **argv) {
    CHECK(argc == 4);
    const uint32_t task = (uint32_t)atoi(argv[2]);
    static const uint8_t token[] = "a secret of more than sixteen random bytes";
    muster_join_options options;
    muster_agent *agent = NULL;
    OK(muster_join_options_init(&options, sizeof options));
    options.service = argv[1];
    options.task = task;
    const muster_status without = muster_join(&options, 200, NULL, &agent);
    CHECK(without == MUSTER_STATUS_UNREACHABLE || without == MUSTER_STATUS_TIMED_OUT);
    options.ca = in_folder(argv[3], "ca");
    options.cert = in_folder(argv[3], "client");
    options.key = in_folder(argv[3], "client-key");
    options.transfer_cert = in_folder(argv[3], "server");
    options.transfer_key = in_folder(argv[3], "server-key");
    options.transfer_ca = options.ca;
    options.token = token;
    options.token_len = sizeof token - 1;
    // Reachable by other machines: the certificates and the token allow it.
    options.listen = "0.0.0.0:0";
    options.transport = MUSTER_TRANSPORT_TCP;
    REFUSES(MUSTER_STATUS_SETTINGS, "advertise", muster_join(&options, PATIENCE_MS, NULL, &agent));
    options.listen = "127.0.0.1:0";
    OK(muster_join(&options, PATIENCE_MS, NULL, &agent));
    OK(muster_wait_for_engines(agent, NULL, 0, PATIENCE_MS, NULL));
    enum { LEN = 700001 };
    unsigned char *memory = malloc(LEN);
    muster_buffer *buffer = NULL;
    muster_transfer *transfer = NULL;
    int released = 0;
    CHECK(memory != NULL);
    OK(muster_buffer_register(memory, LEN, free_and_count, &released, &buffer));
    if (task == 0) {
        fill(memory, LEN, 42);
        OK(muster_send(agent, buffer, 1, 1, &transfer));
    } else {
        OK(muster_receive(agent, buffer, 0, 1, &transfer));
    }
    OK(muster_transfer_wait(transfer, PATIENCE_MS, NULL, NULL));
    check_contents(memory, LEN, 42);
    OK(muster_transfer_free(transfer));
    OK(muster_buffer_free(buffer));
    OK(muster_leave(agent, PATIENCE_MS, NULL));
    OK(muster_agent_free(agent));
    wait_for_releases(&released, 1);
    CHECK(muster_handle_count() == 0);
    printf("DONE\n");
    return 0;
}
