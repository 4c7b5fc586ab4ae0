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
  DeskRemedy remedy; /* of the notice */
  guint64 text_bytes, tokens;
  gint64 used; /* seconds since 1970 */
  GBytes* text;
  kv_status saved_status; /* of the library's list */
  gboolean is_open, is_complete;
  double part; /* of the text that is prefilled; -1: unknown */
  GPtrArray* answers;

  DeskWorker* worker;
  GQueue jobs;           /* the head is running or begins next */
  gboolean works;        /* the thread has the head */
  DeskSequence sequence; /* of the running job */
  DeskEta eta;
  gboolean saving;
  gboolean ends; /* it is being closed or removed: no new job begins */
};

G_DEFINE_TYPE(DeskDocument, desk_document, G_TYPE_OBJECT)

static guint changed;

static void emit_changed(DeskDocument* self) { g_signal_emit(self, changed, 0); }

static void desk_document_finalize(GObject* object) {
  DeskDocument* self = DESK_DOCUMENT(object);
  desk_worker_free(self->worker);
  desk_sequence_clear(&self->sequence);
  g_clear_pointer(&self->text, g_bytes_unref);
  g_free(self->name);
  g_free(self->notice);
  g_ptr_array_unref(self->answers);
  G_OBJECT_CLASS(desk_document_parent_class)->finalize(object);
}

static void desk_document_class_init(DeskDocumentClass* class) {
  G_OBJECT_CLASS(class)->finalize = desk_document_finalize;
  changed = g_signal_new("changed", DESK_TYPE_DOCUMENT, G_SIGNAL_RUN_LAST, 0, NULL, NULL, NULL,
                         G_TYPE_NONE, 0);
}

static void desk_document_init(DeskDocument* self) {
  g_queue_init(&self->jobs);
  self->answers = g_ptr_array_new_with_free_func(g_object_unref);
  self->part = -1;
}

DeskDocument* desk_document_new(const DeskShelf* shelf, const char* name) {
  DeskDocument* self = g_object_new(DESK_TYPE_DOCUMENT, NULL);
  self->shelf = shelf;
  self->name = g_strdup(name);
  self->used = g_get_real_time() / G_USEC_PER_SEC;
  return self;
}

/* ---- what is known --------------------------------------------------------------------------- */

const char* desk_document_name(DeskDocument* self) { return self->name; }
gboolean desk_document_is_busy(DeskDocument* self) { return !g_queue_is_empty(&self->jobs); }
GBytes* desk_document_text(DeskDocument* self) { return self->text; }
GPtrArray* desk_document_answers(DeskDocument* self) { return self->answers; }
gboolean desk_document_is_complete(DeskDocument* self) { return self->is_complete; }
double desk_document_part(DeskDocument* self) { return self->part; }
DeskRemedy desk_document_remedy(DeskDocument* self) { return self->remedy; }
double desk_document_progress_part(DeskDocument* self) { return desk_eta_part(&self->eta); }
double desk_document_seconds_left(DeskDocument* self) { return desk_eta_seconds_left(&self->eta); }
const char* desk_document_notice(DeskDocument* self) { return self->notice; }

DeskState desk_document_state(DeskDocument* self) {
  const DeskJob* job = g_queue_peek_head(&self->jobs);
  if (!job || job->kind == DESK_JOB_KEEP)
    return self->is_open ? DESK_READY : self->notice ? DESK_FAILED : DESK_CLOSED;
  if (job->kind == DESK_JOB_PREFILL) return self->saving ? DESK_SAVING : DESK_PREFILLING;
  return job->kind == DESK_JOB_ASK ? DESK_ANSWERING : DESK_OPENING;
}

static void set_notice(DeskDocument* self, char* taken, DeskRemedy remedy) {
  g_free(self->notice);
  self->notice = taken;
  self->remedy = remedy;
}

void desk_document_dismiss(DeskDocument* self) {
  set_notice(self, NULL, DESK_REMEDY_NONE);
  emit_changed(self);
}

char* desk_document_length(DeskDocument* self) {
  const guint64 bytes = self->text ? g_bytes_get_size(self->text) : self->text_bytes;
  return desk_pages(bytes);
}

static char* saved_summary(DeskDocument* self) {
  g_autofree char* ago = desk_ago(self->used);
  if (self->part >= 0 && self->part < 1 && !self->is_complete) {
    g_autofree char* part = desk_percent(self->part);
    return g_strdup_printf("%s prefilled · %s", part, ago);
  }
  g_autofree char* length = desk_document_length(self);
  return *length ? g_strdup_printf("%s · %s", length, ago) : g_steal_pointer(&ago);
}

