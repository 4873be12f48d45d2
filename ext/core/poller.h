/* The poller: one thread that posts, reads the completion queues of its network interfaces, watches the layer words and
   counts what lands.

   Callers' side: any thread, through the functions below (front.c). Poller's side: its own thread alone, without locks.
   Between them are two rings: commands in, records out. All endpoint work is done on the poller's thread, because
   domains are opened for one thread (FI_THREAD_DOMAIN); registration of sources comes before that thread starts. */
#ifndef KV_POLLER_H
#define KV_POLLER_H
#include "clock.h"
#include "commands.h"
#include "fault.h"
#include "link.h"
#include "state.h"
#include "step.h"
#include "trace.h"
#include <semaphore.h>

#define KV_MAX_REGIONS 1024
#define KV_MAX_NICS 64
#define KV_MAX_POLLERS 64
#define KV_CQ_BATCH 64

struct kv_config {
    const char *provider;
    const char *const *nics;      /* the address of each network interface; NULL: any */
    uint32_t num_nics;
    uint32_t index, num_pollers;  /* which one of its messenger's it is; 0 pollers: the only one */
    int core;                     /* -1: wherever the scheduler likes */
    uint32_t cq_entries;          /* of each interface */
    bool spin;                    /* while busy; else short naps leave the core to the engine */
    uint64_t spin_ns, sleep_max_ns;
    uint32_t max_write_bytes;
    uint64_t link_bytes;          /* in flight on a link, about */
    uint64_t op_timeout_ns;
    uint64_t heartbeat_ns;        /* between two of a link */
    bool shared_endpoint;         /* one port for all links of an interface */
    uint64_t first_lease_ns;      /* until the first heartbeat has landed, if it is longer: the peer may not be ready */
    uint64_t lease_ns;            /* a peer is lost when none of its heartbeats landed for so long */
};

#define KV_STATS(X) \
    X(posted_writes) X(posted_bytes) X(posted_rows) X(completed_writes) X(landed_writes) X(landed_rows) X(strays) \
    X(again) X(errors) X(lost_records) X(rounds) X(naps) X(sleeps) X(beats_sent) X(beats_heard) X(abandoned)

struct kv_stats {   /* written by the poller alone, read by anyone */
#define X(name) _Atomic uint64_t name;
    KV_STATS(X)
#undef X
};
#define X(name) +1
enum { KV_NUM_STATS = KV_STATS(X) };
#undef X
extern const char *const kv_stats_names[KV_NUM_STATS];
static inline void kv_count(_Atomic uint64_t *stat, uint64_t change)
{
    atomic_store_explicit(stat, atomic_load_explicit(stat, memory_order_relaxed) + change, memory_order_relaxed);
}

struct kv_poller {
    struct kv_config config;
    struct kv_state *state;
    struct kv_nic *nics;
    uint32_t num_nics;
    struct kv_guard guard;
    struct kv_commands commands;
    struct kv_records records;
    struct kv_stats stats;
    struct kv_faults faults;
    _Atomic(struct kv_trace *) trace;   /* NULL: off */
    _Atomic bool link_slot_busy[KV_MAX_LINKS];

    struct {   /* callers' side; `lock` guards the tables, and begin_step holds it for look-ups alone */
        pthread_mutex_t lock;
        _Atomic uint32_t callers;
        _Atomic bool closed, joined;
        bool started, stuck;
        pthread_t thread;
        sem_t running;            /* the thread has begun, or could not: */
        int start_error;
        uint32_t num_streams, num_templates, template_capacity, links_made;
        struct kv_stream *streams[KV_MAX_STREAMS];
        struct kv_link *links[KV_MAX_LINKS];
        struct kv_template **templates;
    } front;

    /* poller's side */
    _Atomic bool stop;
    _Atomic bool hold;            /* wanted: to read no completion queue */
    bool held;                    /* it is so */
    uint64_t (*clock)(void);
    uint64_t now_ns;              /* the clock, when it was read last */
    uint64_t young_until_ns;      /* a connection may still be coming up */
    uint64_t timeouts_checked_ns, beats_checked_ns;
    struct kv_node domains;       /* in which an endpoint is open */
    struct kv_node ports;         /* that are open, or referred to */
    uint32_t ports_made;
    _Atomic uint32_t port_current, port_older;   /* their numbers, for callers; 0: none */
    _Atomic bool rotating;        /* a caller has ordered another port */
    alignas(64) uint64_t cells[KV_MAX_LINKS];    /* a link slot each: late heartbeats of a closed one are harmless */
    struct kv_stream *streams[KV_MAX_STREAMS];
    uint32_t num_streams;
    uint32_t num_armed;           /* steps that still have bumps to show */
    uint64_t num_flying;          /* operations */
    struct kv_link *links[KV_MAX_LINKS];
    uint32_t num_closing;         /* ports */
    uint32_t num_unclosable;      /* ports; for good */
    bool ends_due;                /* a closing link may have nothing left in flight */
    uint32_t num_active;
    struct kv_node active;        /* links that have something to post */
    struct kv_record *backlog;    /* records that found the ring full, in order */
    size_t backlog_head, backlog_tail, backlog_capacity;
};

/* ---- callers' side (front.c) ---- */
struct kv_poller *kv_poller_open(const struct kv_config *config, struct kv_state *state, struct kv_error *e);
bool kv_poller_self_test(struct kv_poller *p, struct kv_error *e);
/* Joins the thread, ends every link and transfer, closes the domain. What was recorded can still be taken. False when
   the thread does not come back: then nothing is closed or freed, and what it uses must stay for good. */
bool kv_poller_close(struct kv_poller *p);
void kv_poller_free(struct kv_poller *p);

