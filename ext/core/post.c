/* Posting: deficit round robin over the links that have something, and inside a link over its transfers.

   A bump must not wait behind one long stream, so turns are counted in bytes and carry over. A small write is billed
   as 16 KiB because that is what it costs the provider. A round is short, so that the words and the completion queue
   are looked at in between. */
#include "leg.h"
#include "poller.h"

#define ROUND_POSTS 32
#define ROUND_BYTES (512 << 10)
#define QUANTUM_BYTES (128 << 10)
#define LEAST_COST_BYTES (16 << 10)

struct round { int posts; int64_t bytes; };

enum turn {
    TURN_OVER,      /* its credit is spent: the next link's turn */
    TURN_BLOCKED,   /* nothing may go on this link now */
    TURN_IDLE,      /* it has nothing more to post */
    ROUND_OVER
};

void kv_queue(struct kv_poller *p, struct kv_transfer *x)
{
    struct kv_link *l = x->link;
    if (x->stopped || !kv_list_empty(&x->in_queue))
        return;
    if (kv_list_empty(&l->queue)) {
        kv_list_append(&p->active, &l->in_active);
        p->num_active++;
    }
    kv_list_append(&l->queue, &x->in_queue);
}

void kv_unqueue(struct kv_poller *p, struct kv_transfer *x)
{
    if (kv_list_empty(&x->in_queue))
        return;
    kv_list_remove(&x->in_queue);
    if (kv_list_empty(&x->link->queue)) {
        kv_list_remove(&x->link->in_active);
        p->num_active--;
    }
}

/* The next write of x is on its way, or pretends to be. */
static void account(struct kv_poller *p, struct kv_op *op, struct kv_transfer *x, const struct kv_write *w)
{
    struct kv_link *l = op->link;
    op->transfer = x;
    op->bytes = w->bytes;
    op->posted_ns = p->now_ns;
    kv_list_rotate(&l->flying_ops, &op->node);
    l->flying_bytes += w->bytes;
    l->again_since_ns = 0;
    p->num_flying++;
    x->in_flight++;
    x->rows_posted += w->rows;
    x->writes_posted++;
    kv_count(&p->stats.posted_writes, 1);
    kv_count(&p->stats.posted_bytes, w->bytes);
    kv_count(&p->stats.posted_rows, w->rows);
    if (++x->write_index == x->num_writes) {
        x->write_index = 0;
        if (++x->entry_index == x->released)
            kv_unqueue(p, x);
    }
    kv_leg_posted(p->state, x->tag, w->rows, x->entry_index, x->template->num_entries);
}

static ssize_t post_with_faults(struct kv_poller *p, struct kv_op *op, struct kv_transfer *x, const struct kv_entry *n,
                                const struct kv_write *w)
{
    enum kv_fault fault = kv_fault_next(&p->faults);
    const char *src = n->src + w->src;
    void *desc = n->desc;
    if (fault == KV_FAULT_CORRUPT) {
        if (!(op->scratch = kv_fault_copy(&p->domain, src, w->bytes, x->template->item_bytes)))
            return -FI_ENOMEM;
        src = op->scratch->address;
        desc = op->scratch->desc;
    }
    ssize_t rc = 0;
    if (fault != KV_FAULT_DROP)
        rc = fi_writedata(op->link->endpoint.ep, src, w->bytes, desc, x->imm | (w->rows - 1), op->link->address,
                          n->dst + w->dst, n->key, &op->context);
    if (rc && op->scratch) {
        kv_fault_drop_copy(op->scratch);
        op->scratch = NULL;
    }
    if (rc)
        return rc;
    kv_fault_count(&p->faults);
    account(p, op, x, w);
    if (fault == KV_FAULT_DROP) {
        kv_count(&p->stats.completed_writes, 1);
        kv_link_retire_op(p, op);
    }
    return 0;
}

/* Posts the next write of x, which then may have ended. Returns 0 or -errno. */
static ssize_t post_write(struct kv_poller *p, struct kv_link *l, struct kv_transfer *x)
{
    const struct kv_entry *n = &x->template->entries[x->entry_index];
    const struct kv_write *w = &x->writes[x->write_index];
    struct kv_op *op = KV_OF(l->idle_ops.next, struct kv_op, node);
    struct kv_trace *trace = atomic_load_explicit(&p->trace, memory_order_acquire);
    struct kv_mark mark = {0};
    if (trace && !x->write_index)
        mark = (struct kv_mark){x->tag, x->entry_index, x->bumps_seen, kv_now_ns()};
    ssize_t rc;
    if (__builtin_expect(kv_faults_armed(&p->faults), 0)) {
        rc = post_with_faults(p, op, x, n, w);
    } else {
        rc = fi_writedata(l->endpoint.ep, n->src + w->src, w->bytes, n->desc, x->imm | (w->rows - 1), l->address,
                          n->dst + w->dst, n->key, &op->context);
        if (!rc)
            account(p, op, x, w);
    }
    if (!rc && mark.t_ns)
        kv_trace_put(trace, mark);
    return rc;
}

static enum turn take_turn(struct kv_poller *p, struct kv_link *l, struct round *left)
{
    while (left->posts > 0 && left->bytes > 0) {
        if (kv_list_empty(&l->queue))
            return TURN_IDLE;
        if (l->credit <= 0) {
            l->credit += QUANTUM_BYTES;
            return TURN_OVER;
        }
        if (kv_list_empty(&l->idle_ops) || l->flying_bytes >= p->config.link_bytes)
            return TURN_BLOCKED;
        struct kv_transfer *x = KV_OF(l->queue.next, struct kv_transfer, in_queue);
        if (x->credit <= 0) {
            x->credit += QUANTUM_BYTES;
            kv_list_rotate(&l->queue, &x->in_queue);
            continue;
        }
        int64_t bytes = x->writes[x->write_index].bytes;
        int64_t cost = bytes > LEAST_COST_BYTES ? bytes : LEAST_COST_BYTES;
        x->credit -= cost;
        ssize_t rc = post_write(p, l, x);
        if (rc) {
            if (rc != -FI_EAGAIN) {
                kv_link_fail(p, l, (int)-rc, KV_FAILED_POST);
                return TURN_IDLE;
            }
            x->credit += cost;
            kv_count(&p->stats.again, 1);
            l->again_since_ns = l->again_since_ns ? l->again_since_ns : p->now_ns;
            return TURN_BLOCKED;
        }
        l->credit -= cost;
        left->posts--;
        left->bytes -= bytes;
        kv_watch(p);
    }
    return ROUND_OVER;
}

unsigned kv_post(struct kv_poller *p)
{
    struct round left = {ROUND_POSTS, ROUND_BYTES};
    uint32_t num_blocked = 0;   /* in a row: when all are, the round is over */
    while (num_blocked < p->num_active) {
        struct kv_link *l = KV_OF(p->active.next, struct kv_link, in_active);
        enum turn turn = take_turn(p, l, &left);
        if (turn == ROUND_OVER)
            break;
        if (turn == TURN_IDLE)
            continue;
        kv_list_rotate(&p->active, &l->in_active);
        num_blocked = turn == TURN_BLOCKED ? num_blocked + 1 : 0;
    }
    return (unsigned)(ROUND_POSTS - left.posts);
}
