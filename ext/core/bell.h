/* A bell wakes one sleeper through an eventfd. `rung` says "awake, or already woken": ringing again costs one exchange
   and no system call.

   Both sides exchange, always, and never load first: "publish, then look at rung" against "clear rung, then look for
   work" is a store-load pattern, and only a read-modify-write on both sides keeps the last ring from being lost. */
#ifndef KV_BELL_H
#define KV_BELL_H
#include <stdalign.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct kv_bell {
    alignas(64) atomic_uint rung;
    int fd;
};

static inline bool kv_bell_init(struct kv_bell *b, bool awake)
{
    atomic_init(&b->rung, awake);
    b->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return b->fd >= 0;
}

static inline void kv_bell_close(struct kv_bell *b)
{
    if (b->fd >= 0)
        close(b->fd);
    b->fd = -1;
}

/* After publishing. True when this ring woke the sleeper. */
static inline bool kv_bell_ring(struct kv_bell *b)
{
    if (atomic_exchange_explicit(&b->rung, 1, memory_order_acq_rel))
        return false;
    ssize_t written = write(b->fd, &(uint64_t){1}, 8);   /* an eventfd refuses only when it is readable anyway */
    (void)written;
    return true;
}

/* Before looking for work: whatever is published from now on rings again. */
static inline void kv_bell_disarm(struct kv_bell *b)
{
    uint64_t rings;
    ssize_t taken = read(b->fd, &rings, 8);
    (void)taken;
    atomic_exchange_explicit(&b->rung, 0, memory_order_acq_rel);
}
#endif