/* On the interfaces of this mask; 0: it is known by its number alone. -1: error */
int64_t kv_register(struct kv_poller *p, uint64_t address, uint64_t bytes, uint64_t nics, struct kv_error *e);
/* `turns`: shared with the other pollers that watch this counter; NULL: there are none. -1: error */
int64_t kv_add_stream(struct kv_poller *p, struct kv_layer_counter *c, struct kv_turns *turns, struct kv_error *e);
/* -1: error */
int64_t kv_open_link(struct kv_poller *p, uint32_t nic, const uint64_t *keys, uint32_t num_keys, struct kv_error *e);
/* Once it is opened: its endpoint's name, and the regions a peer must use (room for KV_MAX_REGIONS). -1: error */
int64_t kv_link_name(struct kv_poller *p, uint32_t link, uint8_t name[KV_NAME_BYTES], struct kv_error *e);
int64_t kv_link_regions(struct kv_poller *p, uint32_t link, struct kv_remote_region *out, struct kv_error *e);
bool kv_link_cell(struct kv_poller *p, uint32_t link, struct kv_remote_region *out, struct kv_error *e);
bool kv_connect_link(struct kv_poller *p, uint32_t link, const struct kv_remote *peer, uint32_t window,
                     struct kv_error *e);
bool kv_close_link(struct kv_poller *p, uint32_t link, bool fence, struct kv_error *e);

struct kv_keys { uint64_t *keys; uint32_t num; };
bool kv_rotate_port(struct kv_poller *p, const struct kv_keys *keys, uint32_t num_lists, struct kv_error *e);
bool kv_close_port(struct kv_poller *p, uint32_t number, struct kv_error *e);
bool kv_retarget_link(struct kv_poller *p, uint32_t link, const struct kv_remote *peer, struct kv_error *e);
bool kv_resume_link(struct kv_poller *p, uint32_t link, struct kv_error *e);

struct kv_entry_spec { int64_t src_region, src_base, dst_region, dst_base, signal; };
struct kv_template_spec {
    const struct kv_run *runs;
    const struct kv_entry_spec *entries;
    uint32_t num_runs, num_entries;
    struct kv_page src_page, dst_page;
    uint64_t row_bytes, item_bytes;
};
int64_t kv_add_template(struct kv_poller *p, uint32_t link, const struct kv_template_spec *spec, struct kv_error *e);

/* Of a step: what it does on one layer counter. `pollers`: a mask of those that watch it. */
struct kv_part { uint32_t stream, num_bumps; uint64_t pollers; };
/* On one poller, or on all of a messenger. All orders are armed, or none. Gives a ticket for each part; false with the
   error. */
bool kv_begin_step(struct kv_poller *const *pollers, uint32_t num_pollers, const struct kv_part *parts,
                   uint32_t num_parts, const struct kv_order *orders, size_t num_orders, uint64_t deadline_ns,
                   uint64_t *tickets, struct kv_error *e);
/* Adds transfers to steps that were begun before: a ticket for each part, whose num_bumps are not looked at. All go to
   their pollers, or none. */
bool kv_join_step(struct kv_poller *const *pollers, uint32_t num_pollers, const struct kv_part *parts,
                  uint32_t num_parts, uint64_t *tickets, const struct kv_order *orders, size_t num_orders,
                  struct kv_error *e);
bool kv_abandon(struct kv_poller *p, uint32_t stream, uint64_t ticket, struct kv_error *e);
/* Answers a KV_STEP_FAULT of a step that was begun on these pollers, after what must not be posted because of it was
   stopped: what later steps have shown goes on. Each poller that watches the counter is told. */
bool kv_resume_stream(struct kv_poller *p, uint32_t stream, uint64_t ticket, struct kv_error *e);
bool kv_stop_tag(struct kv_poller *p, uint32_t link, uint32_t tag, struct kv_error *e);
unsigned kv_take(struct kv_poller *p, struct kv_record *out, unsigned max);
bool kv_inject(struct kv_poller *p, enum kv_fault fault, uint64_t nth, struct kv_error *e);
bool kv_disturb(struct kv_poller *p, const struct kv_disturbance *d, struct kv_error *e);
/* While held it reads no completion queue but that of a closing endpoint. When this returns, it is so. */
bool kv_hold(struct kv_poller *p, bool hold, struct kv_error *e);
bool kv_trace_on(struct kv_poller *p, uint32_t capacity, struct kv_error *e);
uint32_t kv_trace_read(struct kv_poller *p, struct kv_mark *out, uint32_t max);   /* one reader at a time */
void kv_stats_read(struct kv_poller *p, uint64_t values[KV_NUM_STATS]);

/* ---- poller's side ---- */
static inline uint64_t kv_look(struct kv_poller *p) { return p->now_ns = p->clock(); }
/* By the clock when it was read last. A poller that is held hears nothing, so it judges nobody. */
static inline bool kv_lease_over(const struct kv_poller *p, const struct kv_link *l)
{
    return p->now_ns > l->lease_until_ns && !p->held;
}
void *kv_poller_main(void *poller);
/* Ends everything, on the thread that owns the domain by then. */
void kv_poller_wind_down(struct kv_poller *p);
void kv_report(struct kv_poller *p, enum kv_record_kind kind, uint64_t id, uint64_t value, uint64_t extra);
void kv_queue(struct kv_poller *p, struct kv_transfer *x);     /* it may post */
void kv_unqueue(struct kv_poller *p, struct kv_transfer *x);   /* it may not; harmless when it could not */
void kv_drop_asides(struct kv_poller *p, struct kv_transfer *x);
unsigned kv_post(struct kv_poller *p);
/* One read of each completion queue. Returns the entries read. */
unsigned kv_complete(struct kv_poller *p);
#endif
