/* The start-up self-test: a provider that cannot do this is refused by name before any request depends on it. */
#include "clock.h"
#include "domain.h"
#include <stdlib.h>
#include <string.h>

#define PAGE_BYTES (16u << 10)
#define DEADLINE_NS (5 * KV_S)
#define SOURCE_KEY 0x7e57000000000001ull
#define TARGET_KEY 0x7e57000000000002ull

struct rig {
    struct kv_domain *domain;
    struct kv_endpoint from, to;
    struct kv_region source, target;
    fi_addr_t address;
    struct fi_context2 context;   /* of the one write; outlives it even when the test gives up */
    uint64_t deadline_ns;
    struct kv_error *error;
};

static bool fail(struct rig *t, const char *call, int code, const char *seen)
{
    return kv_error_call(t->error, KV_NATIVE, call, code, "provider %s fails the self-test in %s: %s",
                         kv_fabric_provider(t->domain->fabric), call, seen);
}

static bool set_up(struct rig *t)
{
    int rc = kv_endpoint_open(t->domain, &t->from);
    if (!rc)
        rc = kv_endpoint_open(t->domain, &t->to);
    if (rc)
        return fail(t, "fi_endpoint", -rc, fi_strerror(-rc));
    rc = kv_region_open(t->domain, &t->source, FI_WRITE, SOURCE_KEY);
    if (!rc)
        rc = kv_region_open(t->domain, &t->target, FI_REMOTE_WRITE, TARGET_KEY);
    if (rc)
        return fail(t, "fi_mr_reg", -rc, fi_strerror(-rc));
    fi_addr_t back;   /* some providers must know the writer before it writes */
    rc = kv_endpoint_connect(t->domain, &t->from, t->to.name, &t->address);
    if (!rc)
        rc = kv_endpoint_connect(t->domain, &t->to, t->from.name, &back);
    return !rc || fail(t, "fi_av_insert", -rc, fi_strerror(-rc));
}

/* Reads the queue once; sets what has come. */
static bool poll_once(struct rig *t, uint32_t imm, bool *completed, bool *landed)
{
    struct fi_cq_data_entry entry[8];
    ssize_t num = fi_cq_read(t->domain->cq, entry, 8);
    for (ssize_t i = 0; i < num; i++) {
        if (!(entry[i].flags & FI_REMOTE_CQ_DATA))
            *completed |= entry[i].op_context == &t->context;
        else if (entry[i].data == imm)
            *landed = true;
        else
            return fail(t, "fi_cq_read", FI_EIO, "the immediate that arrived is not the one that was sent");
    }
    if (num >= 0 || num == -FI_EAGAIN)
        return true;
    struct fi_cq_err_entry error = {0};
    if (num == -FI_EAVAIL && fi_cq_readerr(t->domain->cq, &error, 0) == 1)
        num = -error.err;
    return fail(t, "fi_cq_read", (int)-num, fi_strerror((int)-num));
}

static bool write_once(struct rig *t, size_t bytes, uint32_t imm)
{
    memset(t->target.address, 0, PAGE_BYTES);
    for (size_t i = 0; i < PAGE_BYTES; i++)
        t->source.address[i] = (char)(1 + (i * 37 + imm) % 255);
    uint64_t base = t->domain->fabric->virtual_addresses ? (uint64_t)(uintptr_t)t->target.address : 0;
    uint64_t key = fi_mr_key(t->target.mr);
    bool posted = false, completed = false, landed = false;
    while (!completed || !landed) {
        if (!posted) {
            ssize_t rc = fi_writedata(t->from.ep, t->source.address, bytes, t->source.desc, imm, t->address, base, key,
                                      &t->context);
            if (rc && rc != -FI_EAGAIN)
                return fail(t, "fi_writedata", (int)-rc, fi_strerror((int)-rc));
            posted = !rc;
        }
        bool before = landed;
        if (!poll_once(t, imm, &completed, &landed))
            return false;
        if (landed && !before && memcmp(t->source.address, t->target.address, bytes))
            return fail(t, "fi_writedata", FI_EIO, "the immediate was counted before the data was complete");
        if (kv_now_ns() > t->deadline_ns)
            return fail(t, posted ? "fi_cq_read" : "fi_writedata", FI_ETIMEDOUT, "no write with immediate in 5 s");
    }
    return true;
}

static bool run(struct rig *t)
{
    static const size_t sizes[] = {1, PAGE_BYTES};
    static const uint32_t imms[] = {0x1, 0x89abcdef, 0xffffffff};
    bool ok = set_up(t);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (size_t i = 0; i < sizeof imms / sizeof *imms; i++)
            ok = ok && write_once(t, sizes[s], imms[i]);
    int rc = kv_endpoint_close(t->domain, &t->from);
    if (!rc)
        rc = kv_endpoint_close(t->domain, &t->to);
    kv_region_close(t->domain, &t->source);
    kv_region_close(t->domain, &t->target);
    return ok && (!rc || fail(t, "fi_close", -rc, fi_strerror(-rc)));
}

bool kv_fabric_self_test(const struct kv_fabric *f, struct kv_error *e)
{
    struct kv_domain domain;
    const char *call;
    int rc = kv_domain_open(&domain, f, &call);
    if (rc)
        return kv_error_call(e, KV_NATIVE, call, -rc, "provider %s fails the self-test in %s: %s",
                             kv_fabric_provider(f), call, fi_strerror(-rc));
    char *memory = aligned_alloc(4096, 2 * PAGE_BYTES);
    struct rig t = {
        .domain = &domain, .error = e, .deadline_ns = kv_now_ns() + DEADLINE_NS,
        .source = {.address = memory, .bytes = PAGE_BYTES},
        .target = {.address = memory + PAGE_BYTES, .bytes = PAGE_BYTES},
    };
    bool ok = memory ? run(&t) : kv_error_memory(e);
    kv_domain_close(&domain);
    free(memory);
    return ok;
}
