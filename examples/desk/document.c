#include "document.h"

#include <string.h>

#include "eta.h"
#include "job.h"
#include "words.h"
#include "worker.h"

struct _DeskDocument {
  GObject parent;
  const DeskShelf* shelf;
  char *name, *notice;
  guint64 file_bytes, tokens;
  gint64 used; /* seconds since 1970 */
  GBytes* text;
  kv_status saved_status; /* of the library's list */
  gboolean is_open, is_complete;
  double part; /* of the text that was read */

  DeskWorker* worker;
  GQueue jobs;         /* the head is under way */
  gboolean works;      /* the head is at the thread */
  DeskReading reading; /* of the job that works */
  DeskEta eta;
  gboolean keeping; /* what was read is saved */
  gboolean ends;    /* it is being closed or removed: nothing new is begun */
};

G_DEFINE_TYPE(DeskDocument, desk_document, G_TYPE_OBJECT)

static guint changed;

static void tell(DeskDocument* self) { g_signal_emit(self, changed, 0); }

static void desk_document_finalize(GObject* object) {
  DeskDocument* self = DESK_DOCUMENT(object);
  desk_worker_free(self->worker);
  desk_reading_clear(&self->reading);
  g_clear_pointer(&self->text, g_bytes_unref);
  g_free(self->name);
  g_free(self->notice);
  G_OBJECT_CLASS(desk_document_parent_class)->finalize(object);
}

static void desk_document_class_init(DeskDocumentClass* class) {
  G_OBJECT_CLASS(class)->finalize = desk_document_finalize;
  changed = g_signal_new("changed", DESK_TYPE_DOCUMENT, G_SIGNAL_RUN_LAST, 0, NULL, NULL, NULL,
                         G_TYPE_NONE, 0);
}

static void desk_document_init(DeskDocument* self) { g_queue_init(&self->jobs); }

DeskDocument* desk_document_new(const DeskShelf* shelf, const char* name) {
  DeskDocument* self = g_object_new(DESK_TYPE_DOCUMENT, NULL);
  self->shelf = shelf;
  self->name = g_strdup(name);
  self->used = g_get_real_time() / G_USEC_PER_SEC;
  return self;
}

/* ---- what is known -------------------------------------------------------------------------------------------------- */

const char* desk_document_name(DeskDocument* self) { return self->name; }
gboolean desk_document_is_busy(DeskDocument* self) { return !g_queue_is_empty(&self->jobs); }
GBytes* desk_document_text(DeskDocument* self) { return self->text; }
guint64 desk_document_tokens(DeskDocument* self) { return self->tokens; }
gboolean desk_document_is_complete(DeskDocument* self) { return self->is_complete; }
double desk_document_part(DeskDocument* self) { return self->part; }
double desk_document_share(DeskDocument* self) { return desk_eta_share(&self->eta); }
double desk_document_seconds_left(DeskDocument* self) { return desk_eta_seconds_left(&self->eta); }
const char* desk_document_notice(DeskDocument* self) { return self->notice; }

DeskState desk_document_state(DeskDocument* self) {
  const DeskJob* job = g_queue_peek_head(&self->jobs);
  if (!job) return self->is_open ? DESK_READY : self->notice ? DESK_FAILED : DESK_CLOSED;
  if (job->kind == DESK_JOB_READ) return self->keeping ? DESK_KEEPING : DESK_READING;
  return job->kind == DESK_JOB_ASK ? DESK_ANSWERING : DESK_OPENING;
}

static void set_notice(DeskDocument* self, char* taken) {
  g_free(self->notice);
  self->notice = taken;
}

void desk_document_dismiss(DeskDocument* self) {
  set_notice(self, NULL);
  tell(self);
}

char* desk_document_summary(DeskDocument* self) {
  const DeskState state = desk_document_state(self);
  if (state == DESK_READING) {
    g_autofree char *share = desk_percent(desk_document_share(self)),
                    *left = desk_time_left(desk_document_seconds_left(self));
    return self->eta.total > 0 ? g_strdup_printf("Reading %s · %s", share, left)
                               : g_strdup("Reading");
  }
  if (state == DESK_KEEPING) return g_strdup("Keeping what was read");
  if (state == DESK_OPENING) return g_strdup("Opening");
  if (self->tokens == 0)
    return g_strconcat("Not read yet",
                       self->saved_status == KV_OK ? "" : ": what was saved cannot be used", NULL);
  g_autofree char *tokens = desk_grouped(self->tokens), *size = g_format_size(self->file_bytes),
                  *ago = desk_ago(self->used);
  return g_strdup_printf("%s tokens · %s · %s", tokens, size, ago);
}

