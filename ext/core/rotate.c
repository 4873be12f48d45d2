/* Rotation: all links share a port, and when a peer has to be shut out another one is opened beside it. The peers that
   live are told to write there, our own sending moves by itself, and then the first port is closed (closing.c). */
#include "poller.h"
#include <stdlib.h>
#include <string.h>

void kv_port_note(struct kv_poller *p)
{
    uint32_t older = 0;
    KV_EACH(node, &p->ports) {
        struct kv_port *o = KV_OF(node, struct kv_port, in_poller);
        if (!o->owner && !o->over && o != p->port)
            older = o->number;
    }
    atomic_store(&p->port_current, p->port ? p->port->number : 0);
    atomic_store(&p->port_older, older);
}

void kv_port_share(struct kv_poller *p, struct kv_port *o)
{
    o->owner = NULL;
    o->number = ++p->ports_made;
    p->port = o;
    kv_port_note(p);
}

/* Where its peer is to write to is o from now on; its own writes follow when none is in flight. */
static void move(struct kv_poller *p, struct kv_link *l, struct kv_port *o)
{
    struct kv_domain *from = kv_link_landing(l);
    bool connected = l->lease_until_ns != UINT64_MAX;
    struct kv_region cell = {.address = l->cell.region.address, .bytes = l->cell.region.bytes};
    int rc = connected ? kv_endpoint_connect(o->domain, &o->endpoint, l->remote_name, &l->next_address) : 0;
    if (!rc && o->domain != from) {
        rc = kv_region_open(o->domain, &cell, FI_REMOTE_WRITE, l->cell.key);
        if (!rc) {
            l->cell.old_region = l->cell.region;
            l->cell.old_domain = from;
            l->cell.region = cell;
        }
    }
    if (rc) {
        kv_link_fail(p, l, -rc, KV_FAILED_CONNECT);
        return;
    }
    l->port = o;
    l->moving = true;
    if (!l->flying_writes)
        kv_link_settle(p, l);
}

void kv_rotate(struct kv_poller *p, struct kv_port *o)
{
    enum kv_link_failure what;
    int rc = kv_port_open(p, o, &what);
    if (rc) {
        kv_port_close(o);
        kv_port_free(o);
        atomic_store(&p->rotating, false);
        kv_report(p, KV_PORT_FAILED, 0, (uint64_t)-rc, what);
        return;
    }
    kv_port_share(p, o);
    atomic_store(&p->rotating, false);
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++) {
        struct kv_link *l = p->links[slot];
        if (l && !l->failed && !l->closing && l->opened)
            move(p, l, o);
    }
    o->domain->lease_until_ns = 0;   /* looked up before the first read */
    p->young_until_ns = kv_look(p) + 2 * KV_S;
    kv_report(p, KV_PORT_OPENED, o->number, 0, 0);
}

void kv_link_settle(struct kv_poller *p, struct kv_link *l)
{
    if (l->moving || l->retarget)
        l->address = l->next_address;
    if (l->moving) {
        l->sending = l->port;
        l->moving = false;
    }
    if (l->retarget) {
        for (uint32_t i = 0; i < l->num_remote_regions; i++)
            l->remote_regions[i].key = l->retarget->keys[i];
        free(l->retarget);
        l->retarget = NULL;
        kv_report(p, KV_LINK_HELD, l->id, 0, 0);
    }
}

void kv_link_retarget(struct kv_poller *p, struct kv_link *l, struct kv_retarget *to)
{
    struct kv_port *port = l->port;
    int rc = kv_endpoint_connect(port->domain, &port->endpoint, to->name, &l->next_address);
    if (rc) {
        kv_link_fail(p, l, -rc, KV_FAILED_CONNECT);
        free(to);
        return;
    }
    memcpy(l->remote_name, to->name, sizeof l->remote_name);
    kv_beat_to(p, l, &to->cell);
    free(l->retarget);   /* it has rotated again meanwhile */
    l->retarget = to;
    l->held = true;
    p->young_until_ns = kv_look(p) + 2 * KV_S;
    if (!l->flying_writes)
        kv_link_settle(p, l);
}

void kv_link_resume(struct kv_link *l)
{
    l->held = false;
}
