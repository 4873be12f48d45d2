/* A link: a port of ours paired with endpoints of a peer, its targets.

   Callers make it (front_links.c) and hand it to the poller's thread, which opens, connects and closes it. What a
   caller may read of it is written before `opened` is set; what the poller reads of a connect, before that command is
   pushed. */
#ifndef KV_LINK_H
#define KV_LINK_H
#include "list.h"
#include "port.h"
#include "records.h"
#include "transfer.h"

#define KV_LINK_SLOT_BITS 10
#define KV_CELL_BYTES 8
#define KV_MAX_LINKS (1u << KV_LINK_SLOT_BITS)   /* open at a time */

struct kv_op {
    struct fi_context2 context;   /* first: a completion gives it back */
    struct kv_node node;          /* of the link's ops in flight, oldest first, or of its idle ones */
    struct kv_link *link;
    struct kv_transfer *transfer; /* NULL: a heartbeat */
    struct kv_port *port;         /* it was posted through */
    struct kv_region *scratch;    /* of a write that an injected fault flipped a byte of */
    uint64_t posted_ns;
    uint32_t bytes;
};

struct kv_remote_region { uint64_t base, bytes, key; uint32_t target; };

/* 8 bytes of the poller that a peer's heartbeats are written to. */
struct kv_cell {
    _Atomic uint64_t beats;       /* of a peer in this process, see lease.c */
    struct kv_region region;      /* in the domain of the link's port */
    struct kv_region old_region;  /* in that of the port before, until it is closed */
    struct kv_domain *old_domain;
    uint64_t key;
    struct kv_node in_process;
};

/* Where a peer wants our heartbeats. */
struct kv_remote_cell { uint64_t base, key; uint32_t imm, target; };

/* What a peer tells of itself, or of how it has moved. */
struct kv_remote {
    const struct kv_remote_name { const void *bytes; size_t num_bytes; } *names;   /* of its endpoints */
    const struct kv_remote_region *regions;
    const struct kv_remote_cell *cells;
    uint32_t num_names, num_regions, num_cells;
};

/* An endpoint of a peer. */
struct kv_target {
    fi_addr_t address;            /* for what is sent through the link's `sending` */
    fi_addr_t next_address;       /* likewise through its `port`: for heartbeats, and for all when it has moved */
    uint64_t refused_ns;          /* the provider has taken nothing for it since then; 0: it took the last one */
    uint8_t name[KV_NAME_BYTES];
};

/* The heartbeats to one endpoint. */
struct kv_beat {
    struct kv_op op;
    struct kv_remote_cell cell;
    uint64_t due_ns;
    bool flying;
    bool in_process;              /* of shm: the peer is in this process */
};

/* The targets' new names, their regions' new keys, and where heartbeats go. */
struct kv_retarget {
    uint64_t *keys;
    struct kv_remote_cell *cells;
    uint8_t names[][KV_NAME_BYTES];
};

struct kv_link {
    uint32_t id;                  /* number << KV_LINK_SLOT_BITS | slot: never the same twice in a messenger; its
                                     pollers take turns at the numbers */
    _Atomic bool opened;
    bool connected;               /* callers' side: connect was asked for */
    bool failed;                  /* poller's side: nothing more is posted */
    bool closing, needs_fence;    /* it ends; not before what its peer may write to is closed */

    struct kv_nic *nic;
    struct kv_port *_Atomic port; /* where its peer is to write to */
    struct kv_port *_Atomic told; /* the last one a caller asked for: where its peer may write to. NULL: none */
    struct kv_port *sending;      /* the same as `port`, unless something is in flight through the one before */
    struct kv_cell cell;

    uint32_t num_targets, num_remote_regions, num_beats;
    struct kv_target *targets;
    struct kv_remote_region *remote_regions;
    struct kv_beat *beats;
    bool moving;                  /* to `port`, when its writes in flight are complete */
    struct kv_retarget *retarget; /* to be taken over then */
    bool held;                    /* until it is resumed */

    uint32_t window;              /* operations the receiver granted; heartbeats come on top */
    struct kv_op *ops;            /* for writes; heartbeats have their own */
    struct kv_node idle_ops, flying_ops;
    uint32_t flying_writes;
    uint64_t flying_bytes;
    uint64_t again_since_ns;      /* the provider has refused since then; 0: it has not */

    uint64_t lease_until_ns;      /* UINT64_MAX: not connected */
    uint64_t connected_ns;        /* when it was; 0: it is not */
    uint64_t heard_ns;            /* when the first heartbeat of its peer landed since; 0: none has */
    bool heard_early;             /* its peer connected first, and one had landed already */
    uint64_t beats_seen;          /* in our cell */

    struct kv_node in_active;     /* of the poller's active links, while it has something to post */
    struct kv_node transfers, queue;
    struct kv_node asides;        /* writes that an injected fault has set aside */
    int64_t credit;
};

