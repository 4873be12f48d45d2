#include "domain.h"
#include "census.h"
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SOURCE_KEY 0x50c0000000000000ull
#define BEAT_KEY 0xbea7000000000000ull

/* ---- before libfabric is touched ---- */
static void set_environment(void)
{
    setenv("FI_SHM_DISABLE_CMA", "1", 0);           /* with CMA a frozen target reads pages after they were given up */
    setenv("FI_OFI_RXM_BUFFER_SIZE", "512", 0);     /* its defaults cost 70 MiB an endpoint */
    setenv("FI_OFI_RXM_MSG_RX_SIZE", "64", 0);
    setenv("FI_UNIVERSE_SIZE", "64", 0);            /* with its default verbs;ofi_rxm cannot enable an endpoint */
    setenv("FI_EFA_ENABLE_SHM_TRANSFER", "0", 0);   /* its fence and its idle cost would be shm's */
}
static pthread_once_t environment_once = PTHREAD_ONCE_INIT;

/* ---- providers ---- */
static const char *const refused[][2] = {
    {"sockets", "it takes milliseconds a write and is unmaintained"},
    {"udp;ofi_rxd", "it loses completions under load and after errors"},
};

/* Closing tcp;ofi_rxm's endpoints under traffic can crash the process (libfabric 1.17). Of others nothing is known. */
static const char *const fenced[] = {"net", "tcp", "shm", "verbs;ofi_rxm", "efa"};

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

/* ---- the fabric ---- */
bool kv_fabric_open(struct kv_fabric *f, const char *provider, const char *node, uint32_t cq_entries,
                    struct kv_error *e)
{
    pthread_once(&environment_once, set_environment);
    *f = (struct kv_fabric){.cq_entries = cq_entries, .shares_locks = !strcmp(provider, "shm")};
    const char *why = why_refused(provider);
    if (why)
        return kv_error_call(e, KV_NATIVE, "fi_getinfo", FI_EOPNOTSUPP, "provider %s is refused: %s", provider, why);
    struct fi_info *hints = make_hints(provider);
    if (!hints)
        return kv_error_memory(e);
    if (f->shares_locks)
        node = NULL;   /* its addresses are names of this machine */
    const char *call = "fi_getinfo";
    int rc = fi_getinfo(KV_FI_VERSION, node, NULL, node ? FI_SOURCE : 0, hints, &f->info);
    fi_freeinfo(hints);
    if (!rc)
        rc = keep_exact(&f->info, provider);
    if (!rc && (call = "fi_fabric", true))
        rc = fi_fabric(f->info->fabric_attr, &f->fabric, NULL);
    if (rc) {
        kv_error_call(e, KV_NATIVE, call, -rc, "%s failed for provider %s on %s: %s", call, provider,
                      node ? node : "this machine", fi_strerror(-rc));
        kv_fabric_close(f);
        return false;
    }
    if (!strcmp(provider, "net") || !strcmp(provider, "tcp")) {
        f->descriptors = opendir("/proc/self/fd");   /* now, because later the process may have no descriptor left */
        if (!f->descriptors) {
            kv_error_call(e, KV_NATIVE, "opendir", errno, "/proc/self/fd cannot be read (%s); provider %s needs it to "
                          "close an endpoint safely", strerror(errno), provider);
            kv_fabric_close(f);
            return false;
        }
    }
    f->virtual_addresses = f->info->domain_attr->mr_mode & FI_MR_VIRT_ADDR;
    for (size_t i = 0; i < sizeof fenced / sizeof *fenced; i++)
        f->fence_proven |= !strcmp(provider, fenced[i]);
    return true;
}

void kv_fabric_close(struct kv_fabric *f)
{
    if (f->fabric)
        fi_close(&f->fabric->fid);   /* refused while an abandoned domain is in it: then it stays for good too */
    if (f->info)
        fi_freeinfo(f->info);
    if (f->descriptors)
        closedir(f->descriptors);
    *f = (struct kv_fabric){0};
}

