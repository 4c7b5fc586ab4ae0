/* The work of a document's thread: load the cache file, prefill the rest, save, answer. Independent
 * of any window. One thread at a time uses a DeskSequence. */
#ifndef DESK_SEQUENCE_H
#define DESK_SEQUENCE_H

#include <glib.h>
#include <kvasir.h>

typedef struct DeskSequence {
  kv_model* model;
  kv_session* session; /* NULL: nothing is prefilled */
  GBytes* text;        /* the document; NULL: unknown */
  char* path;          /* of the cache file */
  guint64 tokens;      /* of the session */
  gsize bytes;         /* of the text, that these tokens spell */
  gboolean mapped;     /* the session maps the cache file */
} DeskSequence;

/* A passage of the document that an answer attended. */
typedef struct DeskPassage {
  double share;     /* of all recorded attention */
  gsize begin, end; /* bytes of the text: the quote */
  double at;        /* place in the document, 0 to 1 */
  char* quote;      /* one line */
  char* document;   /* of several, its name; NULL: the only one */
} DeskPassage;

typedef struct DeskOutcome {
  kv_answer facts;
  GPtrArray* passages; /* of DeskPassage, the largest share first; NULL: none */
  double tokens_read;  /* part of what full attention reads, 0 to 1 */
  char* strategy;      /* of the answer */
  guint documents;     /* that it attended, of several; 0: there is one */
} DeskOutcome;

void desk_outcome_clear(DeskOutcome* outcome);

typedef struct DeskAsking {
  const char* question;
  kv_cancel* cancel;
  kv_text_fn on_text;
  void* user; /* of on_text */
} DeskAsking;

/* Answers, and records what passages need. The session stays as before. Fills *outcome, but for the
 * passages, also for a stopped answer. */
kv_status desk_session_ask(kv_session* session, const DeskAsking* asking, DeskOutcome* outcome,
                           kv_error* error);

/* An empty array of DeskPassage, which owns its elements. (passages.c) */
GPtrArray* desk_passages_new(void);

/* Releases the model, the session and all memory. */
void desk_sequence_clear(DeskSequence* sequence);

/* Maps the cache file. KV_OK: there is a session; or the file cannot be used, and *why is a
 * sentence that says so; or there is no file, and *why is NULL. Without a text, the text becomes
 * what the tokens spell. */
kv_status desk_sequence_load(DeskSequence* sequence, const char* name, char** why, kv_error* error);

/* A sentence that explains a status after which the document is prefilled again. NULL for other
 * statuses. */
char* desk_sequence_explain(const char* name, kv_status status);

/* Drops the session. */
void desk_sequence_restart(DeskSequence* sequence);

/* Prefills the rest of the text. After a cancel the complete chunks stay. */
kv_status desk_sequence_prefill(DeskSequence* sequence, kv_cancel* cancel, kv_progress_fn progress,
                                void* user, kv_error* error);
gboolean desk_sequence_is_complete(const DeskSequence* sequence);

/* Tokens of the whole text, and the context length of the model. */
void desk_sequence_lengths(const DeskSequence* sequence, guint64* tokens, guint64* context);

/* The first part of the text that fits the model with questions and answers; NULL: none. */
GBytes* desk_sequence_first_part(const DeskSequence* sequence);

/* Saves the cache file and maps it in place of memory. */
kv_status desk_sequence_save(DeskSequence* sequence, kv_error* error);

/* Answers as desk_session_ask, and fills the passages. */
kv_status desk_sequence_ask(DeskSequence* sequence, const DeskAsking* asking, DeskOutcome* outcome,
                            kv_error* error);

/* Widens text[begin, end) to whole sentences where they are near, otherwise to whole words.
 * (passages.c) */
void desk_passage_widen(const char* text, gsize size, gsize* begin, gsize* end);
/* A passage of a document's text; NULL: its place is not known. (passages.c) */
DeskPassage* desk_passage_of(const char* text, gsize size, const kv_passage* raw);
/* Passages of the last answer. KV_OK also where there is none. (passages.c) */
kv_status desk_passages_of(const DeskSequence* sequence, GPtrArray** out, kv_error* error);

#endif
