/* One thing that a document's thread does: filled on the main loop, done on the thread, then looked at on the main loop again. */
#ifndef DESK_JOB_H
#define DESK_JOB_H

#include "answer.h"
#include "document.h"
#include "reading.h"

typedef enum DeskJobKind {
  DESK_JOB_OPEN,
  DESK_JOB_READ,
  DESK_JOB_ASK,
  DESK_JOB_RENAME,
  DESK_JOB_REMOVE,
  DESK_JOB_CLOSE
} DeskJobKind;

typedef struct DeskJob {
  DeskJobKind kind;
  DeskDocument* document;
  const DeskShelf* shelf;
  DeskReading* reading; /* the document's: no other job uses it meanwhile */
  kv_cancel* cancel;
  char* name;          /* the document's, when the job was made */
  char* new_name;      /* RENAME */
  DeskAnswer* answer;  /* ASK */
  gboolean from_start; /* READ */
  DeskDone done;
  gpointer user;
  /* What came of it. */
  kv_status status, save_status;
  kv_error error;
  char* why;           /* OPEN: why what was saved is not used */
  gboolean was_mapped; /* READ, ASK: the session was over the saved file */
  guint64 file_bytes;  /* READ: of the saved file; 0: it was not saved */
  DeskOutcome outcome; /* ASK */
} DeskJob;

DeskJob* desk_job_new(DeskJobKind kind, DeskDocument* document, const char* name);
void desk_job_free(DeskJob* job);

/* On the thread. */
void desk_job_work(gpointer job);

/* On the main loop, from the thread: desk_document_progress, the answer's text. */
void desk_document_progress(DeskDocument* document, guint64 done, guint64 total, gboolean keeping);

char* desk_shelf_reading_path(const DeskShelf* shelf, const char* name);
/* Paths of the document's readings, of all models. */
GPtrArray* desk_shelf_all_readings(const DeskShelf* shelf, const char* name);
char* desk_shelf_text_path(const DeskShelf* shelf, const char* name);

#endif
