/* The completion queue: what has landed here, and what of ours is locally complete. */
#include "poller.h"

static void land(struct kv_poller *p, uint32_t imm)
{
    struct kv_landing landing;
    enum kv_landed landed = kv_state_land(p->state, imm, &landing);
    if (landed == KV_LANDED_BEAT) {
        kv_link_heard(p, (uint32_t)landing.attempt);
        return;
    }
    kv_count(&p->stats.landed_writes, 1);
    kv_count(&p->stats.landed_rows, (imm & (KV_MAX_ROWS - 1)) + 1);
    switch (landed) {
    case KV_LANDED_COUNTED:
    case KV_LANDED_BEAT:
        break;
    case KV_LANDED_REACHED:
        kv_report(p, KV_REACHED, landing.attempt, landing.rows, 0);
        break;
    case KV_LANDED_OVERFLOW:
        kv_report(p, KV_OVERFLOW, landing.attempt, landing.rows, imm >> KV_ROW_BITS);
        break;
    case KV_LANDED_STRAY:
        kv_report(p, KV_STRAY, imm >> KV_ROW_BITS, 0, 0);
        kv_count(&p->stats.strays, 1);
        break;
    case KV_LANDED_STRAY_SEEN:
        kv_count(&p->stats.strays, 1);
        break;
    }
    if (landing.slot_reached)
        kv_report(p, KV_SLOT_REACHED, landing.slot_index, landing.slot_rows, 0);
}

static bool within(uintptr_t at, const void *first, size_t bytes)
{
    return first && at >= (uintptr_t)first && at < (uintptr_t)first + bytes;
}

/* The operation a context names, if it really is one: an error entry may carry anything. */
static struct kv_op *find_op(struct kv_poller *p, void *context)
{
    uintptr_t at = (uintptr_t)context;
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++) {
        struct kv_link *l = p->links[slot];
        if (l && (within(at, l->ops, l->window * sizeof *l->ops) ||
                  within(at, l->beats, l->num_beats * sizeof *l->beats)))
            return context;
    }
    return NULL;
}

/* A domain of its own says whose an error is, even where the entry does not: its one link's. */
static struct kv_link *find_owner(struct kv_poller *p, struct kv_domain *d)
{
    KV_EACH(node, &p->ports) {
        struct kv_port *o = KV_OF(node, struct kv_port, in_poller);
        if (o->owner && o->domain == d && d != &o->nic->domain)
            return o->owner;
    }
    return NULL;
}

static void read_error(struct kv_poller *p, struct kv_domain *d)
{
    struct fi_cq_err_entry entry = {0};
    if (kv_domain_read_error(d, &entry) != 1)
        return;
    bool remote = entry.flags & (FI_REMOTE_CQ_DATA | FI_RECV | FI_REMOTE_WRITE);
    struct kv_op *op = remote ? NULL : find_op(p, entry.op_context);
    struct kv_link *l = op ? op->link : find_owner(p, d);
    if (l)
        kv_link_fail(p, l, entry.err, KV_FAILED_COMPLETION);
    else
        kv_count(&p->stats.errors, 1);   /* a shared queue does not say whose */
    if (op)
        kv_link_retire_op(p, op);
}

static unsigned complete(struct kv_poller *p, struct kv_domain *d)
{
    struct fi_cq_data_entry entry[KV_CQ_BATCH];
    if (d->abandoned && !d->announced) {
        d->announced = true;
        kv_links_fail(p, d, KV_STUCK, KV_FAILED_STUCK);
    }
    if (d->abandoned || (p->held && !d->unread))
        return 0;
    if (kv_look(p) > d->lease_until_ns && !p->held)
        kv_leases_judge(p, d);
    ssize_t num = kv_domain_read(d, entry, KV_CQ_BATCH);
    if (num < KV_CQ_BATCH && num != -FI_EAVAIL && d->unread)
        d->unread--;
    for (ssize_t i = 0; i < num; i++) {
        if (entry[i].flags & FI_REMOTE_CQ_DATA) {
            land(p, (uint32_t)entry[i].data);
        } else if (entry[i].op_context) {
            struct kv_op *op = entry[i].op_context;
            kv_count(&p->stats.completed_writes, op->transfer != NULL);
            kv_link_retire_op(p, op);
        }
    }
    if (num >= 0)
        return (unsigned)num;
    if (num == -FI_EAVAIL) {
        read_error(p, d);
        return 1;
    }
    if (num != -FI_EAGAIN)   /* the queue itself has failed, and with it every link */
        kv_links_fail(p, d, (int)-num, KV_FAILED_COMPLETION);
    return 0;
}

unsigned kv_complete(struct kv_poller *p)
{
    unsigned num = 0;
    KV_EACH(node, &p->domains)
        num += complete(p, KV_OF(node, struct kv_domain, in_poller));
    return num;
}
