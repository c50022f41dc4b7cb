/* A disk that fails while a file says so: a library to be loaded before a program's own (LD_PRELOAD).
 *
 * FAILING_DISK is a directory. While FAILING_DISK.fault exists, operations on files within the directory fail as its first word says:
 *
 *   eio      writes, durable writes, renames, and files opened for writing: EIO
 *   enospc   the same: ENOSPC
 *   estale   files opened, renames: ESTALE, as a file server that has been started again answers
 *   stale    listings of directories leave out entries younger than two seconds, as listings kept by an NFS client do
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

enum { WRITES = 1, OPENS = 2, RENAMES = 4, LISTINGS = 8 };

/* The operations that fail now; their errno in `error`. */
static int failing(int *error) {
    const char *disk = getenv("FAILING_DISK");
    char path[PATH_MAX], word[8] = "";
    if (!disk || snprintf(path, sizeof path, "%s.fault", disk) >= (int)sizeof path) return 0;
    long file = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    if (syscall(SYS_read, file, word, sizeof word - 1) < 0) word[0] = 0;
    syscall(SYS_close, file);
    *error = !strcmp(word, "enospc") ? ENOSPC : !strcmp(word, "estale") ? ESTALE : EIO;
    if (!strcmp(word, "stale")) return LISTINGS;
    if (!strcmp(word, "estale")) return OPENS | RENAMES;
    return word[0] ? WRITES | RENAMES : 0;
}

static int within(const char *path) {
    const char *disk = getenv("FAILING_DISK");
    size_t length = disk ? strlen(disk) : 0;
    return length && !strncmp(path, disk, length) && (path[length] == '/' || !path[length]);
}

/* Whether an operation on an open file or directory fails. */
static int fails_at(int file, int operation) {
    int error, saved = errno;
    int fails = failing(&error) & operation;
    if (fails) {
        char link[64], path[PATH_MAX];
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
        ssize_t length = readlink(link, path, sizeof path - 1);
        path[length < 0 ? 0 : length] = 0;
        fails = within(path);
    }
    errno = fails ? error : saved;
    return fails;
}

static int fails_on(const char *path, int operation) {
    int error, saved = errno;
    int fails = within(path) && failing(&error) & operation;
    errno = fails ? error : saved;
    return fails;
}

/* Whether opening fails; relative paths below a directory as the directory says. */
static int opening_fails(int directory, const char *path, int flags) {
    int operation = OPENS | ((flags & O_ACCMODE) == O_RDONLY ? 0 : WRITES);
    return path[0] == '/' || directory == AT_FDCWD ? fails_on(path, operation) : fails_at(directory, operation);
}

#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { MODE(flags); REAL(open); return opening_fails(AT_FDCWD, path, flags) ? -1 : real(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags); REAL(open64); return opening_fails(AT_FDCWD, path, flags) ? -1 : real(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE(flags); REAL(openat); return opening_fails(at, path, flags) ? -1 : real(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE(flags); REAL(openat64); return opening_fails(at, path, flags) ? -1 : real(at, path, flags, mode); }

ssize_t write(int file, const void *bytes, size_t count) { REAL(write); return fails_at(file, WRITES) ? -1 : real(file, bytes, count); }
ssize_t writev(int file, const struct iovec *parts, int count) { REAL(writev); return fails_at(file, WRITES) ? -1 : real(file, parts, count); }
ssize_t pwrite(int file, const void *bytes, size_t count, off_t at) { REAL(pwrite); return fails_at(file, WRITES) ? -1 : real(file, bytes, count, at); }
ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t at) { REAL(pwrite64); return fails_at(file, WRITES) ? -1 : real(file, bytes, count, at); }
int fsync(int file) { REAL(fsync); return fails_at(file, WRITES) ? -1 : real(file); }
int fdatasync(int file) { REAL(fdatasync); return fails_at(file, WRITES) ? -1 : real(file); }
int rename(const char *from, const char *to) { REAL(rename); return fails_on(to, RENAMES) ? -1 : real(from, to); }

/* Whether a listing of this directory leaves the entry out. */
static int left_out(DIR *directory, const char *name) {
    struct stat entry;
    struct timespec now;
    int saved = errno, out = 0;
    if (name[0] != '.' && fails_at(dirfd(directory), LISTINGS)) {
        clock_gettime(CLOCK_REALTIME, &now);
        out = !fstatat(dirfd(directory), name, &entry, AT_SYMLINK_NOFOLLOW) && now.tv_sec - entry.st_ctim.tv_sec < 2;
    }
    errno = saved;
    return out;
}

struct dirent *readdir(DIR *directory) {
    REAL(readdir);
    struct dirent *entry;
    do entry = real(directory); while (entry && left_out(directory, entry->d_name));
    return entry;
}

struct dirent64 *readdir64(DIR *directory) {
    REAL(readdir64);
    struct dirent64 *entry;
    do entry = real(directory); while (entry && left_out(directory, entry->d_name));
    return entry;
}
