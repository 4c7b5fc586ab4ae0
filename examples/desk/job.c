#include "job.h"

#include <errno.h>
#include <glib/gstdio.h>
#include <string.h>

#include "worker.h"

char* desk_shelf_reading_path(const DeskShelf* shelf, const char* name) {
  return g_strdup_printf("%s/%s.kv", shelf->readings, name);
}
GPtrArray* desk_shelf_all_readings(const DeskShelf* shelf, const char* name) {
  GPtrArray* paths = g_ptr_array_new_with_free_func(g_free);
  g_autoptr(GDir) models = g_dir_open(shelf->all_readings, 0, NULL);
  const char* model = NULL;
  while (models && (model = g_dir_read_name(models))) {
    char* path = g_strdup_printf("%s/%s/%s.kv", shelf->all_readings, model, name);
    if (g_file_test(path, G_FILE_TEST_EXISTS)) g_ptr_array_add(paths, path);
    else g_free(path);
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
  g_object_unref(job->document);
  g_free(job);
}

/* ---- what the window sees meanwhile --------------------------------------------------------------------------------- */

typedef struct Progress {
  DeskDocument* document;
  guint64 done, total; /* tokens */
  gboolean keeping;
} Progress;

static void show_progress(gpointer pointer) {
  Progress* progress = pointer;
  desk_document_progress(progress->document, progress->done, progress->total, progress->keeping);
  g_object_unref(progress->document);
  g_free(progress);
}

static void tell_progress(DeskDocument* document, guint64 done, guint64 total, gboolean keeping) {
  Progress* progress = g_new(Progress, 1);
  *progress = (Progress){g_object_ref(document), done, total, keeping};
  desk_worker_tell(show_progress, progress);
}

static int32_t on_progress(int32_t phase, uint64_t done, uint64_t total, void* user) {
  if (phase == KV_PHASE_PREFILL) tell_progress(user, done, total, FALSE);
  return 0;
}

typedef struct Part {
  DeskAnswer* answer;
  char* text;
} Part;

static void show_part(gpointer pointer) {
  Part* part = pointer;
  part->answer->state = DESK_ANSWER_COMING;
  g_string_append(part->answer->text, part->text);
  desk_answer_changed(part->answer);
  g_object_unref(part->answer);
  g_free(part->text);
  g_free(part);
}

static int32_t on_text(const char* text, size_t size, void* user) {
  Part* part = g_new(Part, 1);
  *part = (Part){g_object_ref(user), g_utf8_make_valid(text, (gssize)size)};
  desk_worker_tell(show_part, part);
  return 0;
}

/* ---- the work ------------------------------------------------------------------------------------------------------- */

static void refuse(DeskJob* job, kv_status status, const char* message) {
  job->status = job->error.status = status;
  g_strlcpy(job->error.message, message, sizeof job->error.message);
}

static void open_saved(DeskJob* job) {
  DeskReading* reading = job->reading;
  if (!reading->text) {
    g_autofree char *path = desk_shelf_text_path(job->shelf, job->name), *text = NULL;
    gsize size = 0;
    if (g_file_get_contents(path, &text, &size, NULL) && size > 0 &&
        g_utf8_validate(text, (gssize)size, NULL))
      reading->text = g_bytes_new_take(g_steal_pointer(&text), size);
  }
  job->status = desk_reading_load(reading, job->name, &job->why, &job->error);
  if (job->status != KV_OK || reading->text) return;
  g_autofree char* message =
      g_strdup_printf("%s%sIts text is not kept beside it: open the file again.",
                      job->why ? job->why : "", job->why ? " " : "");
  refuse(job, KV_NOT_FOUND, message);
}

static void read_on(DeskJob* job) {
  DeskReading* reading = job->reading;
  if (job->from_start) desk_reading_restart(reading);
  job->was_mapped = reading->mapped;
  const guint64 before = reading->tokens;
  job->status = desk_reading_go_on(reading, job->cancel, on_progress, job->document, &job->error);
  if (reading->tokens == before) return;
  tell_progress(job->document, 0, 0, TRUE);
  kv_error error;
  job->save_status = desk_reading_save(reading, &error);
  GStatBuf facts;
  if (job->save_status == KV_OK && g_stat(reading->path, &facts) == 0)
    job->file_bytes = (guint64)facts.st_size;
  if (job->save_status != KV_OK && (job->status == KV_OK || job->status == KV_CANCELLED))
    job->error = error;
}

static void answer(DeskJob* job) {
  job->was_mapped = job->reading->mapped;
  if (job->reading->session)
    job->status = desk_reading_ask(job->reading, job->answer->question, job->cancel, on_text,
                                   job->answer, &job->outcome, &job->error);
  else refuse(job, KV_BAD_STATE, "Nothing of the document has been read.");
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
  if (job->status == KV_NOT_FOUND && has_text) job->status = KV_OK; /* it was not read yet */
  if (job->status != KV_OK && has_text) g_rename(to, from);
  if (job->status != KV_OK) return;
  g_autoptr(GPtrArray) others = desk_shelf_all_readings(job->shelf, job->name);
  for (guint i = 0; i < others->len; ++i) {
    g_autofree char* folder = g_path_get_dirname(others->pdata[i]);
    g_autofree char* moved = g_strdup_printf("%s/%s.kv", folder, job->new_name);
    g_rename(others->pdata[i], moved);
  }
  if (!job->reading->path) return;
  g_free(job->reading->path);
  job->reading->path = desk_shelf_reading_path(job->shelf, job->new_name);
}

static void remove_files(DeskJob* job) {
  desk_reading_clear(job->reading); /* the library does not remove what is in use */
  job->status = kv_library_remove(job->shelf->library, job->name, &job->error);
  if (job->status == KV_NOT_FOUND) job->status = KV_OK;
  if (job->status != KV_OK) return;
  g_autoptr(GPtrArray) others = desk_shelf_all_readings(job->shelf, job->name);
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
    case DESK_JOB_READ:
      read_on(job);
      break;
    case DESK_JOB_ASK:
      answer(job);
      break;
    case DESK_JOB_RENAME:
      rename_files(job);
      break;
    case DESK_JOB_REMOVE:
      remove_files(job);
      break;
    case DESK_JOB_CLOSE:
      desk_reading_clear(job->reading);
      break;
  }
}
