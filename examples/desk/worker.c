#include "worker.h"

struct DeskWorker {
  GThreadPool* pool; /* of one thread */
};

typedef struct Errand {
  DeskErrand work, done;
  gpointer data;
} Errand;

static gboolean finish(gpointer pointer) {
  Errand* errand = pointer;
  errand->done(errand->data);
  g_free(errand);
  return G_SOURCE_REMOVE;
}

/* Idle priority would starve while a window redraws again and again. */
static void to_main_loop(Errand* errand) {
  g_idle_add_full(G_PRIORITY_DEFAULT, finish, errand, NULL);
}

static void run(gpointer pointer, gpointer unused) {
  Errand* errand = pointer;
  (void)unused;
  errand->work(errand->data);
  to_main_loop(errand);
}

DeskWorker* desk_worker_new(void) {
  DeskWorker* worker = g_new0(DeskWorker, 1);
  worker->pool = g_thread_pool_new(run, NULL, 1, FALSE, NULL);
  return worker;
}

void desk_worker_free(DeskWorker* worker) {
  if (!worker) return;
  g_thread_pool_free(worker->pool, FALSE, TRUE);
  g_free(worker);
}

void desk_worker_push(DeskWorker* worker, DeskErrand work, DeskErrand done, gpointer data) {
  Errand* errand = g_new0(Errand, 1);
  *errand = (Errand){work, done, data};
  g_thread_pool_push(worker->pool, errand, NULL);
}

void desk_worker_post(DeskErrand done, gpointer data) {
  Errand* errand = g_new0(Errand, 1);
  *errand = (Errand){NULL, done, data};
  to_main_loop(errand);
}