char* desk_document_summary(DeskDocument* self) {
  const DeskState state = desk_document_state(self);
  if (state == DESK_PREFILLING) {
    g_autofree char *part = desk_percent(desk_document_progress_part(self)),
                    *left = desk_time_left(desk_document_seconds_left(self));
    return self->eta.total > 0 ? g_strdup_printf("Prefilling %s · %s", part, left)
                               : g_strdup("Prefilling");
  }
  if (state == DESK_SAVING) return g_strdup("Saving");
  if (state == DESK_OPENING) return g_strdup("Opening");
  if (self->remedy == DESK_REMEDY_SHORTEN) return g_strdup("Too long for the model");
  if (self->tokens > 0) return saved_summary(self);
  return g_strdup(self->saved_status == KV_OK ? "Not prefilled yet"
                                              : "Not prefilled yet: the saved file is unusable");
}

void desk_document_set_saved(DeskDocument* self, const kv_library_document* saved) {
  self->saved_status = saved->status;
  self->used = (gint64)(saved->last_used / 1000000000u);
  if (!desk_document_is_busy(self)) self->tokens = saved->tokens;
}

void desk_document_set_known(DeskDocument* self, guint64 text_bytes, double part) {
  self->text_bytes = text_bytes;
  self->part = part;
  emit_changed(self);
}

/* ---- jobs, one after another ----------------------------------------------------------------- */

void desk_document_progress(DeskDocument* self, guint64 tokens, guint64 total, gboolean saving) {
  self->saving = saving;
  if (!saving) desk_eta_update(&self->eta, tokens, total);
  emit_changed(self);
}

static void done(gpointer pointer);

static void start_next(DeskDocument* self) {
  DeskJob* job = g_queue_peek_head(&self->jobs);
  if (!job || self->works) return;
  if (!self->worker) self->worker = desk_worker_new();
  if (job->kind == DESK_JOB_PREFILL) desk_eta_start(&self->eta, job->from_start ? 0 : self->tokens);
  job->shelf = self->shelf;
  job->sequence = &self->sequence;
  self->works = TRUE;
  desk_worker_push(self->worker, desk_job_work, done, job);
}

static void add(DeskJob* job) {
  g_queue_push_tail(&job->document->jobs, job);
  start_next(job->document);
  emit_changed(job->document);
}

/* Puts a prefill before the waiting jobs, which need it. done starts it. */
static void prefill_first(DeskDocument* self) {
  DeskJob* job = desk_job_new(DESK_JOB_PREFILL, self, self->name);
  job->from_start = TRUE;
  g_queue_push_head(&self->jobs, job);
}

static DeskJob* asking(DeskDocument* self, DeskAnswer* to) {
  DeskJob* job = desk_job_new(DESK_JOB_ASK, self, self->name);
  job->answer = g_object_ref(to);
  return job;
}

/* ---- what came of them ----------------------------------------------------------------------- */

static void take_over(DeskDocument* self, const DeskJob* job) {
  const DeskSequence* sequence = &self->sequence;
  if (sequence->text && sequence->text != self->text && (!self->text || job->status == KV_OK)) {
    g_clear_pointer(&self->text, g_bytes_unref);
    self->text = g_bytes_ref(sequence->text);
  }
  self->is_open = sequence->session != NULL;
  self->is_complete = desk_sequence_is_complete(sequence);
  self->part = self->text ? (double)sequence->bytes / (double)g_bytes_get_size(self->text) : 0;
  if (self->is_open || job->kind == DESK_JOB_PREFILL) self->tokens = sequence->tokens;
}

/* Writes the conversation before the waiting jobs. done starts it. */
static void keep(DeskDocument* self) {
  DeskJob* job = desk_job_new(DESK_JOB_KEEP, self, self->name);
  const DeskConversation conversation = {self->answers, self->is_complete ? 1 : self->part};
  job->content = desk_conversation_format(&conversation);
  g_queue_push_head(&self->jobs, job);
}

/* Puts the loaded answers before those of this run. */
static void take_conversation(DeskDocument* self, DeskJob* job) {
  GPtrArray* loaded = job->conversation.answers;
  for (guint i = 0; loaded && i < loaded->len; ++i)
    g_ptr_array_insert(self->answers, (int)i, g_object_ref(loaded->pdata[i]));
}

static char* too_long(const DeskJob* job) {
  g_autofree char *tokens = desk_grouped(job->tokens), *context = desk_grouped(job->context);
  return g_strdup_printf("This document is too long for the model (%s of %s tokens).", tokens,
                         context);
}

static char* not_saved(const DeskJob* job) {
  const kv_status status = job->save_status != KV_OK ? job->save_status : job->status;
  g_autofree char* failure = desk_failure(status, job->error.message);
  return g_strdup_printf("The document could not be saved. %s", failure);
}

