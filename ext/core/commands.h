/* Commands: what any thread tells the poller. Many producers, one consumer, bounded. A producer reserves first and
   pushes later, so that a push neither fails nor waits and a refusal comes before anything has been done. */
#ifndef KV_COMMANDS_H
#define KV_COMMANDS_H
#include "bell.h"

enum kv_command_kind {
    KV_ADD_STREAM = 1,   /* object: struct kv_stream */
    KV_OPEN_LINK,        /* object: struct kv_link */
    KV_CONNECT_LINK,     /* link: id */
    KV_CLOSE_LINK,       /* link: id, value: with a fence */
    KV_RETARGET_LINK,    /* link: id, object: struct kv_retarget, the poller's to free */
    KV_RESUME_LINK,      /* link: id */
    KV_ROTATE,           /* object: struct kv_port *[], one a network interface, the poller's from here */
    KV_CLOSE_PORT,       /* value: its number */
    KV_ARM_STEP,         /* object: struct kv_step, with all parts of it */
    KV_JOIN_STEP,        /* object: struct kv_step with the transfers that join the step of its ticket; likewise */
    KV_ABANDON_STEP,     /* object: struct kv_stream, value: ticket */
    KV_RESUME_STREAM,    /* object: struct kv_stream, value: ticket of a step that is known to be short */
    KV_STOP_TAG,         /* link: id, value: tag */
    KV_DISTURB,          /* object: struct kv_disturbance, the poller's to free */
};

struct kv_command {
    uint32_t kind, link;
    void *object;
    uint64_t value;
};

#define KV_COMMANDS 4096u

struct kv_command_cell {
    _Atomic uint64_t turn;   /* position: free for that push; position + 1: filled */
    struct kv_command command;
};

struct kv_commands {
    alignas(64) _Atomic uint64_t tail;
    alignas(64) _Atomic int64_t room;
    alignas(64) uint64_t head;   /* the poller's own */
    struct kv_bell bell;         /* the poller sleeps on it */
    alignas(64) struct kv_command_cell at[KV_COMMANDS];
};

static inline bool kv_commands_init(struct kv_commands *c)
{
    atomic_init(&c->tail, 0);
    atomic_init(&c->room, KV_COMMANDS);
    c->head = 0;
    for (uint64_t i = 0; i < KV_COMMANDS; i++)
        atomic_init(&c->at[i].turn, i);
    return kv_bell_init(&c->bell, true);
}

/* One push may follow, or an unreserve. False when full. */
static inline bool kv_commands_reserve(struct kv_commands *c)
{
    int64_t room = atomic_load_explicit(&c->room, memory_order_relaxed);
    while (room > 0)   /* acquire pairs with the release in take: the cell is free again */
        if (atomic_compare_exchange_weak_explicit(&c->room, &room, room - 1, memory_order_acquire,
                                                  memory_order_relaxed))
            return true;
    return false;
}

static inline void kv_commands_unreserve(struct kv_commands *c)
{
    atomic_fetch_add_explicit(&c->room, 1, memory_order_release);
}

static inline void kv_commands_push(struct kv_commands *c, struct kv_command command)
{
    /* acq_rel: the reservation that saw this cell emptied may be another producer's, one that pushed before us */
    uint64_t at = atomic_fetch_add_explicit(&c->tail, 1, memory_order_acq_rel);
    struct kv_command_cell *cell = &c->at[at % KV_COMMANDS];
    cell->command = command;
    atomic_store_explicit(&cell->turn, at + 1, memory_order_release);
    kv_bell_ring(&c->bell);
}

static inline bool kv_commands_waiting(struct kv_commands *c)
{
    return atomic_load_explicit(&c->at[c->head % KV_COMMANDS].turn, memory_order_acquire) == c->head + 1;
}

static inline bool kv_commands_take(struct kv_commands *c, struct kv_command *out)
{
    if (!kv_commands_waiting(c))
        return false;
    *out = c->at[c->head % KV_COMMANDS].command;
    c->head++;
    kv_commands_unreserve(c);
    return true;
}
#endif
