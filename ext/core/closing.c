/* The end of ports and links. Closing a port is a fence: it is over when its endpoint is closed and the completion
   queue has been read to its end. Then nothing can land through it, and nothing of ours is read any more. */
#include "poller.h"

/* Connections that are just being made are best completed first, so we poll on for a while; a peer that has been heard
   has none. What is still half made after that is cut off (half_made.c). */
#define LINGER_NS (2 * KV_MS)
#define CONNECT_LINGER_NS (20 * KV_MS)
/* Its shm is worse: who reads a connection request of an endpoint that has gone meanwhile follows a null pointer. A peer
   that was heard reads its queue, and ours was in it; one that was not gets time to, if it runs. So does an endpoint
   that has not taken a first write yet: our request may be in its queue. */
#define YOUNG_NS (100 * KV_MS)

static uint64_t safe_on_shm_ns(const struct kv_link *l)
{
    uint64_t at_ns = l->heard_ns ? l->heard_ns + LINGER_NS : l->connected_ns ? l->connected_ns + YOUNG_NS : 0;
    for (uint32_t i = 0; i < l->num_targets; i++) {
        uint64_t refused_ns = l->targets[i].refused_ns, young_ns = refused_ns ? refused_ns + YOUNG_NS : 0;
        at_ns = young_ns > at_ns ? young_ns : at_ns;
    }
    return at_ns;
}

static uint64_t safe_to_close_ns(const struct kv_port *o)
{
    const struct kv_link *l = o->owner;
    if (kv_port_abandoned(o))
        return 0;
    if (l && o->nic->fabric.shares_locks)
        return safe_on_shm_ns(l);
    if (l && l->heard_ns)
        return l->heard_ns + LINGER_NS;
    return o->closing_since_ns + (l && kv_link_connected(l) ? CONNECT_LINGER_NS : LINGER_NS);
}

/* Operations that were posted through o will not complete: a closed shm endpoint reports nothing. */
static void reclaim(struct kv_poller *p, struct kv_link *l, const struct kv_port *o)
{
    uint32_t before = l->flying_writes;
    KV_EACH(node, &l->flying_ops) {
        struct kv_op *op = KV_OF(node, struct kv_op, node);
        if (op->port == o)
            kv_link_retire_op(p, op);
    }
    if (l->flying_writes != before && !l->closing)
        kv_link_fail(p, l, FI_ECANCELED, KV_FAILED_COMPLETION);   /* whether they landed is not known */
}

/* ---- links ---- */
static bool may_end(const struct kv_link *l)
{
    const struct kv_port *told = l->told;
    bool shut_out = !told || told->over || (kv_port_abandoned(told) && !told->owner);   /* its own goes with it */
    return l->closing && kv_list_empty(&l->flying_ops) && (shut_out || !l->needs_fence);
}

static void end_link(struct kv_poller *p, struct kv_link *l)
{
    uint32_t slot = kv_link_slot(l->id);
    struct kv_port *port = l->port;
    if (port->domain)
        kv_region_close(port->domain, &l->cell.region);
    kv_region_close(l->cell.old_domain, &l->cell.old_region);   /* of a port that may be open for others */
    kv_report(p, KV_LINK_CLOSED, l->id, 0, 0);
    kv_link_free(l);
    p->links[slot] = NULL;
    atomic_store_explicit(&p->link_slot_busy[slot], false, memory_order_release);
}

/* Nothing refers to it any more, but for the old registrations of cells. */
static bool unused(struct kv_poller *p, const struct kv_port *o)
{
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++)
        if (p->links[slot] && (p->links[slot]->port == o || p->links[slot]->told == o))
            return false;
    return true;
}

/* Those that may, and the shared ports that only they referred to. */
static void end_links(struct kv_poller *p)
{
    p->ends_due = false;
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++)
        if (p->links[slot] && may_end(p->links[slot]))
            end_link(p, p->links[slot]);
    KV_EACH(node, &p->ports) {
        struct kv_port *o = KV_OF(node, struct kv_port, in_poller);
        if (o->over && !o->owner && unused(p, o))
            kv_port_free(o);
    }
}

