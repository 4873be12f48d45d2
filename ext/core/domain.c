#include "domain.h"
#include "census.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* ---- before libfabric is touched ---- */
static void set_environment(void)
{
    setenv("FI_SHM_DISABLE_CMA", "1", 0);         /* with CMA a frozen target reads pages after they were given up */
    setenv("FI_OFI_RXM_BUFFER_SIZE", "512", 0);   /* its defaults cost 70 MiB an endpoint */
    setenv("FI_OFI_RXM_MSG_RX_SIZE", "64", 0);
}
static pthread_once_t environment_once = PTHREAD_ONCE_INIT;

/* ---- providers ---- */
static const char *const refused[][2] = {
    {"sockets", "it takes milliseconds a write and is unmaintained"},
    {"udp;ofi_rxd", "it loses completions under load and after errors"},
};

static const char *why_refused(const char *provider)
{
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++)
        if (!strcmp(provider, refused[i][0]))
            return refused[i][1];
    return NULL;
}

/* FI_MR_ENDPOINT is not offered: source memory is registered once, not once an endpoint. */
static struct fi_info *make_hints(const char *provider)
{
    struct fi_info *h = fi_allocinfo();
    if (!h)
        return NULL;
    h->caps = FI_MSG | FI_RMA;
    h->mode = FI_CONTEXT | FI_CONTEXT2;
    h->ep_attr->type = FI_EP_RDM;
    h->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    h->domain_attr->threading = FI_THREAD_DOMAIN;
    h->domain_attr->resource_mgmt = FI_RM_ENABLED;
    h->domain_attr->cq_data_size = 4;
    if (provider)
        h->fabric_attr->prov_name = strdup(provider);
    return h;
}

bool kv_providers(char names[][64], size_t capacity, size_t *num, struct kv_error *e)
{
    pthread_once(&environment_once, set_environment);
    *num = 0;
    struct fi_info *hints = make_hints(NULL), *list = NULL;
    if (!hints)
        return kv_error_memory(e);
    int rc = fi_getinfo(KV_FI_VERSION, NULL, NULL, 0, hints, &list);
    fi_freeinfo(hints);
    if (rc && rc != -FI_ENODATA)
        return kv_error_call(e, KV_NATIVE, "fi_getinfo", -rc, "no providers: %s", fi_strerror(-rc));
    for (struct fi_info *i = list; i && *num < capacity; i = i->next) {
        const char *name = i->fabric_attr->prov_name;
        bool seen = why_refused(name) || strlen(name) >= sizeof *names;
        for (size_t k = 0; k < *num && !seen; k++)
            seen = !strcmp(names[k], name);
        if (!seen)
            strcpy(names[(*num)++], name);
    }
    fi_freeinfo(list);
    return true;
}

/* Keeps the first answer of exactly this name: asked for "tcp", libfabric 1.17 offers "tcp;ofi_rxm". */
static int keep_exact(struct fi_info **list, const char *provider)
{
    struct fi_info *i = *list, *exact = NULL;
    while (i && strcmp(i->fabric_attr->prov_name, provider))
        i = i->next;
    if (i)
        exact = fi_dupinfo(i);
    fi_freeinfo(*list);
    *list = exact;
    return !i ? -FI_ENODATA : exact ? 0 : -FI_ENOMEM;
}

