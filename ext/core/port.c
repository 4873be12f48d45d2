#include "port.h"
#include "poller.h"
#include <stdlib.h>

struct kv_port *kv_port_new(struct kv_nic *nic, const uint64_t *keys)
{
    uint32_t num_regions = nic->domain.num_registered;
    struct kv_port *o = calloc(1, sizeof *o + num_regions * (sizeof *o->regions + sizeof *o->keys));
    if (!o)
        return NULL;
    kv_list_init(&o->in_poller);
    o->nic = nic;
    o->keys = (void *)(o->regions + num_regions);
    for (uint32_t i = 0; i < nic->domain.num_sources; i++) {
        const struct kv_region *r = &nic->domain.sources[i];
        if (!r->mr)
            continue;
        o->regions[o->num_regions] = (struct kv_region){.address = r->address, .bytes = r->bytes};
        o->keys[o->num_regions] = keys[o->num_regions];
        o->num_regions++;
    }
    return o;
}

/* A domain of its own, with the same sources. */
static int open_domain(struct kv_poller *p, struct kv_port *o)
{
    const char *call;
    struct kv_domain *d = malloc(sizeof *d);
    if (!d)
        return -FI_ENOMEM;
    const struct kv_domain *shared = &o->nic->domain;
    int rc = kv_domain_open(d, &o->nic->fabric, &call);
    if (rc) {
        free(d);
        return rc;
    }
    d->guard = &p->guard;
    o->domain = d;
    for (uint32_t i = 0; i < shared->num_sources && !rc; i++) {
        const struct kv_region *r = &shared->sources[i];
        rc = kv_domain_add_source(d, r->address, r->bytes, r->mr);
    }
    return rc;
}

int kv_port_open(struct kv_poller *p, struct kv_port *o, enum kv_link_failure *what)
{
    int rc = 0;
    *what = KV_FAILED_OPEN;
    if (o->nic->fabric.shares_locks)
        rc = open_domain(p, o);
    else
        o->domain = &o->nic->domain;
    kv_list_append(&p->ports, &o->in_poller);
    if (o->domain && !o->domain->num_ports++)
        kv_list_append(&p->domains, &o->domain->in_poller);
    if (!rc)
        rc = kv_endpoint_open(o->domain, &o->endpoint);
    for (uint32_t i = 0; i < o->num_regions && !rc; i++) {
        *what = KV_FAILED_REGISTER;
        rc = kv_region_open(o->domain, &o->regions[i], FI_REMOTE_WRITE, o->keys[i]);
        if (!rc)
            o->keys[i] = fi_mr_key(o->regions[i].mr);   /* ours, unless the provider makes them */
    }
    return rc;
}

int kv_port_cut_off(struct kv_port *o)
{
    uint32_t num = 0;
    int rc = o->domain ? kv_endpoint_cut_off(o->domain->fabric, &o->endpoint, &num) : 0;
    o->cut_off = true;
    if (num)
        kv_domain_read_on(o->domain, num + 1);
    return rc;
}

int kv_port_close(struct kv_port *o)
{
    struct kv_domain *d = o->domain;
    int rc = d ? kv_endpoint_close(d, &o->endpoint) : 0;
    for (uint32_t i = 0; i < o->num_regions && !rc; i++)
        kv_region_close(d, &o->regions[i]);   /* if it does not, it is a leak: nothing can come in to it */
    o->closed = !rc;
    if (d && !rc)
        kv_domain_read_on(d, 1);
    return rc;
}

void kv_port_free(struct kv_port *o)
{
    struct kv_domain *d = o->domain;
    if (d && !--d->num_ports) {
        kv_list_remove(&d->in_poller);
        if (d->guard) {
            kv_domain_close(d);
            free(d);
        }
    }
    kv_list_remove(&o->in_poller);
    free(o);
}