void kv_link_close(struct kv_poller *p, struct kv_link *l, bool fence)
{
    struct kv_port *port = l->port;
    if (l->closing)
        return;
    l->closing = true;
    l->needs_fence = fence || port->owner;
    kv_cell_withdraw(&l->cell);
    kv_link_stop_all(p, l);
    if (kv_port_abandoned(port))
        reclaim(p, l, port);
    if (port->owner) {
        l->told = port;
        kv_port_begin_closing(p, port);
    }
    end_links(p);
}

/* ---- ports ---- */
void kv_port_begin_closing(struct kv_poller *p, struct kv_port *o)
{
    if (o->closing)
        return;
    o->closing = true;
    o->closing_since_ns = kv_look(p);
    p->num_closing++;
    if (o->nic->port == o) {
        o->nic->port = NULL;   /* the next link opens another */
        kv_port_note(p);
    }
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++) {
        struct kv_link *l = p->links[slot];
        if (l && l->port == o && !l->closing)
            kv_link_fail(p, l, FI_ECANCELED, KV_FAILED_COMPLETION);   /* it has no other */
    }
    kv_go_on_closing(p);
}

static bool unread(const struct kv_port *o) { return o->domain && o->domain->unread; }

static void close_endpoint(struct kv_poller *p, struct kv_port *o)
{
    int rc = o->cut_off ? 0 : kv_port_cut_off(o);
    if (!rc && unread(o))
        return;   /* libfabric has yet to see what was cut off */
    if (!rc)
        rc = kv_port_close(o);
    if (!rc)
        return;
    kv_count(&p->stats.errors, 1);   /* no fence: it is never reported closed */
    if (o->owner)
        kv_report(p, KV_LINK_FAILED, o->owner->id, (uint64_t)-rc, KV_FAILED_CLOSE);
    else
        kv_report(p, KV_PORT_FAILED, o->number, (uint64_t)-rc, KV_FAILED_CLOSE);
    o->unclosable = true;
    p->num_unclosable++;
    p->num_closing--;
}

/* A port of this number has yet to end, on any interface. */
static bool number_lives(struct kv_poller *p, uint32_t number)
{
    KV_EACH(node, &p->ports) {
        const struct kv_port *o = KV_OF(node, struct kv_port, in_poller);
        if (!o->owner && o->number == number && !o->over)
            return true;
    }
    return false;
}

static void finish(struct kv_poller *p, struct kv_port *o)
{
    o->over = true;
    p->num_closing--;
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++) {
        struct kv_link *l = p->links[slot];
        if (!l)
            continue;
        reclaim(p, l, o);
        if (l->cell.old_domain == o->domain)
            kv_region_close(o->domain, &l->cell.old_region);
        if (l->sending == o)
            l->sending = l->port;
    }
    if (!o->owner) {
        kv_port_note(p);
        if (!number_lives(p, o->number))
            kv_report(p, KV_PORT_CLOSED, o->number, 0, 0);
    }
}

/* A peer that lives takes what was posted to it, and then its link sends through the newer port. One that does not is
   given up when its lease is over. */
static bool still_sends(struct kv_poller *p, const struct kv_port *o)
{
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++) {
        const struct kv_link *l = p->links[slot];
        if (l && l->moving && l->sending == o && !l->closing && !l->failed)
            return true;
    }
    return false;
}

void kv_go_on_closing(struct kv_poller *p)
{
    kv_look(p);
    KV_EACH(node, &p->ports) {
        struct kv_port *o = KV_OF(node, struct kv_port, in_poller);
        if (!o->closing || o->unclosable || o->over)
            continue;
        if (!o->closed && p->now_ns >= safe_to_close_ns(o) && !still_sends(p, o))
            close_endpoint(p, o);
        if (o->closed && !unread(o))
            finish(p, o);
    }
    end_links(p);
}
