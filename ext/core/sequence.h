/* A block of words that one writer at a time changes and other processes read, without a lock that a stopped writer
   could keep. The sequence is odd while it changes.

   Every word is stored with release and loaded with acquire: a reader that saw one new word sees the odd sequence that
   came before it. */
#ifndef KV_SEQUENCE_H
#define KV_SEQUENCE_H
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KV_SEQUENCE_TRIES 64   /* a writer that has not finished by then is stopped, or dead */

static inline void kv_sequence_step(_Atomic uint32_t *sequence)   /* before the first store, and after the last */
{
    uint32_t now = atomic_load_explicit(sequence, memory_order_relaxed);
    atomic_store_explicit(sequence, now + 1, memory_order_release);
}

static inline void kv_words_store(_Atomic uint64_t *words, const void *from, size_t num)
{
    for (size_t i = 0; i < num; i++) {
        uint64_t word;
        memcpy(&word, (const char *)from + i * 8, 8);
        atomic_store_explicit(&words[i], word, memory_order_release);
    }
}

static inline void kv_words_load(void *to, const _Atomic uint64_t *words, size_t num)
{
    for (size_t i = 0; i < num; i++) {
        uint64_t word = atomic_load_explicit(&words[i], memory_order_acquire);
        memcpy((char *)to + i * 8, &word, 8);
    }
}

/* The sequence to give to kv_sequence_same after the loads. Never waits long: it may still be odd. */
static inline uint32_t kv_sequence_wait(const _Atomic uint32_t *sequence)
{
    uint32_t now = atomic_load_explicit(sequence, memory_order_acquire);
    for (unsigned i = 0; now % 2 && i < KV_SEQUENCE_TRIES; i++) {
        sched_yield();
        now = atomic_load_explicit(sequence, memory_order_acquire);
    }
    return now;
}

static inline bool kv_sequence_same(const _Atomic uint32_t *sequence, uint32_t before)
{
    return before % 2 == 0 && atomic_load_explicit(sequence, memory_order_relaxed) == before;
}
#endif