void desk_document_set_saved(DeskDocument* self, const kv_library_document* saved) {
  self->saved_status = saved->status;
  self->file_bytes = saved->file_bytes;
  self->used = (gint64)(saved->last_used / 1000000000u);
  if (!desk_document_is_busy(self)) self->tokens = saved->tokens;
  tell(self);
}

/* ---- jobs, one after another ---------------------------------------------------------------------------------------- */

void desk_document_progress(DeskDocument* self, guint64 tokens, guint64 total, gboolean keeping) {
  self->keeping = keeping;
  if (!keeping) desk_eta_update(&self->eta, tokens, total);
  tell(self);
}

static void done(gpointer pointer);

static void start_next(DeskDocument* self) {
  DeskJob* job = g_queue_peek_head(&self->jobs);
  if (!job || self->works) return;
  if (!self->worker) self->worker = desk_worker_new();
  if (job->kind == DESK_JOB_READ) desk_eta_start(&self->eta, job->from_start ? 0 : self->tokens);
  job->shelf = self->shelf;
  job->reading = &self->reading;
  self->works = TRUE;
  desk_worker_push(self->worker, desk_job_work, done, job);
}

static void add(DeskJob* job) {
  g_queue_push_tail(&job->document->jobs, job);
  start_next(job->document);
  tell(job->document);
}

/* Before the jobs that wait: what they need. Started by done. */
static void read_first(DeskDocument* self) {
  DeskJob* job = desk_job_new(DESK_JOB_READ, self, self->name);
  job->from_start = TRUE;
  g_queue_push_head(&self->jobs, job);
}

static DeskJob* asking(DeskDocument* self, DeskAnswer* to) {
  DeskJob* job = desk_job_new(DESK_JOB_ASK, self, self->name);
  job->answer = g_object_ref(to);
  return job;
}

/* ---- what came of them ---------------------------------------------------------------------------------------------- */

static void take_over(DeskDocument* self, const DeskJob* job) {
  const DeskReading* reading = &self->reading;
  if (!self->text && reading->text) self->text = g_bytes_ref(reading->text);
  self->is_open = reading->session != NULL;
  self->is_complete = desk_reading_is_complete(reading);
  self->part = self->text ? (double)reading->bytes / (double)g_bytes_get_size(self->text) : 0;
  if (self->is_open || job->kind == DESK_JOB_READ) self->tokens = reading->tokens;
  if (job->file_bytes > 0) self->file_bytes = job->file_bytes;
}

static char* sentence(const char* message) {
  g_autofree char *first = g_utf8_substring(message, 0, MIN(1, g_utf8_strlen(message, -1))),
                  *upper = g_utf8_strup(first, -1);
  return g_strdup_printf("%s%s%s", upper, message + strlen(first),
                         g_str_has_suffix(message, ".") ? "" : ".");
}

static void was_opened(DeskDocument* self, DeskJob* job) {
  if (job->status != KV_OK) {
    set_notice(self, sentence(job->error.message));
    return;
  }
  self->used = g_get_real_time() / G_USEC_PER_SEC;
  if (!self->is_open && !self->ends) {
    set_notice(self, g_steal_pointer(&job->why));
    read_first(self);
  }
}

/* Damage that is met only where the saved part is used: that part is read again. */
static gboolean reads_again(DeskDocument* self, const DeskJob* job) {
  if (job->status != KV_CORRUPT || !job->was_mapped || self->ends) return FALSE;
  set_notice(self, desk_reading_explain(self->name, KV_CORRUPT, job->error.message));
  return TRUE;
}

static void was_read(DeskDocument* self, DeskJob* job) {
  self->keeping = FALSE;
  self->used = g_get_real_time() / G_USEC_PER_SEC;
  if (reads_again(self, job)) read_first(self);
  else if (job->status != KV_OK && job->status != KV_CANCELLED)
    set_notice(self, sentence(job->error.message));
  else if (job->save_status != KV_OK)
    set_notice(self, g_strdup_printf("What was read could not be kept: %s", job->error.message));
}

