/* Rotation: all links of a network interface share a port, and when a peer has to be shut out another one is opened
   beside it, on every interface. The peers that live are told to write there, our own sending moves by itself, and then
   the first ports are closed (closing.c). */
#include "poller.h"
#include <stdlib.h>
#include <string.h>

static uint32_t current_number(const struct kv_poller *p)
{
    for (uint32_t i = 0; i < p->num_nics; i++)
        if (p->nics[i].port)
            return p->nics[i].port->number;
    return 0;
}

void kv_port_note(struct kv_poller *p)
{
    uint32_t older = 0;
    KV_EACH(node, &p->ports) {
        struct kv_port *o = KV_OF(node, struct kv_port, in_poller);
        if (!o->owner && !o->over && o != o->nic->port)
            older = o->number;
    }
    atomic_store(&p->port_current, current_number(p));
    atomic_store(&p->port_older, older);
}

void kv_port_share(struct kv_poller *p, struct kv_port *o, uint32_t number)
{
    if (!number)
        number = current_number(p);
    o->owner = NULL;
    o->number = number ? number : ++p->ports_made;
    o->nic->port = o;
    kv_port_note(p);
}

/* Where its peer is to write to is o from now on; its own writes follow when none is in flight. */
static void move(struct kv_poller *p, struct kv_link *l, struct kv_port *o)
{
    struct kv_domain *from = kv_link_landing(l);
    struct kv_region cell = {.address = l->cell.region.address, .bytes = l->cell.region.bytes};
    int rc = kv_link_connected(l) ? kv_link_find_targets(l, o) : 0;
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

static int open_ports(struct kv_poller *p, struct kv_port **ports, enum kv_link_failure *what)
{
    int rc = 0;
    for (uint32_t i = 0; i < p->num_nics && !rc; i++)
        rc = kv_port_open(p, ports[i], what);
    for (uint32_t i = 0; i < p->num_nics && rc; i++) {   /* all of them, or none */
        kv_port_close(ports[i]);
        kv_port_free(ports[i]);
    }
    return rc;
}

static void rotate(struct kv_poller *p, struct kv_port **ports)
{
    uint32_t number = ++p->ports_made;
    for (uint32_t i = 0; i < p->num_nics; i++)
        kv_port_share(p, ports[i], number);
    atomic_store(&p->rotating, false);
    for (uint32_t slot = 0; slot < KV_MAX_LINKS; slot++) {
        struct kv_link *l = p->links[slot];
        if (l && !l->failed && !l->closing && l->opened)
            move(p, l, l->nic->port);
    }
    for (uint32_t i = 0; i < p->num_nics; i++)
        ports[i]->domain->lease_until_ns = 0;   /* looked up before the first read */
    p->young_until_ns = kv_look(p) + 2 * KV_S;
    kv_report(p, KV_PORT_OPENED, number, 0, 0);
}

void kv_rotate(struct kv_poller *p, struct kv_port **ports)
{
    enum kv_link_failure what;
    int rc = open_ports(p, ports, &what);
    if (rc) {
        atomic_store(&p->rotating, false);
        kv_report(p, KV_PORT_FAILED, 0, (uint64_t)-rc, what);
    } else {
        rotate(p, ports);
    }
    free(ports);
}

void kv_link_settle(struct kv_poller *p, struct kv_link *l)
{
    if (kv_link_connected(l) && (l->moving || l->retarget))   /* before it is, a caller may be filling them in */
        for (uint32_t i = 0; i < l->num_targets; i++)
            l->targets[i].address = l->targets[i].next_address;
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
    for (uint32_t i = 0; i < l->num_targets; i++)
        memcpy(l->targets[i].name, to->names[i], sizeof l->targets[i].name);
    int rc = kv_link_find_targets(l, l->port);
    if (rc) {
        kv_link_fail(p, l, -rc, KV_FAILED_CONNECT);
        free(to);
        return;
    }
    kv_beat_to(p, l, to->cells);
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
