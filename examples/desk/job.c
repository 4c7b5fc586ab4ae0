#include "job.h"

#include <errno.h>
#include <glib/gstdio.h>
#include <string.h>

#include "worker.h"

char* desk_shelf_cache_path(const DeskShelf* shelf, const char* name) {
  return g_strdup_printf("%s/%s.kv", shelf->caches, name);
}

char* desk_shelf_conversation_path(const DeskShelf* shelf, const char* name) {
  return g_strdup_printf("%s/%s.conversation", shelf->caches, name);
}

GPtrArray* desk_shelf_all_caches(const DeskShelf* shelf, const char* name) {
  GPtrArray* paths = g_ptr_array_new_with_free_func(g_free);
  g_autoptr(GDir) models = g_dir_open(shelf->all_caches, 0, NULL);
  const char* model = NULL;
  while (models && (model = g_dir_read_name(models))) {
    for (int i = 0; i < 2; ++i) {
      const char* ending = i == 0 ? "kv" : "conversation";
      char* path = g_strdup_printf("%s/%s/%s.%s", shelf->all_caches, model, name, ending);
      if (g_file_test(path, G_FILE_TEST_EXISTS)) g_ptr_array_add(paths, path);
      else g_free(path);
    }
  }
  return paths;
}

char* desk_shelf_text_path(const DeskShelf* shelf, const char* name) {
  return g_strdup_printf("%s/%s.txt", shelf->texts, name);
}

DeskJob* desk_job_new(DeskJobKind kind, DeskDocument* document, const char* name) {
  DeskJob* job = g_new0(DeskJob, 1);
  job->kind = kind;
  job->document = g_object_ref(document);
  job->name = g_strdup(name);
  if (kv_cancel_create(&job->cancel, NULL) != KV_OK) g_error("no memory"); /* as GLib does it */
  return job;
}

void desk_job_free(DeskJob* job) {
  g_clear_object(&job->answer);
  desk_outcome_clear(&job->outcome);
  kv_cancel_release(job->cancel);
  g_free(job->name);
  g_free(job->new_name);
  g_free(job->why);
  g_free(job->content);
  g_clear_pointer(&job->conversation.answers, g_ptr_array_unref);
  g_object_unref(job->document);
  g_free(job);
}

/* ---- what the window sees meanwhile ---------------------------------------------------------- */

typedef struct Progress {
  DeskDocument* document;
  guint64 done, total; /* tokens */
  gboolean saving;
} Progress;

static void show_progress(gpointer pointer) {
  Progress* progress = pointer;
  desk_document_progress(progress->document, progress->done, progress->total, progress->saving);
  g_object_unref(progress->document);
  g_free(progress);
}

static void post_progress(DeskDocument* document, guint64 done, guint64 total, gboolean saving) {
  Progress* progress = g_new(Progress, 1);
  *progress = (Progress){g_object_ref(document), done, total, saving};
  desk_worker_post(show_progress, progress);
}

static int32_t on_progress(int32_t phase, uint64_t done, uint64_t total, void* user) {
  if (phase == KV_PHASE_PREFILL) post_progress(user, done, total, FALSE);
  return 0;
}

/* ---- the work -------------------------------------------------------------------------------- */

static void refuse(DeskJob* job, kv_status status, const char* message) {
  job->status = job->error.status = status;
  g_strlcpy(job->error.message, message, sizeof job->error.message);
}

static void open_saved(DeskJob* job) {
  DeskSequence* sequence = job->sequence;
  if (!sequence->text) {
    g_autofree char *path = desk_shelf_text_path(job->shelf, job->name), *text = NULL;
    gsize size = 0;
    if (g_file_get_contents(path, &text, &size, NULL) && size > 0 &&
        g_utf8_validate(text, (gssize)size, NULL))
      sequence->text = g_bytes_new_take(g_steal_pointer(&text), size);
  }
  g_autofree char* talk = desk_shelf_conversation_path(job->shelf, job->name);
  job->conversation = desk_conversation_load(talk);
  job->status = desk_sequence_load(sequence, job->name, &job->why, &job->error);
  if (job->status != KV_OK || sequence->text) return;
  g_autofree char* message =
      g_strdup_printf("%s%sThe copy of its text is missing: open the file again.",
                      job->why ? job->why : "", job->why ? " " : "");
  refuse(job, KV_NOT_FOUND, message);
}

