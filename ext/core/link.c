#include "link.h"
#include "census.h"
#include "poller.h"
#include <stdlib.h>
#include <string.h>

/* ---- callers' side ---- */
struct kv_link *kv_link_new(uint32_t id, struct kv_nic *nic, const uint64_t *keys, char *cell)
{
    struct kv_link *l = calloc(1, sizeof *l);
    struct kv_port *port = l ? kv_port_new(nic, keys) : NULL;
    if (!port) {
        free(l);
        return NULL;
    }
    l->port = l->sending = port;
    port->owner = l;
    l->nic = nic;
    l->id = id;
    l->cell.region = (struct kv_region){.address = cell, .bytes = KV_CELL_BYTES};
    l->cell.key = keys[port->num_regions];
    l->lease_until_ns = UINT64_MAX;
    kv_list_init(&l->cell.in_process);
    kv_list_init(&l->idle_ops);
    kv_list_init(&l->flying_ops);
    kv_list_init(&l->in_active);
    kv_list_init(&l->transfers);
    kv_list_init(&l->queue);
    kv_list_init(&l->asides);
    kv_live(KV_LIVE_LINKS, 1);
    return l;
}

bool kv_link_check_remote(const struct kv_remote *r, struct kv_error *e)
{
    if (!r->num_names)
        return kv_error_set(e, KV_INVALID, "no targets; want each endpoint of the peer that this link writes to or "
                            "hears");
    for (uint32_t i = 0; i < r->num_names; i++)
        if (r->names[i].num_bytes > KV_NAME_BYTES)
            return kv_error_set(e, KV_INVALID, "target %u has an address of %zu bytes; want at most %d", i,
                                r->names[i].num_bytes, KV_NAME_BYTES);
    for (uint32_t i = 0; i < r->num_regions; i++)
        if (r->regions[i].target >= r->num_names)
            return kv_error_set(e, KV_INVALID, "region %u of the peer is reached through target %u of %u", i,
                                r->regions[i].target, r->num_names);
    for (uint32_t i = 0; i < r->num_cells; i++) {
        if (r->cells[i].target >= r->num_names)
            return kv_error_set(e, KV_INVALID, "heartbeats %u go to target %u of %u", i, r->cells[i].target,
                                r->num_names);
        if (r->cells[i].imm & (KV_MAX_ROWS - 1))
            return kv_error_set(e, KV_INVALID, "immediate 0x%x of the heartbeats already carries rows",
                                r->cells[i].imm);
    }
    return true;
}

static void own_op(struct kv_link *l, struct kv_op *op)
{
    op->link = l;
    kv_list_init(&op->node);
}

bool kv_link_set_remote(struct kv_link *l, const struct kv_remote *r, uint32_t window, struct kv_error *e)
{
    if (!window)
        return kv_error_set(e, KV_INVALID, "a window of 0 operations; want at least 1");
    if (!kv_link_check_remote(r, e))
        return false;
    struct kv_op *ops = calloc(window, sizeof *ops);
    struct kv_target *targets = calloc(r->num_names, sizeof *targets);
    struct kv_remote_region *regions = calloc(r->num_regions + 1ul, sizeof *regions);
    struct kv_beat *beats = calloc(r->num_cells + 1ul, sizeof *beats);
    if (!ops || !targets || !regions || !beats) {
        free(ops), free(targets), free(regions), free(beats);
        return kv_error_memory(e);
    }
    l->ops = ops, l->targets = targets, l->remote_regions = regions, l->beats = beats;
    l->num_targets = r->num_names, l->num_remote_regions = r->num_regions, l->num_beats = r->num_cells;
    l->window = window;
    for (uint32_t i = 0; i < r->num_names; i++)
        memcpy(targets[i].name, r->names[i].bytes, r->names[i].num_bytes);
    if (r->num_regions)
        memcpy(regions, r->regions, r->num_regions * sizeof *regions);
    for (uint32_t i = 0; i < r->num_cells; i++) {
        own_op(l, &beats[i].op);
        beats[i].cell = r->cells[i];
    }
    for (uint32_t i = 0; i < window; i++) {
        own_op(l, &ops[i]);
        kv_list_append(&l->idle_ops, &ops[i].node);
    }
    l->connected = true;
    return true;
}

void kv_link_free(struct kv_link *l)
{
    struct kv_port *port = l->port;
    if (port->owner == l)
        kv_port_free(port);
    free(l->retarget);
    free(l->ops);
    free(l->targets);
    free(l->remote_regions);
    free(l->beats);
    free(l);
    kv_live(KV_LIVE_LINKS, -1);
}

/* ---- poller's side ---- */
struct kv_link *kv_link_find(struct kv_poller *p, uint32_t id)
{
    struct kv_link *l = p->links[kv_link_slot(id)];
    return l && l->id == id ? l : NULL;
}

/* Opens its own port, unless there is one that all links share. */
static int find_port(struct kv_poller *p, struct kv_link *l, enum kv_link_failure *what)
{
    struct kv_port *own = l->port;
    if (l->nic->port) {
        l->port = l->sending = l->nic->port;
        kv_port_free(own);
        return 0;
    }
    int rc = kv_port_open(p, own, what);
    if (!rc && p->config.shared_endpoint)
        kv_port_share(p, own, 0);
    return rc;
}

