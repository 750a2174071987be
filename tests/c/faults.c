// Faults that sanitizers must find in programs that use the library: `faults leak|use-after-free|overflow|none`.
#include "checks.h"

int main(int argc, char **argv) {
    CHECK(argc == 2);
    muster_buffer *buffer = NULL;
    unsigned char *memory = malloc(16);
    CHECK(memory != NULL);
    memset(memory, 1, 16);
    int released = 0;
    OK(muster_buffer_register(memory, 16, free_and_count, &released, &buffer));
    if (strcmp(argv[1], "leak") == 0) {
        // Volatile, or a compiler may leave out memory that nobody reads.
        unsigned char *volatile lost = malloc(1000);
        CHECK(lost != NULL);
        lost[0] = 1;
        lost = NULL;
    }
    OK(muster_buffer_free(buffer));
    CHECK(released == 1);
    if (strcmp(argv[1], "use-after-free") == 0) {
        printf("%d\n", memory[3]);
    }
    if (strcmp(argv[1], "overflow") == 0) {
        int large = 0x7fffffff;
        printf("%d\n", large + argc);
    }
    return 0;
}