/* ---- domains ---- */
/* Makes a call that may spin on a lock of a peer. */
static ssize_t guarded(struct kv_domain *d, ssize_t (*call)(void *), void *with)
{
    if (!d->guard)
        return call(with);
    if (d->abandoned)
        return -KV_STUCK;
    ssize_t rc = kv_guard_call(d->guard, call, with);
    d->abandoned = rc == -KV_STUCK;
    return rc;
}

int kv_domain_open(struct kv_domain *d, const struct kv_fabric *f, const char **call)
{
    static uint64_t beat;   /* nobody looks at what a heartbeat writes */
    struct fi_cq_attr cq = {.format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE, .size = f->cq_entries};
    *d = (struct kv_domain){.fabric = f, .lease_until_ns = UINT64_MAX};
    kv_list_init(&d->in_poller);
    *call = "fi_domain";
    int rc = fi_domain(f->fabric, f->info, &d->domain, NULL);
    if (!rc && (*call = "fi_cq_open", true))
        rc = fi_cq_open(d->domain, &cq, &d->cq, NULL);
    if (!rc && (*call = "fi_mr_reg", true)) {
        d->beat = (struct kv_region){.address = (char *)&beat, .bytes = sizeof beat};
        rc = kv_region_open(d, &d->beat, FI_WRITE, BEAT_KEY);
    }
    if (rc)
        kv_domain_close(d);
    return rc;
}

static ssize_t close_domain(void *domain)
{
    struct kv_domain *d = domain;
    if (d->cq)
        fi_close(&d->cq->fid);
    if (d->domain)
        fi_close(&d->domain->fid);
    return 0;
}

void kv_domain_close(struct kv_domain *d)
{
    for (uint32_t i = 0; i < d->num_sources; i++)
        kv_region_close(d, &d->sources[i]);
    kv_region_close(d, &d->beat);
    guarded(d, close_domain, d);
    free(d->sources);
    *d = (struct kv_domain){0};
}

ssize_t kv_domain_read_error(struct kv_domain *d, struct fi_cq_err_entry *entry)
{
    return d->abandoned ? -KV_STUCK : fi_cq_readerr(d->cq, entry, 0);   /* moves nothing on, so it takes no lock */
}

struct reading { struct fid_cq *cq; struct fi_cq_data_entry *entries; size_t num; };

static ssize_t read_queue(void *reading)
{
    struct reading *r = reading;
    return fi_cq_read(r->cq, r->entries, r->num);
}

ssize_t kv_domain_read(struct kv_domain *d, struct fi_cq_data_entry *entries, size_t num)
{
    return guarded(d, read_queue, &(struct reading){d->cq, entries, num});
}

static ssize_t put(void *with)
{
    const struct kv_put *w = with;
    return fi_writedata(w->ep, w->src, w->bytes, w->desc, w->imm, w->to, w->dst, w->key, w->context);
}

ssize_t kv_domain_put(struct kv_domain *d, const struct kv_put *w)
{
    return guarded(d, put, (void *)w);
}

/* ---- regions ---- */
int kv_region_open(struct kv_domain *d, struct kv_region *r, uint64_t access, uint64_t key)
{
    int rc = d->abandoned ? -KV_STUCK : fi_mr_reg(d->domain, r->address, r->bytes, access, 0, key, 0, &r->mr, NULL);
    if (rc)
        return rc;
    r->desc = fi_mr_desc(r->mr);
    kv_live(KV_LIVE_REGIONS, 1);
    return 0;
}

int kv_region_close(struct kv_domain *d, struct kv_region *r)
{
    if (!r->mr)
        return 0;
    int rc = d->abandoned ? 0 : fi_close(&r->mr->fid);
    r->mr = NULL;
    kv_live(KV_LIVE_REGIONS, -1);
    return rc;
}

