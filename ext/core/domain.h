/* What we open of libfabric: one domain with its completion queue, endpoints and registrations in it.
   One code path for every provider; differences come from what fi_getinfo returned. */
#ifndef KV_DOMAIN_H
#define KV_DOMAIN_H
#include "error.h"
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

struct kv_domain {
    struct fi_info *info;
    struct fid_fabric *fabric;
    struct fid_domain *domain;
    struct fid_cq *cq;
    bool virtual_addresses;   /* a peer names our bytes by address, else by offset */
    bool provider_keys;
};

struct kv_region {
    char *address;
    uint64_t bytes;
    struct fid_mr *mr;
    void *desc;
};

/* An address vector of its own: efa before 2.2 takes one endpoint on each, shm holds 256 addresses in each, and
   closing it with its endpoint spares us fi_av_remove, which crashes shm with operations outstanding. */
struct kv_endpoint {
    struct fid_ep *ep;
    struct fid_av *av;
    size_t name_bytes;
    uint8_t name[KV_NAME_BYTES];
};

/* The RDM providers that take our hints, best first as libfabric ranks them. Returns their number; frees nothing. */
bool kv_providers(char names[][64], size_t capacity, size_t *num, struct kv_error *e);

bool kv_domain_open(struct kv_domain *d, const char *provider, const char *node, size_t cq_entries, struct kv_error *e);
void kv_domain_close(struct kv_domain *d);
static inline const char *kv_domain_provider(const struct kv_domain *d) { return d->info->fabric_attr->prov_name; }

/* Registers; `access` FI_WRITE for a source, FI_REMOTE_WRITE for a destination. Returns 0 or -errno. */
int kv_region_open(struct kv_domain *d, struct kv_region *r, uint64_t access, uint64_t key);
int kv_region_close(struct kv_region *r);

int kv_endpoint_open(struct kv_domain *d, struct kv_endpoint *n);
int kv_endpoint_close(struct kv_endpoint *n);   /* after it nothing lands through the endpoint and it reads nothing */
int kv_endpoint_connect(struct kv_endpoint *n, const void *name, fi_addr_t *address);

/* Two endpoints of this domain write to each other the way production does. Before the poller's thread runs. */
bool kv_domain_self_test(struct kv_domain *d, struct kv_error *e);
#endif
