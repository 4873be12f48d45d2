/* What we open of libfabric: a fabric, domains with their completion queues, endpoints and registrations in these.
   One code path for every provider; differences come from what fi_getinfo returned, and from one property of shm: it
   shares spin locks with the peers' processes, so there every endpoint has a domain of its own, calls are guarded
   (guard.h), and a domain in which a call was left is abandoned: nothing of it is ever touched again. */
#ifndef KV_DOMAIN_H
#define KV_DOMAIN_H
#include "error.h"
#include "guard.h"
#include "list.h"
#include <dirent.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <stddef.h>
#include <stdint.h>

#define KV_FI_VERSION FI_VERSION(1, 17)
#define KV_NAME_BYTES 256

struct kv_fabric {
    struct fi_info *info;
    struct fid_fabric *fabric;
    uint32_t cq_entries;
    bool virtual_addresses;   /* a peer names our bytes by address, else by offset */
    bool shares_locks;        /* with peers' processes: a domain an endpoint, and guarded calls */
    DIR *descriptors;         /* of this process; NULL: nothing half made needs to be cut off (half_made.c) */
    bool fence_proven;        /* closing an endpoint under traffic stops what lands, and harms nothing */
};

struct kv_region {
    char *address;
    uint64_t bytes;
    struct fid_mr *mr;
    void *desc;
};

struct kv_domain {
    const struct kv_fabric *fabric;
    struct kv_guard *guard;      /* NULL: calls into it are not guarded */
    struct fid_domain *domain;
    struct fid_cq *cq;
    struct kv_region *sources;   /* what is written from, by index; without a registration: not from here */
    uint32_t num_sources, num_registered;
    struct kv_region beat;       /* what heartbeats are written from */
    struct kv_node in_poller;    /* of the poller's domains, while an endpoint of it is open */
    uint32_t num_ports;
    uint64_t lease_until_ns;     /* no lease of its links ends before */
    unsigned unread;             /* times that the queue has yet to be read to its end, since something was closed */
    bool abandoned, announced;   /* the latter: its links know */
};

/* An address vector of its own: efa before 2.2 takes one endpoint on each, shm holds 256 addresses in each, and
   closing it with its endpoint spares us fi_av_remove, which crashes shm with operations outstanding. */
struct kv_endpoint {
    struct fid_ep *ep;
    struct fid_av *av;
    size_t name_bytes;
    uint8_t name[KV_NAME_BYTES];
};

/* A write with immediate, as fi_writedata takes it. */
struct kv_put {
    struct fid_ep *ep;
    const void *src;
    size_t bytes;
    void *desc;
    uint64_t imm;
    fi_addr_t to;
    uint64_t dst, key;
    void *context;
};

/* The RDM providers that take our hints, best first as libfabric ranks them. */
bool kv_providers(char names[][64], size_t capacity, size_t *num, struct kv_error *e);

bool kv_fabric_open(struct kv_fabric *f, const char *provider, const char *node, uint32_t cq_entries,
                    struct kv_error *e);
void kv_fabric_close(struct kv_fabric *f);
static inline const char *kv_fabric_provider(const struct kv_fabric *f) { return f->info->fabric_attr->prov_name; }

/* The functions below return 0 or -errno; -KV_STUCK once their domain is abandoned. */
int kv_domain_open(struct kv_domain *d, const struct kv_fabric *f, const char **call);
void kv_domain_close(struct kv_domain *d);

/* Its queue is to be read to its end so often. */
static inline void kv_domain_read_on(struct kv_domain *d, unsigned times)
{
    if (!d->abandoned && d->unread < times)
        d->unread = times;
}

/* Registers; `access` FI_WRITE for a source, FI_REMOTE_WRITE for a destination. */
int kv_region_open(struct kv_domain *d, struct kv_region *r, uint64_t access, uint64_t key);
int kv_region_close(struct kv_domain *d, struct kv_region *r);
/* The next index; at most KV_MAX_REGIONS. Without a registration it only takes its place. */
int kv_domain_add_source(struct kv_domain *d, char *address, uint64_t bytes, bool registered);
void kv_domain_drop_source(struct kv_domain *d);   /* the last one */

int kv_endpoint_open(struct kv_domain *d, struct kv_endpoint *n);
/* After it nothing lands through the endpoint and it reads nothing. */
int kv_endpoint_close(struct kv_domain *d, struct kv_endpoint *n);
/* Resets the connections to it that are half made and takes no more. Returns in *num how many, the listener included.
   It must not be closed before libfabric has seen that. The first read that finds the queue's end may only have emptied
   it; each one after that looks at one of them at least. */
int kv_endpoint_cut_off(const struct kv_fabric *f, const struct kv_endpoint *n, uint32_t *num);
int kv_endpoint_connect(struct kv_domain *d, struct kv_endpoint *n, const void *name, fi_addr_t *address);

ssize_t kv_domain_read(struct kv_domain *d, struct fi_cq_data_entry *entries, size_t num);
ssize_t kv_domain_read_error(struct kv_domain *d, struct fi_cq_err_entry *entry);
ssize_t kv_domain_put(struct kv_domain *d, const struct kv_put *put);

/* Two endpoints of a domain of their own write to each other the way production does. On the caller's thread. */
bool kv_fabric_self_test(const struct kv_fabric *f, struct kv_error *e);
#endif
