/* A document of the library, and its thread, which prefills and answers one job after another. Main
 * loop only. */
#ifndef DESK_DOCUMENT_H
#define DESK_DOCUMENT_H

#include <glib-object.h>
#include <kvasir.h>

#include "answer.h"

typedef enum DeskState {
  DESK_CLOSED, /* not opened in this run */
  DESK_OPENING,
  DESK_PREFILLING,
  DESK_SAVING, /* the prefill */
  DESK_ANSWERING,
  DESK_READY, /* for questions about all of it, or about the prefilled part */
  DESK_FAILED /* nothing is prefilled; the notice says why */
} DeskState;

/* What the user can do about a notice. */
typedef enum DeskRemedy { DESK_REMEDY_NONE, DESK_REMEDY_TRY_AGAIN, DESK_REMEDY_SHORTEN } DeskRemedy;

#define DESK_TYPE_DOCUMENT (desk_document_get_type())
G_DECLARE_FINAL_TYPE(DeskDocument, desk_document, DESK, DOCUMENT, GObject)

/* Folders of the documents: texts/NAME.txt, and caches/MODEL/NAME.kv and NAME.conversation of each
 * model that has prefilled them. */
typedef struct DeskShelf {
  kv_library* library; /* the folder `caches` */
  char* all_caches;    /* the parent of the models' folders */
  char* caches;        /* the folder of this model; NULL until it is open */
  char* texts;
} DeskShelf;

/* The shelf outlives the jobs of its documents. */
DeskDocument* desk_document_new(const DeskShelf* shelf, const char* name);

const char* desk_document_name(DeskDocument* document);
DeskState desk_document_state(DeskDocument* document);
gboolean desk_document_is_busy(DeskDocument* document);
/* NULL before it is open. */
GBytes* desk_document_text(DeskDocument* document);
/* Questions and answers, the oldest first: DeskAnswer. */
GPtrArray* desk_document_answers(DeskDocument* document);
gboolean desk_document_is_complete(DeskDocument* document);
/* The prefilled part of the text when the last prefill ended, 0 to 1. */
double desk_document_part(DeskDocument* document);
/* Progress of the running prefill: 0 to 1; seconds, below 0 while unknown. */
double desk_document_progress_part(DeskDocument* document);
double desk_document_seconds_left(DeskDocument* document);
/* A message for the user; NULL: none. The user or the next job removes it. */
const char* desk_document_notice(DeskDocument* document);
DeskRemedy desk_document_remedy(DeskDocument* document);
void desk_document_dismiss(DeskDocument* document);
/* One line, freed with g_free: "about 140 pages · today", "14% prefilled · today". */
char* desk_document_summary(DeskDocument* document);
/* Length in words, freed with g_free: "about 140 pages". */
char* desk_document_length(DeskDocument* document);

/* Facts from the library's list, the text's size, and the conversation file. */
void desk_document_set_saved(DeskDocument* document, const kv_library_document* saved);
void desk_document_set_known(DeskDocument* document, guint64 text_bytes, double part);

/* Maps the cache file. Prefills what is not prefilled or cannot be used. Does nothing if it is
 * open. */
void desk_document_open(DeskDocument* document, kv_model* model);
/* Continues a stopped prefill. */
void desk_document_resume(DeskDocument* document);
/* Shortens a text that is too long for the model to its first part, and prefills that. */
void desk_document_shorten(DeskDocument* document);
/* Asks after the running jobs. */
void desk_document_ask(DeskDocument* document, DeskAnswer* answer);
/* Stops the running job. The prefilled part stays. */
void desk_document_stop(DeskDocument* document);

typedef void (*DeskDone)(DeskDocument* document, const char* failure, gpointer user);

/* Not while it is busy. */
void desk_document_rename(DeskDocument* document, const char* name, DeskDone done, gpointer user);
/* Stops all jobs and removes the files. After a failure the document stays. */
void desk_document_remove(DeskDocument* document, DeskDone done, gpointer user);
/* Stops all jobs, saves the prefilled part and releases the model. */
void desk_document_close(DeskDocument* document, DeskDone done, gpointer user);

/* Signal "changed": any of the above. */

#endif
