/* The one clock of the native layer. */
#ifndef KV_CLOCK_H
#define KV_CLOCK_H
#include <stdint.h>
#include <time.h>

#define KV_US 1000ull
#define KV_MS 1000000ull
#define KV_S 1000000000ull

static inline uint64_t kv_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * KV_S + (uint64_t)t.tv_nsec;
}
#endif
