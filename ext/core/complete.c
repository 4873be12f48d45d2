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

/* The operation a context names, if it really is one: an error entry may carry anything. */
static struct kv_op *find_op(struct kv_poller *p, void *context)
{
    uintptr_t at = (uintptr_t)context;
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++) {
        struct kv_link *l = p->links[slot];
        uintptr_t first = l ? (uintptr_t)l->ops : 0;
        if (first && at >= first && at < first + l->window * sizeof(struct kv_op))
            return context;
    }
    return NULL;
}

static void read_error(struct kv_poller *p)
{
    struct fi_cq_err_entry entry = {0};
    if (fi_cq_readerr(p->domain.cq, &entry, 0) != 1)
        return;
    bool remote = entry.flags & (FI_REMOTE_CQ_DATA | FI_RECV | FI_REMOTE_WRITE);
    struct kv_op *op = remote ? NULL : find_op(p, entry.op_context);
    if (!op) {
        kv_count(&p->stats.errors, 1);   /* a shared queue does not say whose */
        return;
    }
    kv_link_fail(p, op->link, entry.err, KV_FAILED_COMPLETION);
    kv_link_retire_op(p, op);
}

unsigned kv_complete(struct kv_poller *p, bool *emptied)
{
    struct fi_cq_data_entry entry[KV_CQ_BATCH];
    ssize_t num = fi_cq_read(p->domain.cq, entry, KV_CQ_BATCH);
    *emptied = num < KV_CQ_BATCH && num != -FI_EAVAIL;
    for (ssize_t i = 0; i < num; i++) {
        if (entry[i].flags & FI_REMOTE_CQ_DATA) {
            land(p, (uint32_t)entry[i].data);
        } else if (entry[i].op_context) {
            kv_count(&p->stats.completed_writes, 1);
            struct kv_op *op = entry[i].op_context;
            op->link->established = true;
            kv_link_retire_op(p, op);
        }
    }
    if (num >= 0)
        return (unsigned)num;
    if (num == -FI_EAVAIL) {
        read_error(p);
        return 1;
    }
    if (num != -FI_EAGAIN)   /* the queue itself has failed, and with it every link */
        for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++)
            if (p->links[slot])
                kv_link_fail(p, p->links[slot], (int)-num, KV_FAILED_COMPLETION);
    return 0;
}
