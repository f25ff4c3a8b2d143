/*
 * The clock and the entropy of a simulated process.
 *
 * With KAS_SIM_SEED in the environment, these functions take the place of those of the C library: time advances
 * only when the process sleeps, and then without waiting, and random bytes come from the seed. So a seed decides
 * every run, including the hash maps of the standard library, the generators of rand, the epochs of tables, and
 * libraries that know nothing of this. Without the variable, the system answers.
 *
 * It is C and not Rust because functions with these names cannot be defined in safe Rust. A process simulates one
 * seed on one thread, so nothing here is locked.
 *
 * It also keeps the contexts of zstd for the next use: gossip compresses each digest with a new one, and to make one
 * asks for the features of the processor, which takes longer than the compression in a virtual machine.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000ull
/* 2026-01-01 00:00 UTC, and the age of the system at the start of a simulation. */
#define WALL 1767225600ull
#define AGE 1000000ull

static enum { UNKNOWN, SIMULATED, REAL } mode;
static uint64_t state;
static uint64_t elapsed;

static int is_simulated(void) {
    if (mode == UNKNOWN) {
        const char *seed = getenv("KAS_SIM_SEED");
        if (seed != NULL) {
            state = strtoull(seed, NULL, 10);
        }
        mode = seed != NULL ? SIMULATED : REAL;
    }
    return mode == SIMULATED;
}

/* splitmix64 */
static uint64_t next(void) {
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

ssize_t getrandom(void *buffer, size_t length, unsigned int flags) {
    if (!is_simulated()) {
        return syscall(SYS_getrandom, buffer, length, flags);
    }
    unsigned char *out = buffer;
    for (size_t at = 0; at < length; at += 8) {
        uint64_t word = next();
        for (size_t byte = at; byte < length && byte < at + 8; byte++, word >>= 8) {
            out[byte] = word & 0xff;
        }
    }
    return (ssize_t)length;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    if (!is_simulated()) {
        return (int)syscall(SYS_clock_gettime, clock, time);
    }
    uint64_t origin = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE ? WALL : AGE;
    time->tv_sec = (time_t)(origin + elapsed / SECOND);
    time->tv_nsec = (long)(elapsed % SECOND);
    return 0;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *request, struct timespec *remaining) {
    if (!is_simulated()) {
        return syscall(SYS_clock_nanosleep, clock, flags, request, remaining) == 0 ? 0 : errno;
    }
    struct timespec from = {0, 0};
    if (flags & TIMER_ABSTIME) {
        clock_gettime(clock, &from);
    }
    int64_t length =
        (int64_t)(request->tv_sec - from.tv_sec) * (int64_t)SECOND + (request->tv_nsec - from.tv_nsec);
    if (length > 0) {
        elapsed += (uint64_t)length;
    }
    return 0;
}

int nanosleep(const struct timespec *request, struct timespec *remaining) {
    int error = clock_nanosleep(CLOCK_MONOTONIC, 0, request, remaining);
    if (error != 0) {
        errno = error;
        return -1;
    }
    return 0;
}

/* The linker puts these in the place of those of zstd, see build.rs. Weak: tests do without zstd. */
struct ZSTD_CCtx_s;
extern struct ZSTD_CCtx_s *__real_ZSTD_createCCtx(void) __attribute__((weak));
extern size_t __real_ZSTD_freeCCtx(struct ZSTD_CCtx_s *context) __attribute__((weak));
extern size_t ZSTD_CCtx_reset(struct ZSTD_CCtx_s *context, int what) __attribute__((weak));
#define RESET_SESSION_AND_PARAMETERS 3

static struct ZSTD_CCtx_s *kept;

struct ZSTD_CCtx_s *__wrap_ZSTD_createCCtx(void) {
    struct ZSTD_CCtx_s *context = kept;
    kept = NULL;
    return context != NULL ? context : __real_ZSTD_createCCtx();
}

size_t __wrap_ZSTD_freeCCtx(struct ZSTD_CCtx_s *context) {
    if (context == NULL || kept != NULL || !is_simulated()) {
        return __real_ZSTD_freeCCtx(context);
    }
    /* Cannot fail outside of a compression, and a context in the middle of one is reset as well. */
    ZSTD_CCtx_reset(context, RESET_SESSION_AND_PARAMETERS);
    kept = context;
    return 0;
}
