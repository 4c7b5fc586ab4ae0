/* A document of the library: what is known of it, and its thread, which reads and answers one thing after another. Main loop only. */
#ifndef DESK_DOCUMENT_H
#define DESK_DOCUMENT_H

#include <glib-object.h>
#include <kvasir.h>

#include "answer.h"

typedef enum DeskState {
  DESK_CLOSED, /* nobody has looked at it */
  DESK_OPENING,
  DESK_READING,
  DESK_KEEPING, /* what was read is saved */
  DESK_ANSWERING,
  DESK_READY, /* to be asked: about all of it, or as far as it was read */
  DESK_FAILED /* nothing was read; the notice says why */
} DeskState;

#define DESK_TYPE_DOCUMENT (desk_document_get_type())
G_DECLARE_FINAL_TYPE(DeskDocument, desk_document, DESK, DOCUMENT, GObject)

/* Where documents are kept: texts/NAME.txt, and readings/MODEL/NAME.kv of each model that has read it. */
typedef struct DeskShelf {
  kv_library* library; /* the folder `readings` */
  char* all_readings;  /* the folder of the models' folders */
  char* readings;      /* that of this model; NULL until it is open */
  char* texts;
} DeskShelf;

/* The shelf outlives its documents' jobs. */
DeskDocument* desk_document_new(const DeskShelf* shelf, const char* name);

const char* desk_document_name(DeskDocument* document);
DeskState desk_document_state(DeskDocument* document);
gboolean desk_document_is_busy(DeskDocument* document);
/* NULL before it is open. */
GBytes* desk_document_text(DeskDocument* document);
guint64 desk_document_tokens(DeskDocument* document);
gboolean desk_document_is_complete(DeskDocument* document);
/* Of the text, how much was read when that was last stopped or over; 0 to 1. */
double desk_document_part(DeskDocument* document);
/* While it is read: 0 to 1, and seconds, less than 0 while unknown. */
double desk_document_share(DeskDocument* document);
double desk_document_seconds_left(DeskDocument* document);
/* What the user should know; NULL: nothing. The user, or what happens next, takes it away. */
const char* desk_document_notice(DeskDocument* document);
void desk_document_dismiss(DeskDocument* document);
/* One line about it, freed with g_free: "60,677 tokens · 195 MB · today", "Reading 43% · about 2 minutes left". */
char* desk_document_summary(DeskDocument* document);

/* What the library's list says. */
void desk_document_set_saved(DeskDocument* document, const kv_library_document* saved);

/* Maps what was saved of it; what cannot be used is read again, what was never read is read. Nothing if it is open. */
void desk_document_open(DeskDocument* document, kv_model* model);
/* Reads on from where it was stopped. */
void desk_document_go_on(DeskDocument* document);
/* Asks, when what is under way is over. */
void desk_document_ask(DeskDocument* document, DeskAnswer* answer);
/* Stops what is under way; what was read is kept. */
void desk_document_stop(DeskDocument* document);

typedef void (*DeskDone)(DeskDocument* document, const char* failure, gpointer user);

/* Not while it is busy. */
void desk_document_rename(DeskDocument* document, const char* name, DeskDone done, gpointer user);
/* Stops everything and removes its files. It stays as it was where that failed. */
void desk_document_remove(DeskDocument* document, DeskDone done, gpointer user);
/* Stops everything, keeps what was read, gives the model back. */
void desk_document_close(DeskDocument* document, DeskDone done, gpointer user);

/* Signal "changed": anything of the above. */

#endif
