/* When each entry of each transfer was first posted. Off by default, and then it costs one branch a write. */
#ifndef KV_TRACE_H
#define KV_TRACE_H
#include <stdatomic.h>
#include <stdint.h>

struct kv_mark { uint64_t tag, entry_index, bumps_seen, t_ns; };

struct kv_trace {
    uint32_t capacity;
    _Atomic uint64_t head, tail;   /* consumer, producer */
    struct kv_mark marks[];
};

/* A mark that finds no room is left out. */
static inline void kv_trace_put(struct kv_trace *t, struct kv_mark mark)
{
    uint64_t tail = atomic_load_explicit(&t->tail, memory_order_relaxed);
    if (tail - atomic_load_explicit(&t->head, memory_order_acquire) == t->capacity)
        return;
    t->marks[tail % t->capacity] = mark;
    atomic_store_explicit(&t->tail, tail + 1, memory_order_release);
}

static inline uint32_t kv_trace_take(struct kv_trace *t, struct kv_mark *out, uint32_t max)
{
    uint64_t head = atomic_load_explicit(&t->head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&t->tail, memory_order_acquire);
    uint32_t num = 0;
    for (; num < max && head != tail; head++)
        out[num++] = t->marks[head % t->capacity];
    atomic_store_explicit(&t->head, head, memory_order_release);
    return num;
}
#endif
