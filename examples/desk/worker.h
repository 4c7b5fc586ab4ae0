/* A thread that does one errand after another, so that nothing that takes time runs on the main loop. */
#ifndef DESK_WORKER_H
#define DESK_WORKER_H

#include <glib.h>

typedef struct DeskWorker DeskWorker;
typedef void (*DeskErrand)(gpointer data);

DeskWorker* desk_worker_new(void);
/* Waits for the work of all errands; what is `done` then still comes on the main loop. */
void desk_worker_free(DeskWorker* worker);

/* work on the thread, in the order of the calls, then done on the main loop. */
void desk_worker_push(DeskWorker* worker, DeskErrand work, DeskErrand done, gpointer data);

/* From any thread: done on the main loop, in the order of the calls, and before the `done` of the errand that makes them. */
void desk_worker_tell(DeskErrand done, gpointer data);

#endif