static void was_opened(DeskDocument* self, DeskJob* job) {
  if (job->status != KV_OK) {
    set_notice(self, desk_failure(job->status, job->error.message), DESK_REMEDY_TRY_AGAIN);
    return;
  }
  take_conversation(self, job);
  self->used = g_get_real_time() / G_USEC_PER_SEC;
  if (!self->is_open && !self->ends) {
    set_notice(self, g_steal_pointer(&job->why), DESK_REMEDY_NONE);
    prefill_first(self);
  }
}

/* Damage is met where a page is used for the first time. The document is then prefilled again. */
static gboolean prefills_again(DeskDocument* self, const DeskJob* job) {
  if (job->status != KV_CORRUPT || !job->was_mapped || self->ends) return FALSE;
  set_notice(self, desk_sequence_explain(self->name, KV_CORRUPT), DESK_REMEDY_NONE);
  return TRUE;
}

static void was_prefilled(DeskDocument* self, DeskJob* job) {
  self->saving = FALSE;
  self->used = g_get_real_time() / G_USEC_PER_SEC;
  if (prefills_again(self, job)) prefill_first(self);
  else if (job->status == KV_CONTEXT_FULL) set_notice(self, too_long(job), DESK_REMEDY_SHORTEN);
  else if (job->status != KV_OK && job->status != KV_CANCELLED)
    set_notice(self, desk_failure(job->status, job->error.message), DESK_REMEDY_TRY_AGAIN);
  else if (job->save_status != KV_OK) set_notice(self, not_saved(job), DESK_REMEDY_NONE);
  else if (self->is_open) keep(self);
}

static void was_asked(DeskDocument* self, DeskJob* job) {
  DeskAnswer* to = job->answer;
  if (!to->again && prefills_again(self, job)) {
    to->again = TRUE;
    to->state = DESK_ANSWER_WAITING;
    g_string_truncate(to->text, 0);
    g_queue_push_head(&self->jobs, asking(self, to));
    prefill_first(self);
  } else {
    const gboolean good = job->status == KV_OK || job->status == KV_CANCELLED;
    to->state = job->status == KV_OK ? DESK_ANSWER_WHOLE
                : good               ? DESK_ANSWER_STOPPED
                                     : DESK_ANSWER_FAILED;
    if (!good) to->failure = desk_failure(job->status, job->error.message);
    to->outcome = job->outcome;
    job->outcome = (DeskOutcome){0};
    if (good) keep(self);
  }
  desk_answer_changed(to);
}

static void was_shortened(DeskDocument* self, DeskJob* job) {
  if (job->status == KV_OK && !self->ends)
    g_queue_push_head(&self->jobs, desk_job_new(DESK_JOB_PREFILL, self, self->name));
  else if (job->status != KV_OK)
    set_notice(self, desk_failure(job->status, job->error.message), DESK_REMEDY_SHORTEN);
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
    case DESK_JOB_PREFILL:
      was_prefilled(self, job);
      break;
    case DESK_JOB_ASK:
      was_asked(self, job);
      break;
    case DESK_JOB_SHORTEN:
      was_shortened(self, job);
      break;
    case DESK_JOB_KEEP:
      if (job->status != KV_OK) set_notice(self, not_saved(job), DESK_REMEDY_NONE);
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
  emit_changed(self);
  g_autofree char* failure = desk_failure(job->status, job->error.message);
  if (job->done) job->done(self, job->status == KV_OK ? NULL : failure, job->user);
  desk_job_free(job);
}

/* ---- calls of the window --------------------------------------------------------------------- */

void desk_document_open(DeskDocument* self, kv_model* model) {
  if (self->is_open || self->ends || desk_document_is_busy(self)) return;
  set_notice(self, NULL, DESK_REMEDY_NONE);
  if (!self->sequence.model) self->sequence.model = kv_model_retain(model);
  if (!self->sequence.path) self->sequence.path = desk_shelf_cache_path(self->shelf, self->name);
  add(desk_job_new(DESK_JOB_OPEN, self, self->name));
}

void desk_document_resume(DeskDocument* self) {
  if (self->is_complete || self->ends || !self->text || desk_document_is_busy(self)) return;
  set_notice(self, NULL, DESK_REMEDY_NONE);
  add(desk_job_new(DESK_JOB_PREFILL, self, self->name));
}

void desk_document_shorten(DeskDocument* self) {
  if (self->ends || !self->text || desk_document_is_busy(self)) return;
  set_notice(self, NULL, DESK_REMEDY_NONE);
  add(desk_job_new(DESK_JOB_SHORTEN, self, self->name));
}

void desk_document_ask(DeskDocument* self, DeskAnswer* answer) {
  if (self->ends) return;
  g_ptr_array_add(self->answers, g_object_ref(answer));
  add(asking(self, answer));
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
  } else { /* unused: there is nothing to stop */
    self->ends = TRUE;
    done_with(self, NULL, user);
  }
}
