/* Steps and the streams they run on: what the layer words release.

   A word releases a step only when it carries the step's own ticket, so an abandoned, replayed, warm-up or decode-only
   forward cannot release another's pages. Words may be skipped: the highest one seen counts.

   A step that turns out short holds its stream: a later step of the same requests may complete pages that it has left
   unfinished, and only the outside knows which requests these are. Words are read as before, but nothing that later steps
   show is released until the outside has resumed the stream for that ticket, after it has stopped what must not go. */
#ifndef KV_STEP_H
#define KV_STEP_H
#include "layer_counter.h"
#include "transfer.h"
#include "turns.h"

#define KV_MAX_STREAMS 64

/* One layer counter as this poller sees it. */
struct kv_stream {
    struct kv_layer_counter *counter;
    struct kv_turns *turns;   /* its slots are the ring's as they were: others may write to the counter's memory */
    uint32_t index;
    struct kv_node steps;     /* outstanding, by ticket */
    struct kv_node held;      /* over, by ticket: short ones that the outside does not know of yet, and what complete
                                 steps behind these may not release. The first is a short one */
    uint64_t complete[];      /* a ring slot each: the last word of the last step that had it and was complete */
};

/* One forward pass on one layer counter, in one poller. One that runs on several counters is a chain of these, armed by
   one command. */
struct kv_step {
    struct kv_node in_stream;
    struct kv_step *next_part;  /* until it is armed */
    struct kv_node transfers;   /* that wait for bumps; before it is armed, all of them */
    struct kv_stream *stream;
    uint64_t ticket, deadline_ns;
    uint64_t word;              /* last seen; 0: not started */
    uint32_t num_bumps;
    bool counted;               /* in the poller's num_armed: it still has bumps to show */
    bool known;                 /* that it is short: another poller has said so, and the outside has resumed the stream */
};

/* `turns`: which it shares with other pollers; NULL: its own. */
struct kv_stream *kv_stream_new(struct kv_layer_counter *c, uint32_t index, struct kv_turns *turns);
void kv_stream_free(struct kv_stream *s);

struct kv_step *kv_step_new(struct kv_stream *s, uint32_t num_bumps, uint64_t deadline_ns);
void kv_step_free(struct kv_step *s);   /* and the transfers still in it */

/* The rest is the poller's thread's. */
void kv_step_arm(struct kv_poller *p, struct kv_step *s);
/* Its transfers go with the armed step of the same ticket, as far as that has come: all at once when it is over and was
   complete. Where it is neither they are lost. It is freed itself. */
void kv_step_join(struct kv_poller *p, struct kv_step *joining);
void kv_step_abandon(struct kv_poller *p, struct kv_stream *s, uint64_t ticket);
/* The outside knows that the step of this ticket is short: it holds the stream no more, nor will it. */
void kv_stream_resume(struct kv_poller *p, struct kv_stream *s, uint64_t ticket);
/* Reads the words of all outstanding steps; returns how many had moved. */
unsigned kv_watch(struct kv_poller *p);
void kv_watch_deadlines(struct kv_poller *p);
void kv_watch_close(struct kv_poller *p);
#endif
