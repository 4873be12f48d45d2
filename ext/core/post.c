/* Posting: deficit round robin over the links that have something, and inside a link over its transfers.

   A bump must not wait behind one long stream, so turns are counted in bytes and carry over. A small write is billed
   as 16 KiB because that is what it costs the provider. A round is short, so that the words and the completion queue
   are looked at in between. */
#include "leg.h"
#include "poller.h"
#include <errno.h>

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

/* ---- which links have something to post ---- */
static void enlist(struct kv_poller *p, struct kv_link *l)
{
    if (!kv_list_empty(&l->in_active))
        return;
    kv_list_append(&p->active, &l->in_active);
    p->num_active++;
}

static void delist_if_idle(struct kv_poller *p, struct kv_link *l)
{
    if (kv_list_empty(&l->in_active) || !kv_list_empty(&l->queue) || !kv_list_empty(&l->asides))
        return;
    kv_list_remove(&l->in_active);
    p->num_active--;
}

void kv_queue(struct kv_poller *p, struct kv_transfer *x)
{
    if (x->stopped || !kv_list_empty(&x->in_queue))
        return;
    kv_list_append(&x->link->queue, &x->in_queue);
    enlist(p, x->link);
}

void kv_unqueue(struct kv_poller *p, struct kv_transfer *x)
{
    if (kv_list_empty(&x->in_queue))
        return;
    kv_list_remove(&x->in_queue);
    delist_if_idle(p, x->link);
}

void kv_drop_asides(struct kv_poller *p, struct kv_transfer *x)
{
    if (!x->num_aside)
        return;
    kv_aside_drop(x);
    delist_if_idle(p, x->link);
}

/* ---- one write ---- */
/* The next write of x is another one now; unless it was set aside, that one is posted. */
static void advance(struct kv_poller *p, struct kv_transfer *x, bool posted)
{
    uint32_t rows = posted ? x->writes[x->write_index].rows : 0;
    if (++x->write_index == x->num_writes) {
        x->write_index = 0;
        if (++x->entry_index == x->released)
            kv_unqueue(p, x);
    }
    if (posted)
        kv_leg_posted(p->state, x->tag, rows, x->entry_index, x->template->num_entries);
}

/* A write of x is on its way, or pretends to be. */
static void account(struct kv_poller *p, struct kv_op *op, struct kv_transfer *x, const struct kv_write *w)
{
    op->transfer = x;
    op->link->again_since_ns = 0;
    kv_link_fly(p, op, op->link->sending, w->bytes);
    x->in_flight++;
    x->rows_posted += w->rows;
    x->writes_posted++;
    kv_count(&p->stats.posted_writes, 1);
    kv_count(&p->stats.posted_bytes, w->bytes);
    kv_count(&p->stats.posted_rows, w->rows);
}

static ssize_t put(struct kv_poller *p, const struct kv_transfer *x, const struct kv_entry *n,
                   const struct kv_write *w, const struct kv_region *copy)
{
    struct kv_link *l = x->link;
    struct kv_op *op = KV_OF(l->idle_ops.next, struct kv_op, node);
    struct kv_domain *d = l->sending->domain;
    const struct kv_remote_region *to = &l->remote_regions[n->dst_region];
    struct kv_target *t = &l->targets[to->target];
    ssize_t rc = kv_domain_put(d, &(struct kv_put){
        .ep = l->sending->endpoint.ep, .src = copy ? copy->address : n->src + w->src, .bytes = w->bytes,
        .desc = copy ? copy->desc : d->sources[n->src_region].desc, .imm = x->imm | (w->rows - 1), .to = t->address,
        .dst = n->dst + w->dst, .key = to->key, .context = &op->context});
    kv_target_answers(t, rc, p->now_ns);
    return rc;
}

/* Write `write_index` of entry `entry_index` of x, with what is to go wrong with it. */
static ssize_t post_one(struct kv_poller *p, struct kv_transfer *x, uint32_t entry_index, uint32_t write_index,
                        enum kv_fault fault)
{
    struct kv_link *l = x->link;
    const struct kv_entry *n = &x->template->entries[entry_index];
    const struct kv_write *w = &x->writes[write_index];
    struct kv_op *op = KV_OF(l->idle_ops.next, struct kv_op, node);
    struct kv_region *copy = NULL;
    if (fault == KV_FAULT_FAIL)
        return -FI_EIO;
    if (fault == KV_FAULT_FLIP &&
        !(copy = kv_fault_copy(l->sending->domain, n->src + w->src, w->bytes, x->template->item_bytes)))
        return -FI_ENOMEM;
    ssize_t rc = fault == KV_FAULT_DROP ? 0 : put(p, x, n, w, copy);
    if (rc) {
        if (copy)
            kv_fault_drop_copy(l->sending->domain, copy);
        return rc;
    }
    op->scratch = copy;
    account(p, op, x, w);
    return 0;
}

