// Appends variables of this process to the file $SHOWN when the process ends: those that it has set itself are not in
// /proc/PID/environ.
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *value(const char *name) {
    const char *found = getenv(name);
    return found ? found : "unset";
}

__attribute__((destructor)) static void show(void) {
    const char *path = getenv("SHOWN");
    if (!path || strcmp(program_invocation_short_name, "hpctrain")) return;
    FILE *file = fopen(path, "a");
    if (!file) return;
    // One write for each line, since several processes append.
    fprintf(file, "queues %s, NVLS %s, channels %s\n", value("CUDA_DEVICE_MAX_CONNECTIONS"), value("NCCL_NVLS_ENABLE"),
            value("NCCL_MAX_P2P_NCHANNELS"));
    fclose(file);
}
