/* What a document's thread does with the library: loads what was saved, reads the rest, saves, answers. It knows no window; one thread at a time uses it. */
#ifndef DESK_READING_H
#define DESK_READING_H

#include <glib.h>
#include <kvasir.h>

typedef struct DeskReading {
  kv_model* model;
  kv_session* session; /* NULL: nothing is read */
  GBytes* text;        /* the document; NULL before it is known */
  char* path;          /* of the saved reading */
  guint64 tokens;      /* that the session has */
  gsize bytes;         /* of the text, that these tokens are */
  gsize marks;         /* bytes that the chat format puts before the text */
  gboolean mapped;     /* the session is over the saved file */
} DeskReading;

/* Part of the document that an answer attended. */
typedef struct DeskPassage {
  double share;     /* of all attention that was noted */
  gsize begin, end; /* bytes of the text: what is quoted */
  double at;        /* how far into the document, 0 to 1 */
  char* quote;      /* one line */
} DeskPassage;

typedef struct DeskOutcome {
  kv_answer facts;
  GPtrArray* passages;  /* of DeskPassage, the one attended most first */
  double tokens_read;   /* of what exact attention would have read, 0 to 1 */
  double pages_touched; /* likewise */
  char* strategy;       /* that answered */
} DeskOutcome;

void desk_outcome_clear(DeskOutcome* outcome);

/* Gives the model and the session back, and all memory. */
void desk_reading_clear(DeskReading* reading);

/* Maps what was saved. KV_OK: there is a session, or nothing can be used and *why says so in a sentence, NULL where nothing was saved. Where the text is
 * not known it becomes what the saved tokens spell. */
kv_status desk_reading_load(DeskReading* reading, const char* name, char** why, kv_error* error);

/* "The saved reading of “NAME” was damaged ... It is read again.", for a status after which that is the way; NULL for others. */
char* desk_reading_explain(const char* name, kv_status status, const char* message);

/* Forgets what was read. */
void desk_reading_restart(DeskReading* reading);

/* Reads from where it is to the text's end; when it is cancelled what was read stays. Then everything was read, or may be gone on with. */
kv_status desk_reading_go_on(DeskReading* reading, kv_cancel* cancel, kv_progress_fn progress,
                             void* user, kv_error* error);
gboolean desk_reading_is_complete(const DeskReading* reading);

/* Keeps what was read, and from then on uses the file in place of memory. */
kv_status desk_reading_save(DeskReading* reading, kv_error* error);

/* Answers; what was read stays as it was. outcome is also filled when the answer is stopped. */
kv_status desk_reading_ask(DeskReading* reading, const char* question, kv_cancel* cancel,
                           kv_text_fn on_text, void* user, DeskOutcome* outcome, kv_error* error);

/* Where text[begin, end) is to be quoted: whole sentences where they are near, else whole words. (passages.c) */
void desk_passage_widen(const char* text, gsize size, gsize* begin, gsize* end);
/* The passages that the last answer attended. KV_OK also where there is none. (passages.c) */
kv_status desk_passages_of(const DeskReading* reading, GPtrArray** out, kv_error* error);
/* How many bytes the first `count` tokens of the session are, marks included. (passages.c) */
gsize desk_bytes_of_tokens(const DeskReading* reading, const int32_t* tokens, gsize count);
int32_t* desk_tokens_of(const DeskReading* reading, gsize* count);

#endif
