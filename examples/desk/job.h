/* One job of a document's thread. The main loop fills it, the thread runs it, and the main loop
 * takes its results. */
#ifndef DESK_JOB_H
#define DESK_JOB_H

#include "answer.h"
#include "conversation.h"
#include "document.h"
#include "sequence.h"

typedef enum DeskJobKind {
  DESK_JOB_OPEN,
  DESK_JOB_PREFILL,
  DESK_JOB_ASK,
  DESK_JOB_SHORTEN,
  DESK_JOB_KEEP, /* write the conversation */
  DESK_JOB_RENAME,
  DESK_JOB_REMOVE,
  DESK_JOB_CLOSE
} DeskJobKind;

typedef struct DeskJob {
  DeskJobKind kind;
  DeskDocument* document;
  const DeskShelf* shelf;
  DeskSequence* sequence; /* of the document; this job alone uses it */
  kv_cancel* cancel;
  char* name;          /* of the document when the job was made */
  char* new_name;      /* RENAME */
  DeskAnswer* answer;  /* ASK */
  gboolean from_start; /* PREFILL */
  char* content;       /* KEEP */
  DeskDone done;
  gpointer user;
  /* Results. */
  kv_status status, save_status;
  kv_error error;
  char* why;                     /* OPEN: why the cache file is not used */
  DeskConversation conversation; /* OPEN */
  gboolean was_mapped;           /* PREFILL, ASK: the session mapped the cache file */
  guint64 file_bytes;            /* PREFILL: of the cache file; 0: not saved */
  DeskOutcome outcome;           /* ASK */
  guint64 tokens, context;       /* PREFILL: with KV_CONTEXT_FULL, lengths of text and model */
} DeskJob;

DeskJob* desk_job_new(DeskJobKind kind, DeskDocument* document, const char* name);
void desk_job_free(DeskJob* job);

/* On the thread. */
void desk_job_work(gpointer job);

/* Runs on the main loop, posted by the thread. */
void desk_document_progress(DeskDocument* document, guint64 done, guint64 total, gboolean saving);

char* desk_shelf_cache_path(const DeskShelf* shelf, const char* name);
char* desk_shelf_conversation_path(const DeskShelf* shelf, const char* name);
/* Paths of the files NAME.kv and NAME.conversation of all models. */
GPtrArray* desk_shelf_all_caches(const DeskShelf* shelf, const char* name);
char* desk_shelf_text_path(const DeskShelf* shelf, const char* name);

#endif
