/* Steps and the streams they run on: what the layer words release.

   A word releases a step only when it carries the step's own ticket, so an abandoned, replayed, warm-up or decode-only
   forward cannot release another's pages. Words may be skipped: the highest one seen counts. */
#ifndef KV_STEP_H
#define KV_STEP_H
#include "layer_counter.h"
#include "transfer.h"

#define KV_MAX_STREAMS 64

/* One layer counter as this poller sees it. */
struct kv_stream {
    struct kv_layer_counter *counter;
    uint32_t index, num_slots;      /* the latter as they were: other processes may write to the counter's memory */
    _Atomic uint64_t next_ticket;   /* callers' side */
    struct kv_node steps;           /* outstanding, by ticket */
    _Atomic uint64_t turns[];       /* a ring slot each: the only ticket that may take it now */
};

/* One forward pass on one layer counter. One that runs on several is a chain of these, armed by one command. */
struct kv_step {
    struct kv_node in_stream;
    struct kv_step *next_part;  /* until it is armed */
    struct kv_node transfers;   /* that wait for bumps; before it is armed, all of them */
    struct kv_stream *stream;
    uint64_t ticket, deadline_ns;
    uint64_t word;              /* last seen; 0: not started */
    uint32_t num_bumps;
    bool counted;               /* in the poller's num_armed: it still has bumps to show */
    bool faulted;               /* a fault has been reported; it ends in silence */
};

struct kv_stream *kv_stream_new(struct kv_layer_counter *c, uint32_t num_slots, uint32_t index);
void kv_stream_free(struct kv_stream *s);
/* The next ticket, or 0 when its ring slot has not come back yet. Any thread. */
uint64_t kv_stream_claim(struct kv_stream *s);
/* A claimed ticket is not used after all. Any thread. */
void kv_stream_unclaim(struct kv_stream *s, uint64_t ticket);

struct kv_step *kv_step_new(struct kv_stream *s, uint32_t num_bumps, uint64_t deadline_ns);
void kv_step_free(struct kv_step *s);   /* and the transfers still in it */

/* The rest is the poller's thread's. */
void kv_step_arm(struct kv_poller *p, struct kv_step *s);
void kv_step_abandon(struct kv_poller *p, struct kv_stream *s, uint64_t ticket);
/* Reads the words of all outstanding steps; returns how many had moved. */
unsigned kv_watch(struct kv_poller *p);
void kv_watch_deadlines(struct kv_poller *p);
void kv_watch_close(struct kv_poller *p);
#endif