/* The next write of x meets what tests have ordered. */
static ssize_t post_with_faults(struct kv_poller *p, struct kv_link *l, struct kv_transfer *x)
{
    unsigned delay;
    enum kv_fault fault = kv_fault_next(&p->faults, &delay);
    struct kv_op *op = KV_OF(l->idle_ops.next, struct kv_op, node);
    ssize_t rc = 0;
    if (fault != KV_FAULT_REORDER)
        rc = post_one(p, x, x->entry_index, x->write_index, fault);
    else if (!kv_aside_put(x, delay))
        rc = -FI_ENOMEM;
    if (rc == -FI_EAGAIN)
        return rc;   /* the same write is asked for again, and meets the same */
    kv_fault_count(&p->faults);
    if (rc)
        return rc;
    if (fault != KV_FAULT_REORDER)
        kv_asides_wait_less(l);
    advance(p, x, fault != KV_FAULT_REORDER);
    if (fault == KV_FAULT_DROP) {
        kv_count(&p->stats.completed_writes, 1);
        kv_link_retire_op(p, op);
    }
    return 0;
}

/* Posts the next write of x, which then may have ended. Returns 0 or -errno. */
static ssize_t post_write(struct kv_poller *p, struct kv_link *l, struct kv_transfer *x)
{
    struct kv_trace *trace = atomic_load_explicit(&p->trace, memory_order_acquire);
    struct kv_mark mark = {0};
    if (trace && !x->write_index)
        mark = (struct kv_mark){x->tag, x->entry_index, x->bumps_seen, kv_now_ns()};
    ssize_t rc;
    if (__builtin_expect(kv_faults_armed(&p->faults), 0)) {
        rc = post_with_faults(p, l, x);
    } else {
        rc = post_one(p, x, x->entry_index, x->write_index, KV_FAULT_NONE);
        if (!rc)
            advance(p, x, true);
    }
    if (!rc && mark.t_ns)
        kv_trace_put(trace, mark);
    return rc;
}

/* Posts a write that was set aside and has waited long enough. */
static ssize_t post_aside(struct kv_poller *p, struct kv_link *l, struct kv_aside *a)
{
    ssize_t rc = post_one(p, a->transfer, a->entry_index, a->write_index, KV_FAULT_NONE);
    if (rc)
        return rc;
    struct kv_transfer *x = a->transfer;
    kv_leg_posted(p->state, x->tag, x->writes[a->write_index].rows, x->entry_index, x->template->num_entries);
    kv_asides_wait_less(l);
    kv_aside_free(a);
    delist_if_idle(p, l);
    return 0;
}

/* ---- turns ---- */
/* The provider did not take it. */
static enum turn refused(struct kv_poller *p, struct kv_link *l, ssize_t rc)
{
    if (rc != -FI_EAGAIN) {
        kv_link_fail(p, l, (int)-rc, KV_FAILED_POST);
        return TURN_IDLE;
    }
    kv_count(&p->stats.again, 1);
    l->again_since_ns = l->again_since_ns ? l->again_since_ns : p->now_ns;
    return TURN_BLOCKED;
}

static enum turn take_turn(struct kv_poller *p, struct kv_link *l, struct round *left)
{
    while (left->posts > 0 && left->bytes > 0) {
        if (kv_list_empty(&l->in_active))
            return TURN_IDLE;
        if (l->credit <= 0) {
            l->credit += QUANTUM_BYTES;
            return TURN_OVER;
        }
        if (kv_link_waits(l) || kv_list_empty(&l->idle_ops) || l->flying_bytes >= p->config.link_bytes)
            return TURN_BLOCKED;
        struct kv_aside *a = kv_list_empty(&l->asides) ? NULL : kv_aside_due(l);
        struct kv_transfer *x = a ? a->transfer : KV_OF(l->queue.next, struct kv_transfer, in_queue);
        if (!a && x->credit <= 0) {
            x->credit += QUANTUM_BYTES;
            kv_list_rotate(&l->queue, &x->in_queue);
            continue;
        }
        kv_look(p);
        if (kv_lease_over(p, l)) {
            kv_link_fail(p, l, ETIMEDOUT, KV_FAILED_LEASE);
            return TURN_IDLE;
        }
        int64_t bytes = x->writes[a ? a->write_index : x->write_index].bytes;
        int64_t cost = bytes > LEAST_COST_BYTES ? bytes : LEAST_COST_BYTES;
        x->credit -= cost;
        ssize_t rc = a ? post_aside(p, l, a) : post_write(p, l, x);
        if (rc) {
            x->credit += cost;
            return refused(p, l, rc);
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