static void was_asked(DeskDocument* self, DeskJob* job) {
  DeskAnswer* to = job->answer;
  if (!to->again && reads_again(self, job)) {
    to->again = TRUE;
    to->state = DESK_ANSWER_WAITING;
    g_string_truncate(to->text, 0);
    g_queue_push_head(&self->jobs, asking(self, to));
    read_first(self);
  } else {
    const gboolean good = job->status == KV_OK || job->status == KV_CANCELLED;
    to->state = job->status == KV_OK ? DESK_ANSWER_WHOLE
                : good               ? DESK_ANSWER_STOPPED
                                     : DESK_ANSWER_FAILED;
    if (!good) to->failure = sentence(job->error.message);
    to->outcome = job->outcome;
    job->outcome = (DeskOutcome){0};
  }
  desk_answer_changed(to);
}

static void was_renamed(DeskDocument* self, DeskJob* job) {
  if (job->status != KV_OK) return;
  g_free(self->name);
  self->name = g_steal_pointer(&job->new_name);
}

static void done(gpointer pointer) {
  DeskJob* job = pointer;
  DeskDocument* self = job->document;
  g_queue_pop_head(&self->jobs);
  self->works = FALSE;
  take_over(self, job);
  switch (job->kind) {
    case DESK_JOB_OPEN:
      was_opened(self, job);
      break;
    case DESK_JOB_READ:
      was_read(self, job);
      break;
    case DESK_JOB_ASK:
      was_asked(self, job);
      break;
    case DESK_JOB_RENAME:
      was_renamed(self, job);
      break;
    case DESK_JOB_REMOVE:
      self->ends = job->status == KV_OK;
      break;
    case DESK_JOB_CLOSE:
      break;
  }
  start_next(self);
  tell(self);
  if (job->done) job->done(self, job->status == KV_OK ? NULL : job->error.message, job->user);
  desk_job_free(job);
}

/* ---- what the window asks for --------------------------------------------------------------------------------------- */

void desk_document_open(DeskDocument* self, kv_model* model) {
  if (self->is_open || self->ends || desk_document_is_busy(self)) return;
  set_notice(self, NULL);
  if (!self->reading.model) self->reading.model = kv_retain(model);
  if (!self->reading.path) self->reading.path = desk_shelf_reading_path(self->shelf, self->name);
  add(desk_job_new(DESK_JOB_OPEN, self, self->name));
}

void desk_document_go_on(DeskDocument* self) {
  if (self->is_complete || self->ends || !self->text || desk_document_is_busy(self)) return;
  set_notice(self, NULL);
  add(desk_job_new(DESK_JOB_READ, self, self->name));
}

void desk_document_ask(DeskDocument* self, DeskAnswer* answer) {
  if (!self->ends) add(asking(self, answer));
}

void desk_document_stop(DeskDocument* self) {
  DeskJob* job = g_queue_peek_head(&self->jobs);
  if (job) kv_cancel_fire(job->cancel);
}

void desk_document_rename(DeskDocument* self, const char* name, DeskDone done_with, gpointer user) {
  DeskJob* job = desk_job_new(DESK_JOB_RENAME, self, self->name);
  job->new_name = g_strdup(name);
  job->done = done_with;
  job->user = user;
  add(job);
}

static void end(DeskDocument* self, DeskJobKind kind, DeskDone done_with, gpointer user) {
  self->ends = TRUE;
  for (GList* l = self->jobs.head; l; l = l->next) kv_cancel_fire(((DeskJob*)l->data)->cancel);
  DeskJob* job = desk_job_new(kind, self, self->name);
  job->done = done_with;
  job->user = user;
  add(job);
}

void desk_document_remove(DeskDocument* self, DeskDone done_with, gpointer user) {
  end(self, DESK_JOB_REMOVE, done_with, user);
}

void desk_document_close(DeskDocument* self, DeskDone done_with, gpointer user) {
  if (self->worker) {
    end(self, DESK_JOB_CLOSE, done_with, user);
  } else { /* it was not used: there is nothing to stop */
    self->ends = TRUE;
    done_with(self, NULL, user);
  }
}
