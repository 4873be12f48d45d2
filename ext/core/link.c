#include "link.h"
#include "census.h"
#include "poller.h"
#include <stdlib.h>
#include <string.h>

/* ---- callers' side ---- */
struct kv_link *kv_link_new(uint32_t id, const struct kv_region *regions, const uint64_t *keys, uint32_t num_regions)
{
    struct kv_link *l = calloc(1, sizeof *l + num_regions * (sizeof *l->regions + sizeof *l->keys));
    if (!l)
        return NULL;
    l->id = id;
    l->num_regions = num_regions;
    l->regions = (void *)(l + 1);
    l->keys = (void *)(l->regions + num_regions);
    for (uint32_t i = 0; i < num_regions; i++) {
        l->regions[i] = (struct kv_region){.address = regions[i].address, .bytes = regions[i].bytes};
        l->keys[i] = keys[i];
    }
    kv_list_init(&l->idle_ops);
    kv_list_init(&l->flying_ops);
    kv_list_init(&l->in_active);
    kv_list_init(&l->transfers);
    kv_list_init(&l->queue);
    kv_live(KV_LIVE_LINKS, 1);
    return l;
}

bool kv_link_set_remote(struct kv_link *l, const void *name, size_t name_bytes, const struct kv_remote_region *regions,
                        uint32_t num_regions, uint32_t window, struct kv_error *e)
{
    if (!window || name_bytes > sizeof l->remote_name)
        return kv_error_set(e, KV_INVALID, "a window of %u operations and an address of %zu bytes; want at least 1 and "
                            "at most %zu", window, name_bytes, sizeof l->remote_name);
    struct kv_op *ops = calloc(window, sizeof *ops);
    struct kv_remote_region *copy = malloc((num_regions + 1) * sizeof *copy);
    if (!ops || !copy) {
        free(ops);
        free(copy);
        return kv_error_memory(e);
    }
    memcpy(l->remote_name, name, name_bytes);
    if (num_regions)
        memcpy(copy, regions, num_regions * sizeof *copy);
    l->remote_regions = copy;
    l->num_remote_regions = num_regions;
    l->window = window;
    l->ops = ops;
    for (uint32_t i = 0; i < window; i++) {
        ops[i].link = l;
        kv_list_append(&l->idle_ops, &ops[i].node);
    }
    l->connected = true;
    return true;
}

void kv_link_free(struct kv_link *l)
{
    free(l->ops);
    free(l->remote_regions);
    free(l);
    kv_live(KV_LIVE_LINKS, -1);
}

/* ---- poller's side ---- */
struct kv_link *kv_link_find(struct kv_poller *p, uint32_t id)
{
    struct kv_link *l = p->links[kv_link_slot(id)];
    return l && l->id == id ? l : NULL;
}

void kv_link_open(struct kv_poller *p, struct kv_link *l)
{
    p->links[kv_link_slot(l->id)] = l;
    int rc = kv_endpoint_open(&p->domain, &l->endpoint);
    if (rc) {
        kv_link_fail(p, l, -rc, KV_FAILED_OPEN);
        return;
    }
    for (uint32_t i = 0; i < l->num_regions; i++) {
        rc = kv_region_open(&p->domain, &l->regions[i], FI_REMOTE_WRITE, l->keys[i]);
        if (rc) {
            kv_link_fail(p, l, -rc, KV_FAILED_REGISTER);
            return;
        }
        l->keys[i] = fi_mr_key(l->regions[i].mr);   /* ours, unless the provider makes them */
    }
    atomic_store_explicit(&l->opened, true, memory_order_release);
    kv_report(p, KV_LINK_OPENED, l->id, 0, 0);
}

void kv_link_connect(struct kv_poller *p, struct kv_link *l)
{
    if (l->failed)
        return;
    int rc = kv_endpoint_connect(&l->endpoint, l->remote_name, &l->address);
    if (rc)
        kv_link_fail(p, l, -rc, KV_FAILED_CONNECT);
    p->young_until_ns = kv_now_ns() + 2 * KV_S;
}

static void stop_transfers(struct kv_poller *p, struct kv_link *l)
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
    kv_report(p, KV_LINK_FAILED, l->id, (uint64_t)error, what);
    stop_transfers(p, l);
}

void kv_link_stop_tag(struct kv_poller *p, struct kv_link *l, uint32_t tag)
{
    KV_EACH(node, &l->transfers) {
        struct kv_transfer *x = KV_OF(node, struct kv_transfer, in_link);
        if (x->tag == tag)
            kv_transfer_stop(p, x);
    }
}

/* ---- closing: a fence; it is over when nothing can land and nothing of ours is read any more ---- */
/* libfabric 1.17's net frees a listener but not what it has just accepted, and crashes when the peer's request comes in
   after that. A link that never completed anything may be in the middle of this: it is polled a little longer. */
#define LINGER_NS (2 * KV_MS)

void kv_link_close(struct kv_poller *p, struct kv_link *l)
{
    if (l->closing)
        return;
    l->closing = true;
    l->close_at_ns = l->established ? 0 : kv_now_ns() + LINGER_NS;
    p->num_closing++;
    stop_transfers(p, l);
    if (l->established)
        kv_link_go_on_closing(p, false);
}

static void close_endpoint(struct kv_poller *p, struct kv_link *l)
{
    int rc = kv_endpoint_close(&l->endpoint);
    for (uint32_t i = 0; i < l->num_regions && !rc; i++)
        rc = kv_region_close(&l->regions[i]);
    l->closed = !rc;
    if (rc) {   /* no fence: it is never reported closed */
        kv_count(&p->stats.errors, 1);
        kv_report(p, KV_LINK_FAILED, l->id, (uint64_t)-rc, KV_FAILED_CLOSE);
        l->close_at_ns = UINT64_MAX;
        p->num_closing--;
    }
}

static void end_link(struct kv_poller *p, struct kv_link *l)
{
    uint32_t slot = kv_link_slot(l->id);
    KV_EACH(node, &l->flying_ops)   /* a closed shm endpoint completes nothing */
        kv_link_retire_op(p, KV_OF(node, struct kv_op, node));
    kv_report(p, KV_LINK_CLOSED, l->id, 0, 0);
    kv_link_free(l);
    p->links[slot] = NULL;
    p->num_closing--;
    atomic_store_explicit(&p->link_slot_busy[slot], false, memory_order_release);
}

void kv_link_go_on_closing(struct kv_poller *p, bool emptied)
{
    uint64_t now_ns = kv_now_ns();
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++) {
        struct kv_link *l = p->links[slot];
        if (!l || !l->closing)
            continue;
        if (l->closed && emptied)
            end_link(p, l);
        else if (!l->closed && now_ns >= l->close_at_ns)
            close_endpoint(p, l);
    }
}

void kv_link_check_timeouts(struct kv_poller *p)
{
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

void kv_link_retire_op(struct kv_poller *p, struct kv_op *op)
{
    struct kv_link *l = op->link;
    struct kv_transfer *x = op->transfer;
    kv_list_remove(&op->node);
    kv_list_insert(&l->idle_ops, &op->node);   /* the warmest first */
    l->flying_bytes -= op->bytes;
    l->again_since_ns = 0;
    p->num_flying--;
    if (op->scratch) {
        kv_fault_drop_copy(op->scratch);
        op->scratch = NULL;
    }
    x->in_flight--;
    kv_transfer_settle(p, x);
}

void kv_link_heard(struct kv_poller *p, uint32_t link)
{
    (void)p, (void)link;
}
