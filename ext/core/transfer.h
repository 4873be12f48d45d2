/* A transfer: one armed write list on a link. Made by the calling thread in begin_step, then the poller's own. */
#ifndef KV_TRANSFER_H
#define KV_TRANSFER_H
#include "list.h"
#include "plan.h"

struct kv_poller;
struct kv_link;

/* What a caller asks for. */
struct kv_order {
    uint32_t part, link, template;   /* part: of the step, its layer counter's */
    uint32_t imm;   /* slot << 18 | generation << 14; each write adds its rows - 1 */
    uint32_t tag;
    bool ready;     /* the pages are computed: post at once, wait for no step */
    struct kv_chunk chunk;
};

struct kv_transfer {
    struct kv_node in_link;    /* of its link's transfers, until it ends */
    struct kv_node in_queue;   /* of its link's queue, while it may post */
    struct kv_node in_step;    /* of its step, while it waits for bumps */
    struct kv_link *link;      /* NULL before it arrives, and when its link is closed */
    struct kv_template *template;
    uint32_t imm, tag;
    bool ready, stopped;
    uint32_t bumps_seen;                       /* of its step, when it was last released */
    uint32_t released, entry_index, write_index; /* entries [0, released) may be posted; the next to post */
    uint32_t in_flight, num_aside;             /* writes; the latter by injected faults */
    int64_t credit;                            /* bytes it may still post in this turn */
    uint64_t rows_posted, writes_posted;
    uint32_t num_writes;
    struct kv_write writes[];
};

/* Expands and checks; takes over nothing and holds the template by itself. */
struct kv_transfer *kv_transfer_new(struct kv_template *t, const struct kv_order *o, uint32_t max_write_bytes,
                                    struct kv_error *e);
void kv_transfer_free(struct kv_transfer *x);

/* The rest is the poller's thread's. */
/* Takes its place on its link; ends at once when the link is gone. True when it is alive. */
bool kv_transfer_arrive(struct kv_poller *p, struct kv_transfer *x);
/* Lets entries with signal <= bumps go. */
void kv_transfer_release(struct kv_poller *p, struct kv_transfer *x, uint32_t bumps);
/* Drops what is not posted; it ends when nothing of it is in flight. May free it. */
void kv_transfer_stop(struct kv_poller *p, struct kv_transfer *x);
/* Ends it when it has nothing more to do. May free it. */
void kv_transfer_settle(struct kv_poller *p, struct kv_transfer *x);

static inline bool kv_transfer_posted(const struct kv_transfer *x)
{
    return x->entry_index == x->template->num_entries && !x->num_aside;
}
#endif
