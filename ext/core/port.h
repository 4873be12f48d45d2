/* A network interface, and its ports. A port is an endpoint with the regions of its interface registered for what lands
   through it. Each link has one of its own; or all links of an interface share one, which is exchanged for another
   (rotate.c) when a peer has to be shut out. */
#ifndef KV_PORT_H
#define KV_PORT_H
#include "domain.h"
#include "records.h"

struct kv_poller;
struct kv_link;

struct kv_port;

struct kv_nic {
    struct kv_fabric fabric;
    struct kv_domain domain;      /* of all its ports, unless each has its own; with the sources either way */
    struct kv_port *port;         /* that its links share and new ones get; NULL: the next one opens it */
    bool again;                   /* an earlier one has the same address */
};

struct kv_port {
    struct kv_node in_poller;     /* of the poller's ports */
    struct kv_nic *nic;
    struct kv_link *owner;        /* NULL: all links share it */
    uint32_t number;              /* of a shared one, from 1 up; the same on every interface */
    struct kv_domain *domain;     /* its own where the provider shares locks, else its nic's; NULL: not opened */
    struct kv_endpoint endpoint;
    bool closing, unclosable;     /* the latter: its endpoint would not close, and that has been reported */
    bool cut_off;                 /* its half-made connections are; libfabric sees it when the queue is read */
    bool closed, over;            /* its endpoint is; and what had landed by then has been counted */
    uint64_t closing_since_ns;
    uint32_t num_regions;
    uint64_t *keys;
    struct kv_region regions[];   /* registered for remote write, under `keys` */
};

/* Callers' side: for all regions that are registered on nic, a key each. NULL without memory. */
struct kv_port *kv_port_new(struct kv_nic *nic, const uint64_t *keys);

/* Poller's side. Returns 0 or -errno and what it was about. */
int kv_port_open(struct kv_poller *p, struct kv_port *o, enum kv_link_failure *what);
/* Before it is closed, and then its queue is to be read to the end (half_made.c). Returns 0 or -errno. */
int kv_port_cut_off(struct kv_port *o);
/* Nothing lands through it any more; what has landed is in the completion queue. Returns 0 or -errno: no fence. */
int kv_port_close(struct kv_port *o);
void kv_port_free(struct kv_port *o);   /* and its domain */

static inline bool kv_port_abandoned(const struct kv_port *o) { return o->domain && o->domain->abandoned; }
#endif