int kv_domain_add_source(struct kv_domain *d, char *address, uint64_t bytes, bool registered)
{
    struct kv_region *larger = realloc(d->sources, (d->num_sources + 1) * sizeof *larger);
    if (!larger)
        return -FI_ENOMEM;
    d->sources = larger;
    struct kv_region *r = &larger[d->num_sources];
    *r = (struct kv_region){.address = address, .bytes = bytes};
    int rc = registered ? kv_region_open(d, r, FI_WRITE, SOURCE_KEY + d->num_sources) : 0;
    d->num_sources += !rc;
    d->num_registered += !rc && registered;
    return rc;
}

void kv_domain_drop_source(struct kv_domain *d)
{
    struct kv_region *r = &d->sources[--d->num_sources];
    d->num_registered -= r->mr != NULL;
    kv_region_close(d, r);
}

/* ---- endpoints ---- */
struct opening { struct kv_domain *domain; struct kv_endpoint *endpoint; };

static ssize_t open_endpoint(void *opening)
{
    struct kv_domain *d = ((struct opening *)opening)->domain;
    struct kv_endpoint *n = ((struct opening *)opening)->endpoint;
    struct fi_av_attr av = {.type = FI_AV_TABLE, .count = 1};
    int rc = fi_av_open(d->domain, &av, &n->av, NULL);
    if (!rc)
        rc = fi_endpoint(d->domain, d->fabric->info, &n->ep, NULL);
    if (!rc)
        rc = fi_ep_bind(n->ep, &n->av->fid, 0);
    if (!rc)
        rc = fi_ep_bind(n->ep, &d->cq->fid, FI_TRANSMIT | FI_RECV);
    if (!rc)
        rc = fi_enable(n->ep);
    if (!rc)
        rc = fi_getname(&n->ep->fid, n->name, &n->name_bytes);
    return rc;
}

int kv_endpoint_open(struct kv_domain *d, struct kv_endpoint *n)
{
    *n = (struct kv_endpoint){.name_bytes = sizeof n->name};
    int rc = (int)guarded(d, open_endpoint, &(struct opening){d, n});
    kv_live(KV_LIVE_ENDPOINTS, n->ep != NULL);
    if (rc)
        kv_endpoint_close(d, n);
    return rc;
}

static ssize_t close_endpoint(void *endpoint)
{
    struct kv_endpoint *n = endpoint;
    if (n->ep) {
        int rc = fi_close(&n->ep->fid);
        if (rc)
            return rc;
        n->ep = NULL;
        kv_live(KV_LIVE_ENDPOINTS, -1);
    }
    if (n->av && !fi_close(&n->av->fid))   /* the endpoint is closed, and that is the fence: what is left is a leak */
        n->av = NULL;
    return 0;
}

/* An abandoned endpoint stays mapped for good; its file would stay for ever. */
static void forget_endpoint(struct kv_endpoint *n)
{
    char file[KV_NAME_BYTES];
    if (sscanf((const char *)n->name, "fi_shm://%200s", file + 1) == 1) {   /* pid:uid:number */
        file[0] = '/';
        shm_unlink(file);
    }
    kv_live(KV_LIVE_ENDPOINTS, -(n->ep != NULL));
    *n = (struct kv_endpoint){0};
}

int kv_endpoint_close(struct kv_domain *d, struct kv_endpoint *n)
{
    int rc = (int)guarded(d, close_endpoint, n);
    if (rc != -KV_STUCK)
        return rc;
    forget_endpoint(n);   /* nothing of it is carried out any more: a fence as well */
    return 0;
}

struct connecting { struct fid_av *av; const void *name; fi_addr_t *address; };

static ssize_t insert_address(void *connecting)
{
    struct connecting *c = connecting;
    return fi_av_insert(c->av, c->name, 1, c->address, 0, NULL);
}

int kv_endpoint_connect(struct kv_domain *d, struct kv_endpoint *n, const void *name, fi_addr_t *address)
{
    int num = (int)guarded(d, insert_address, &(struct connecting){n->av, name, address});
    return num == 1 ? 0 : num < 0 ? num : -FI_EADDRNOTAVAIL;
}
