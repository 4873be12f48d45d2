/* A link: one endpoint of ours paired with one of a peer, with its own registrations and its own keys.

   Callers make it (front.c) and hand it to the poller's thread, which opens, connects and closes it. What a caller may
   read of it is written before `opened` is set; what the poller reads of a connect, before that command is pushed. */
#ifndef KV_LINK_H
#define KV_LINK_H
#include "domain.h"
#include "list.h"
#include "records.h"
#include "transfer.h"

#define KV_LINK_SLOT_BITS 10
#define KV_MAX_LINKS (1u << KV_LINK_SLOT_BITS)   /* open at a time */

struct kv_op {
    struct fi_context2 context;   /* first: a completion gives it back */
    struct kv_node node;          /* of the link's ops in flight, oldest first, or of its idle ones */
    struct kv_link *link;
    struct kv_transfer *transfer;
    struct kv_region *scratch;    /* of a write that an injected fault corrupted */
    uint64_t posted_ns;
    uint32_t bytes;
};

struct kv_remote_region { uint64_t base, bytes, key; };

struct kv_link {
    uint32_t id;                  /* number << KV_LINK_SLOT_BITS | slot: never the same twice */
    _Atomic bool opened;
    bool connected;               /* callers' side: connect was asked for */
    bool failed;                  /* poller's side: nothing more is posted */
    bool closing, closed;         /* it ends; its endpoint is gone */
    bool established;             /* an operation has completed */
    uint64_t close_at_ns;

    struct kv_endpoint endpoint;
    uint32_t num_regions;
    struct kv_region *regions;    /* registered for remote write, under `keys` */
    uint64_t *keys;

    uint8_t remote_name[KV_NAME_BYTES];
    uint32_t num_remote_regions;
    struct kv_remote_region *remote_regions;
    fi_addr_t address;

    uint32_t window;              /* operations the receiver granted */
    struct kv_op *ops;
    struct kv_node idle_ops, flying_ops;
    uint64_t flying_bytes;
    uint64_t again_since_ns;      /* the provider has refused since then; 0: it has not */

    struct kv_node in_active;     /* of the poller's active links, while its queue has something */
    struct kv_node transfers, queue;
    int64_t credit;
};

static inline uint32_t kv_link_slot(uint32_t id) { return id & (KV_MAX_LINKS - 1); }

struct kv_link *kv_link_new(uint32_t id, const struct kv_region *regions, const uint64_t *keys, uint32_t num_regions);
bool kv_link_set_remote(struct kv_link *l, const void *name, size_t name_bytes, const struct kv_remote_region *regions,
                        uint32_t num_regions, uint32_t window, struct kv_error *e);
void kv_link_free(struct kv_link *l);

/* The rest is the poller's thread's. */
struct kv_link *kv_link_find(struct kv_poller *p, uint32_t id);   /* NULL: closed */
void kv_link_open(struct kv_poller *p, struct kv_link *l);
void kv_link_connect(struct kv_poller *p, struct kv_link *l);
void kv_link_fail(struct kv_poller *p, struct kv_link *l, int error, enum kv_link_failure what);
/* Stops everything on it. It ends when its endpoint is closed and the completion queue has been read to its end. */
void kv_link_close(struct kv_poller *p, struct kv_link *l);
/* After each read of the completion queue while something closes; `emptied`: it gave fewer entries than asked. */
void kv_link_go_on_closing(struct kv_poller *p, bool emptied);
void kv_link_stop_tag(struct kv_poller *p, struct kv_link *l, uint32_t tag);
void kv_link_check_timeouts(struct kv_poller *p);
/* A heartbeat of its peer has landed. */
void kv_link_heard(struct kv_poller *p, uint32_t link);
/* An operation has come back, by completion, by injected drop, or by the close of its endpoint. */
void kv_link_retire_op(struct kv_poller *p, struct kv_op *op);
#endif
