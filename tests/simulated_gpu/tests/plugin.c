/* A profiler plug-in in a library of its own. It writes a line for each call to the file PLUGIN_LOG.
   FIRST and LAST are the versions of the tables that the library has. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static void write_line(const char *what, unsigned long long number) {
    FILE *file = fopen(getenv("PLUGIN_LOG"), "a");
    if (file == NULL) abort();
    fprintf(file, "%s %llu\n", what, number);
    fclose(file);
}

__attribute__((constructor)) static void load(void) { write_line("load", 0); }
__attribute__((destructor)) static void unload(void) { write_line("unload", 0); }

typedef void (*log_function)(int level, unsigned long flags, const char *file, int line, const char *format, ...);

static int begin(void **context, int *mask, int version) {
    *context = malloc(1);
    *mask = 1 << 1 | 1 << 6;
    write_line("init", version);
    return 0;
}

static int init_v4(void **context, int *mask, const char *name, uint64_t hash, int nodes, int ranks, int rank,
                   log_function log) {
    return begin(context, mask, 4);
}

#define INIT(version) \
    static int init_v##version(void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks, \
                               int rank, log_function log) { \
        return begin(context, mask, version); \
    }
INIT(5)
INIT(6)
INIT(7)

struct descriptor {
    uint64_t type;
    void *parent;
    int rank;
};

static int start_event(void *context, void **handle, struct descriptor *descriptor) {
    write_line("start", descriptor->type);
    *handle = context;
    return 0;
}

static int stop_event(void *handle) { return 0; }
static int record_state(void *handle, int state, void *arguments) { return 0; }

static int finalize(void *context) {
    free(context);
    write_line("finalize", 0);
    return 0;
}

struct table {
    const char *name;
    void *init;
    int (*start_event)(void *, void **, struct descriptor *);
    int (*stop_event)(void *);
    int (*record_state)(void *, int, void *);
    int (*finalize)(void *);
};

#define TABLE(version, init) \
    struct table ncclProfiler_v##version = {"lines", init, start_event, stop_event, record_state, finalize};
#if FIRST <= 3 && LAST >= 3
TABLE(3, init_v4)
#endif
#if FIRST <= 4 && LAST >= 4
TABLE(4, init_v4)
#endif
#if FIRST <= 5 && LAST >= 5
TABLE(5, init_v5)
#endif
#if FIRST <= 6 && LAST >= 6
TABLE(6, init_v6)
#endif
#if FIRST <= 7 && LAST >= 7
TABLE(7, init_v7)
#endif
