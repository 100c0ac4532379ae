/* Put before libc: makes a disk slow, and shows what it would have after a loss of power.

   KC_SLOW: file that has to be there for syncs to take KC_SLOW_SECONDS.
   KC_FAIL: file that has to be there for syncs to fail.
   KC_SHADOW: folder into which each file is copied, as NUMBER-WHAT-NAME: as it was when a sync began that has ended
   (`synced`; `held` if the main thread waited while syncs were slow), and before it is cut (`cut`). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static pthread_mutex_t one = PTHREAD_MUTEX_INITIALIZER;

/* A file as it is. Returns whether there is a copy, under a name of its own until it has a number. */
static int copied(int file, char *copy, char *of)
{
    char link[64], bytes[65536];
    static int copies;
    const char *folder = getenv("KC_SHADOW");
    ssize_t length;
    if (!folder)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if ((length = readlink(link, of, PATH_MAX - 1)) < 0)
        return 0;
    of[length] = 0;
    pthread_mutex_lock(&one);
    snprintf(copy, PATH_MAX, "%s/.%d", folder, copies++);
    int from = open(of, O_RDONLY), to = open(copy, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    while ((length = read(from, bytes, sizeof bytes)) > 0)
        if (write(to, bytes, length) != length)
            abort();
    close(from);
    close(to);
    pthread_mutex_unlock(&one);
    return 1;
}

static void numbered(const char *copy, const char *what, const char *of)
{
    char into[2 * PATH_MAX];
    static int number;
    pthread_mutex_lock(&one);
    snprintf(into, sizeof into, "%s/%06d-%s-%s", getenv("KC_SHADOW"), number++, what, strrchr(of, '/') + 1);
    if (rename(copy, into))
        abort();
    pthread_mutex_unlock(&one);
}

static int waited(void)
{
    const char *file = getenv("KC_SLOW"), *seconds = getenv("KC_SLOW_SECONDS");
    if (file && seconds && !access(file, F_OK))
        return usleep((useconds_t)(atof(seconds) * 1e6)), getpid() == gettid();
    return 0;
}

static int synced(const char *which, int file)
{
    char copy[PATH_MAX], of[PATH_MAX];
    const char *fails = getenv("KC_FAIL");
    if (fails && !access(fails, F_OK))
        return errno = EIO, -1;
    int is_copied = copied(file, copy, of), held = waited();
    int result = ((int (*)(int))dlsym(RTLD_NEXT, which))(file);
    if (is_copied)
        numbered(copy, held ? "held" : "synced", of);
    return result;
}

static int cut(const char *which, int file, off_t size)
{
    char copy[PATH_MAX], of[PATH_MAX];
    if (copied(file, copy, of))
        numbered(copy, "cut", of);
    return ((int (*)(int, off_t))dlsym(RTLD_NEXT, which))(file, size);
}

int fsync(int file) { return synced("fsync", file); }
int fdatasync(int file) { return synced("fdatasync", file); }
int ftruncate(int file, off_t size) { return cut("ftruncate", file, size); }
int ftruncate64(int file, off64_t size) { return cut("ftruncate64", file, size); }