static void prefill(DeskJob* job) {
  DeskSequence* sequence = job->sequence;
  if (job->from_start) desk_sequence_restart(sequence);
  job->was_mapped = sequence->mapped;
  const guint64 before = sequence->tokens;
  job->status =
      desk_sequence_prefill(sequence, job->cancel, on_progress, job->document, &job->error);
  if (job->status == KV_CONTEXT_FULL) desk_sequence_lengths(sequence, &job->tokens, &job->context);
  if (sequence->tokens == before) return;
  post_progress(job->document, 0, 0, TRUE);
  kv_error error;
  job->save_status = desk_sequence_save(sequence, &error);
  GStatBuf facts;
  if (job->save_status == KV_OK && g_stat(sequence->path, &facts) == 0)
    job->file_bytes = (guint64)facts.st_size;
  if (job->save_status != KV_OK && (job->status == KV_OK || job->status == KV_CANCELLED))
    job->error = error;
}

static void answer(DeskJob* job) {
  job->was_mapped = job->sequence->mapped;
  const DeskAsking asking = {job->answer->question, job->cancel, desk_answer_on_text, job->answer};
  if (job->sequence->session)
    job->status = desk_sequence_ask(job->sequence, &asking, &job->outcome, &job->error);
  else refuse(job, KV_BAD_STATE, "Nothing of the document is prefilled.");
}

/* Replaces the copy of the text by its first part. */
static void shorten(DeskJob* job) {
  DeskSequence* sequence = job->sequence;
  g_autoptr(GBytes) part = desk_sequence_first_part(sequence);
  g_autofree char* path = desk_shelf_text_path(job->shelf, job->name);
  gsize size = 0;
  const char* text = part ? g_bytes_get_data(part, &size) : NULL;
  if (!part || !g_file_set_contents_full(path, text, (gssize)size, G_FILE_SET_CONTENTS_CONSISTENT,
                                         0600, NULL)) {
    refuse(job, KV_IO, "The first part could not be saved.");
    return;
  }
  if (sequence->bytes > size) desk_sequence_restart(sequence);
  g_bytes_unref(sequence->text);
  sequence->text = g_steal_pointer(&part);
}

static void keep(DeskJob* job) {
  g_autofree char* path = desk_shelf_conversation_path(job->shelf, job->name);
  g_autoptr(GError) error = NULL;
  if (!desk_conversation_save(path, job->content, &error)) refuse(job, KV_IO, error->message);
}

static void rename_files(DeskJob* job) {
  g_autofree char *from = desk_shelf_text_path(job->shelf, job->name),
                  *to = desk_shelf_text_path(job->shelf, job->new_name);
  const gboolean has_text = g_file_test(from, G_FILE_TEST_EXISTS);
  if (has_text && g_rename(from, to) != 0) {
    refuse(job, KV_IO, g_strerror(errno));
    return;
  }
  job->status = kv_library_rename(job->shelf->library, job->name, job->new_name, &job->error);
  if (job->status == KV_NOT_FOUND && has_text) job->status = KV_OK; /* not prefilled yet */
  if (job->status != KV_OK && has_text) g_rename(to, from);
  if (job->status != KV_OK) return;
  g_autoptr(GPtrArray) others = desk_shelf_all_caches(job->shelf, job->name);
  for (guint i = 0; i < others->len; ++i) {
    g_autofree char* folder = g_path_get_dirname(others->pdata[i]);
    const char* ending = strrchr(others->pdata[i], '.');
    g_autofree char* moved = g_strdup_printf("%s/%s%s", folder, job->new_name, ending);
    g_rename(others->pdata[i], moved);
  }
  if (!job->sequence->path) return;
  g_free(job->sequence->path);
  job->sequence->path = desk_shelf_cache_path(job->shelf, job->new_name);
}

static void remove_files(DeskJob* job) {
  desk_sequence_clear(job->sequence); /* the library removes no mapped file */
  job->status = kv_library_remove(job->shelf->library, job->name, &job->error);
  if (job->status == KV_NOT_FOUND) job->status = KV_OK;
  if (job->status != KV_OK) return;
  g_autoptr(GPtrArray) others = desk_shelf_all_caches(job->shelf, job->name);
  for (guint i = 0; i < others->len; ++i) g_unlink(others->pdata[i]);
  g_autofree char* text = desk_shelf_text_path(job->shelf, job->name);
  g_unlink(text);
}

void desk_job_work(gpointer pointer) {
  DeskJob* job = pointer;
  switch (job->kind) {
    case DESK_JOB_OPEN:
      open_saved(job);
      break;
    case DESK_JOB_PREFILL:
      prefill(job);
      break;
    case DESK_JOB_ASK:
      answer(job);
      break;
    case DESK_JOB_SHORTEN:
      shorten(job);
      break;
    case DESK_JOB_KEEP:
      keep(job);
      break;
    case DESK_JOB_RENAME:
      rename_files(job);
      break;
    case DESK_JOB_REMOVE:
      remove_files(job);
      break;
    case DESK_JOB_CLOSE:
      desk_sequence_clear(job->sequence);
      break;
  }
}