void kv_link_open(struct kv_poller *p, struct kv_link *l)
{
    enum kv_link_failure what;
    p->links[kv_link_slot(l->id)] = l;
    int rc = find_port(p, l, &what);
    if (!rc) {
        what = KV_FAILED_REGISTER;
        rc = kv_region_open(kv_link_landing(l), &l->cell.region, FI_REMOTE_WRITE, l->cell.key);
    }
    if (rc) {
        kv_link_fail(p, l, -rc, what);
        return;
    }
    l->cell.key = fi_mr_key(l->cell.region.mr);
    if (l->nic->fabric.shares_locks)
        kv_cell_publish(&l->cell);
    atomic_store_explicit(&l->opened, true, memory_order_release);
    kv_report(p, KV_LINK_OPENED, l->id, 0, 0);
}

int kv_link_find_targets(struct kv_link *l, struct kv_port *o)
{
    int rc = 0;
    for (uint32_t i = 0; i < l->num_targets && !rc; i++)
        rc = kv_endpoint_connect(o->domain, &o->endpoint, l->targets[i].name, &l->targets[i].next_address);
    return rc;
}

void kv_link_connect(struct kv_poller *p, struct kv_link *l)
{
    if (l->failed)
        return;
    int rc = kv_link_find_targets(l, l->port);
    for (uint32_t i = 0; i < l->num_targets; i++)
        l->targets[i].address = l->targets[i].next_address;
    if (rc)
        kv_link_fail(p, l, -rc, KV_FAILED_CONNECT);
    else
        kv_lease_begin(p, l);
    p->young_until_ns = kv_now_ns() + 2 * KV_S;
}

void kv_link_stop_all(struct kv_poller *p, struct kv_link *l)
{
    KV_EACH(node, &l->transfers)
        kv_transfer_stop(p, KV_OF(node, struct kv_transfer, in_link));
}

void kv_link_fail(struct kv_poller *p, struct kv_link *l, int error, enum kv_link_failure what)
{
    kv_count(&p->stats.errors, 1);
    if (l->failed || l->closing)
        return;
    l->failed = true;
    if (kv_port_abandoned(l->port) || kv_port_abandoned(l->sending))
        error = KV_STUCK, what = KV_FAILED_STUCK;
    kv_report(p, KV_LINK_FAILED, l->id, (uint64_t)error, what);
    kv_link_stop_all(p, l);
}

void kv_links_fail(struct kv_poller *p, struct kv_domain *d, int error, enum kv_link_failure what)
{
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++)
        if (p->links[slot] && (kv_link_landing(p->links[slot]) == d || p->links[slot]->sending->domain == d))
            kv_link_fail(p, p->links[slot], error, what);
}

void kv_link_stop_tag(struct kv_poller *p, struct kv_link *l, uint32_t tag)
{
    KV_EACH(node, &l->transfers) {
        struct kv_transfer *x = KV_OF(node, struct kv_transfer, in_link);
        if (x->tag == tag)
            kv_transfer_stop(p, x);
    }
}

void kv_link_check_timeouts(struct kv_poller *p)
{
    if (p->held)
        return;   /* it is we who do not read */
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++) {
        struct kv_link *l = p->links[slot];
        if (!l || l->failed || l->closing)
            continue;
        uint64_t since = l->again_since_ns ? l->again_since_ns : p->now_ns;
        if (!kv_list_empty(&l->flying_ops)) {
            uint64_t oldest = KV_OF(l->flying_ops.next, struct kv_op, node)->posted_ns;
            since = oldest < since ? oldest : since;
        }
        if (p->now_ns - since > p->config.op_timeout_ns)
            kv_link_fail(p, l, FI_ETIMEDOUT, KV_FAILED_TIMEOUT);
    }
}

/* ---- operations ---- */
void kv_link_fly(struct kv_poller *p, struct kv_op *op, struct kv_port *port, uint32_t bytes)
{
    struct kv_link *l = op->link;
    op->port = port;
    op->bytes = bytes;
    l->flying_writes += op->transfer != NULL;
    op->posted_ns = p->now_ns;
    kv_list_rotate(&l->flying_ops, &op->node);
    l->flying_bytes += bytes;
    p->num_flying++;
}

void kv_link_retire_op(struct kv_poller *p, struct kv_op *op)
{
    struct kv_link *l = op->link;
    struct kv_transfer *x = op->transfer;
    kv_list_remove(&op->node);
    l->flying_bytes -= op->bytes;
    p->num_flying--;
    p->ends_due |= l->closing;
    if (!x) {
        KV_OF(op, struct kv_beat, op)->flying = false;
        return;
    }
    l->flying_writes--;
    kv_list_insert(&l->idle_ops, &op->node);   /* the warmest first */
    l->again_since_ns = 0;
    if (op->scratch) {
        kv_fault_drop_copy(op->port->domain, op->scratch);
        op->scratch = NULL;
    }
    x->in_flight--;
    kv_transfer_settle(p, x);
    if (kv_link_waits(l) && !l->flying_writes)
        kv_link_settle(p, l);
}
