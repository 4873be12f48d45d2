/* Records: what the poller tells the outside. One producer (the poller), one consumer, bounded. */
#ifndef KV_RECORDS_H
#define KV_RECORDS_H
#include "bell.h"

enum kv_record_kind {
    KV_REACHED = 1,   /* id attempt, value rows: all that was expected has landed */
    KV_OVERFLOW,      /* id attempt, value rows, extra slot index: more landed than expected */
    KV_STRAY,         /* id slot index: rows landed for no attempt; once until the slot is linked again */
    KV_SENT,          /* id tag, value rows posted, extra writes posted: all posted and locally complete */
    KV_STOPPED,       /* the same, ended early: nothing of it is in flight any more */
    KV_LINK_OPENED,   /* id link */
    KV_LINK_FAILED,   /* id link, value errno, extra enum kv_link_failure */
    KV_LINK_CLOSED,   /* id link: nothing can land through it, nothing of it reads source memory */
    KV_STEP_ENDED,    /* id counter, value ticket, extra bumps seen */
    KV_STEP_FAULT,    /* id counter, value ticket, extra bumps seen << 32 | enum kv_step_fault. To be answered by
                         kv_resume_stream: one that is short holds back what later steps show */
    KV_SLOT_REACHED,  /* id slot index, value rows: those awaited in this slot have landed */
    KV_LINK_HELD,     /* id link: it has its peer's new address, and nothing posted to the old one is in flight */
    KV_PORT_OPENED,   /* id port: every link has it now */
    KV_PORT_FAILED,   /* id port, value errno, extra enum kv_link_failure: it does not close; id 0: does not open */
    KV_PORT_CLOSED,   /* id port: nothing can land through it, nothing was lost that had landed */
    KV_JOIN_LOST,     /* id tag, value ticket, extra counter: its transfers cannot join that step; once, before they are
                         reported as stopped. Of several pollers each that has some says so */
};
enum kv_step_fault { KV_FEWER = 1, KV_MORE, KV_DEADLINE };
enum kv_link_failure {
    KV_FAILED_OPEN = 1, KV_FAILED_REGISTER, KV_FAILED_CONNECT, KV_FAILED_POST, KV_FAILED_COMPLETION, KV_FAILED_TIMEOUT,
    KV_FAILED_CLOSE,
    KV_FAILED_LEASE,   /* no heartbeat of the peer landed for the time of a lease */
    KV_FAILED_STUCK,   /* a call did not come back: the peer holds a lock in memory that shm shares with it */
};

struct kv_record {
    uint64_t kind, id, value, t_ns, extra;
};

#define KV_RECORDS 4096u

struct kv_records {
    alignas(64) _Atomic uint64_t tail;   /* written by the poller */
    uint64_t head_seen;                  /* the poller's copy of head, refreshed only when the ring looks full */
    alignas(64) _Atomic uint64_t head;   /* written by the consumer */
    struct kv_bell bell;                 /* the consumer sleeps on it */
    alignas(64) struct kv_record at[KV_RECORDS];
};

/* False when full. */
static inline bool kv_records_put(struct kv_records *r, const struct kv_record *record)
{
    uint64_t tail = atomic_load_explicit(&r->tail, memory_order_relaxed);
    if (tail - r->head_seen == KV_RECORDS) {
        r->head_seen = atomic_load_explicit(&r->head, memory_order_acquire);
        if (tail - r->head_seen == KV_RECORDS)
            return false;
    }
    r->at[tail % KV_RECORDS] = *record;
    atomic_store_explicit(&r->tail, tail + 1, memory_order_release);
    kv_bell_ring(&r->bell);
    return true;
}

/* Up to `max` records. The caller disarms the bell before, and rings it again when the batch came back full. */
static inline unsigned kv_records_take(struct kv_records *r, struct kv_record *out, unsigned max)
{
    uint64_t head = atomic_load_explicit(&r->head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&r->tail, memory_order_acquire);
    unsigned num = 0;
    for (; num < max && head != tail; head++)
        out[num++] = r->at[head % KV_RECORDS];
    atomic_store_explicit(&r->head, head, memory_order_release);
    return num;
}
#endif
