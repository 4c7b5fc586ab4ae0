/* A thread that runs one errand after another, so that no slow work runs on the main loop. */
#ifndef DESK_WORKER_H
#define DESK_WORKER_H

#include <glib.h>

typedef struct DeskWorker DeskWorker;
typedef void (*DeskErrand)(gpointer data);

DeskWorker* desk_worker_new(void);
/* Waits for the work of all errands. Their `done` follows on the main loop. */
void desk_worker_free(DeskWorker* worker);

/* Runs work on the thread, in the order of the calls, then done on the main loop. */
void desk_worker_push(DeskWorker* worker, DeskErrand work, DeskErrand done, gpointer data);

/* Any thread. Runs done on the main loop, in the order of the calls, and before the `done` of the
 * calling errand. */
void desk_worker_post(DeskErrand done, gpointer data);

#endif
