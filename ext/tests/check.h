/* What the C tests share. */
#ifndef KV_CHECK_H
#define KV_CHECK_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(what) \
    do { \
        if (!(what)) { \
            fprintf(stderr, "%s:%d: %s: not so: %s\n", __FILE__, __LINE__, __func__, #what); \
            abort(); \
        } \
    } while (0)

static inline uint64_t random_next(uint64_t *state)   /* xorshift: the same run every time */
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}
static inline uint64_t random_below(uint64_t *state, uint64_t limit) { return random_next(state) % limit; }
#endif