/* ---- the domain ---- */
bool kv_domain_open(struct kv_domain *d, const char *provider, const char *node, size_t cq_entries, struct kv_error *e)
{
    pthread_once(&environment_once, set_environment);
    *d = (struct kv_domain){0};
    const char *why = why_refused(provider);
    if (why)
        return kv_error_call(e, KV_NATIVE, "fi_getinfo", FI_EOPNOTSUPP, "provider %s is refused: %s", provider, why);
    struct fi_info *hints = make_hints(provider);
    if (!hints)
        return kv_error_memory(e);
    if (!strncmp(provider, "shm", 3))
        node = NULL;   /* its addresses are names of this machine */
    const char *call = "fi_getinfo";
    int rc = fi_getinfo(KV_FI_VERSION, node, NULL, node ? FI_SOURCE : 0, hints, &d->info);
    fi_freeinfo(hints);
    if (!rc)
        rc = keep_exact(&d->info, provider);
    struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE, .size = cq_entries};
    if (!rc && (call = "fi_fabric", true))
        rc = fi_fabric(d->info->fabric_attr, &d->fabric, NULL);
    if (!rc && (call = "fi_domain", true))
        rc = fi_domain(d->fabric, d->info, &d->domain, NULL);
    if (!rc && (call = "fi_cq_open", true))
        rc = fi_cq_open(d->domain, &cq, &d->cq, NULL);
    if (rc) {
        kv_error_call(e, KV_NATIVE, call, -rc, "%s failed for provider %s on %s: %s", call, provider,
                      node ? node : "this machine", fi_strerror(-rc));
        kv_domain_close(d);
        return false;
    }
    d->virtual_addresses = d->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    d->provider_keys = d->info->domain_attr->mr_mode & FI_MR_PROV_KEY;
    return true;
}

void kv_domain_close(struct kv_domain *d)
{
    if (d->cq)
        fi_close(&d->cq->fid);
    if (d->domain)
        fi_close(&d->domain->fid);
    if (d->fabric)
        fi_close(&d->fabric->fid);
    if (d->info)
        fi_freeinfo(d->info);
    *d = (struct kv_domain){0};
}

/* ---- regions ---- */
int kv_region_open(struct kv_domain *d, struct kv_region *r, uint64_t access, uint64_t key)
{
    int rc = fi_mr_reg(d->domain, r->address, r->bytes, access, 0, key, 0, &r->mr, NULL);
    if (rc)
        return rc;
    r->desc = fi_mr_desc(r->mr);
    kv_live(KV_LIVE_REGIONS, 1);
    return 0;
}

int kv_region_close(struct kv_region *r)
{
    if (!r->mr)
        return 0;
    int rc = fi_close(&r->mr->fid);
    r->mr = NULL;
    kv_live(KV_LIVE_REGIONS, -1);
    return rc;
}

/* ---- endpoints ---- */
int kv_endpoint_open(struct kv_domain *d, struct kv_endpoint *n)
{
    struct fi_av_attr av = {.type = FI_AV_TABLE, .count = 1};
    *n = (struct kv_endpoint){.name_bytes = sizeof n->name};
    int rc = fi_av_open(d->domain, &av, &n->av, NULL);
    if (!rc)
        rc = fi_endpoint(d->domain, d->info, &n->ep, NULL);
    if (!rc)
        kv_live(KV_LIVE_ENDPOINTS, 1);
    if (!rc)
        rc = fi_ep_bind(n->ep, &n->av->fid, 0);
    if (!rc)
        rc = fi_ep_bind(n->ep, &d->cq->fid, FI_TRANSMIT | FI_RECV);
    if (!rc)
        rc = fi_enable(n->ep);
    if (!rc)
        rc = fi_getname(&n->ep->fid, n->name, &n->name_bytes);
    if (rc)
        kv_endpoint_close(n);
    return rc;
}

int kv_endpoint_close(struct kv_endpoint *n)
{
    if (n->ep) {
        int rc = fi_close(&n->ep->fid);
        if (rc)
            return rc;
        n->ep = NULL;
        kv_live(KV_LIVE_ENDPOINTS, -1);
    }
    if (n->av) {
        int rc = fi_close(&n->av->fid);
        if (rc)
            return rc;
        n->av = NULL;
    }
    return 0;
}

int kv_endpoint_connect(struct kv_endpoint *n, const void *name, fi_addr_t *address)
{
    int num = fi_av_insert(n->av, name, 1, address, 0, NULL);
    return num == 1 ? 0 : num < 0 ? num : -FI_EADDRNOTAVAIL;
}