static inline uint32_t kv_link_slot(uint32_t id) { return id & (KV_MAX_LINKS - 1); }
/* Which of so many pollers made it. */
static inline uint32_t kv_link_poller(uint32_t id, uint32_t num_pollers)
{
    return (id >> KV_LINK_SLOT_BITS) % num_pollers;
}

static inline struct kv_domain *kv_link_landing(struct kv_link *l)   /* NULL: not opened */
{
    struct kv_port *port = l->port;
    return port->domain;
}
static inline bool kv_link_waits(const struct kv_link *l) { return l->moving || l->retarget || l->held; }
static inline bool kv_link_connected(const struct kv_link *l) { return l->lease_until_ns != UINT64_MAX; }
/* What the provider said to a write. */
static inline void kv_target_answers(struct kv_target *t, ssize_t rc, uint64_t now_ns)
{
    t->refused_ns = !rc ? 0 : t->refused_ns ? t->refused_ns : now_ns;
}

/* `keys`: one a region of nic, and one for the cell, which is at `cell`. */
struct kv_link *kv_link_new(uint32_t id, struct kv_nic *nic, const uint64_t *keys, char *cell);
bool kv_link_check_remote(const struct kv_remote *r, struct kv_error *e);
bool kv_link_set_remote(struct kv_link *l, const struct kv_remote *r, uint32_t window, struct kv_error *e);
void kv_link_free(struct kv_link *l);

/* The rest is the poller's thread's. */
struct kv_link *kv_link_find(struct kv_poller *p, uint32_t id);   /* NULL: closed */
void kv_link_open(struct kv_poller *p, struct kv_link *l);
void kv_link_connect(struct kv_poller *p, struct kv_link *l);
int kv_link_find_targets(struct kv_link *l, struct kv_port *o);   /* from o, as `next_address`. 0 or -errno */
/* Once: reports it and stops everything on it. On an abandoned domain it is stuck, whatever `what` says. */
void kv_link_fail(struct kv_poller *p, struct kv_link *l, int error, enum kv_link_failure what);
void kv_links_fail(struct kv_poller *p, struct kv_domain *d, int error, enum kv_link_failure what);   /* all of d */
void kv_link_stop_all(struct kv_poller *p, struct kv_link *l);
void kv_link_stop_tag(struct kv_poller *p, struct kv_link *l, uint32_t tag);
void kv_link_check_timeouts(struct kv_poller *p);
/* An operation of its transfer, or its heartbeat, is on its way. */
void kv_link_fly(struct kv_poller *p, struct kv_op *op, struct kv_port *port, uint32_t bytes);
/* An operation has come back, by completion, by injected drop, or by the close of its endpoint. */
void kv_link_retire_op(struct kv_poller *p, struct kv_op *op);

/* ---- the end of links and ports (closing.c) ---- */
/* Stops everything on it. It ends when the port its peer may write to is over; without a fence, when nothing of it is
   in flight. */
void kv_link_close(struct kv_poller *p, struct kv_link *l, bool fence);
void kv_port_begin_closing(struct kv_poller *p, struct kv_port *o);
/* After each read of the completion queues while something closes. */
void kv_go_on_closing(struct kv_poller *p);

/* ---- moving from port to port (rotate.c) ---- */
void kv_rotate(struct kv_poller *p, struct kv_port **ports);   /* one a nic; the array is freed */
void kv_link_retarget(struct kv_poller *p, struct kv_link *l, struct kv_retarget *to);
void kv_link_resume(struct kv_link *l);
/* By all links of its nic that come. Number 0: that of the other nics' ports, or the next. */
void kv_port_share(struct kv_poller *p, struct kv_port *o, uint32_t number);
void kv_port_note(struct kv_poller *p);                       /* for callers: there are other ports now */
/* No write of a link that waits for it is in flight. */
void kv_link_settle(struct kv_poller *p, struct kv_link *l);

/* ---- heartbeats and leases (lease.c) ---- */
void kv_lease_begin(struct kv_poller *p, struct kv_link *l);
/* A heartbeat of the link has landed. */
void kv_link_heard(struct kv_poller *p, uint32_t link);
/* Fails the links of d whose peer has been silent for too long; before each read of its queue. */
void kv_leases_judge(struct kv_poller *p, struct kv_domain *d);
/* All begin anew: nothing could be heard until now. */
void kv_leases_renew(struct kv_poller *p);
/* Posts the heartbeats that are due. */
void kv_beat(struct kv_poller *p);
/* From now on they go to these cells of the peer, the next ones at once. */
void kv_beat_to(struct kv_poller *p, struct kv_link *l, const struct kv_remote_cell *cells);
/* The cells of this process. */
void kv_cell_publish(struct kv_cell *c);
void kv_cell_withdraw(struct kv_cell *c);
#endif
