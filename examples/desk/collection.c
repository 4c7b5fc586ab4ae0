#include "collection.h"

#include <string.h>

#include "job.h"

enum { max_sources = 4 };

/* The name of the document at a path of the library. */
static char* name_of(const char* path) {
  char* name = g_path_get_basename(path);
  if (g_str_has_suffix(name, ".kv")) name[strlen(name) - 3] = '\0';
  return name;
}

/* A passage with the name of its document; NULL: the text is not known. */
static DeskPassage* source_of(kv_session* session, const DeskShelf* shelf, const kv_passage* raw) {
  kv_session_document document;
  kv_init(&document, sizeof document);
  if (kv_session_get_document(session, raw->document, &document, NULL) != KV_OK) return NULL;
  g_autofree char* name = name_of(document.path);
  g_autofree char *path = desk_shelf_text_path(shelf, name), *text = NULL;
  gsize size = 0;
  if (!g_file_get_contents(path, &text, &size, NULL) || !g_utf8_validate(text, (gssize)size, NULL))
    return NULL;
  DeskPassage* passage = desk_passage_of(text, size, raw);
  if (passage) passage->document = g_steal_pointer(&name);
  return passage;
}

static kv_status sources_of(kv_session* session, const DeskShelf* shelf, GPtrArray** out,
                            kv_error* error) {
  kv_passage raw[64]; /* the maximum */
  size_t count = 0;
  const kv_status status = kv_session_passages(session, raw, G_N_ELEMENTS(raw), &count, error);
  if (status != KV_OK) return status;
  *out = desk_passages_new();
  for (gsize i = 0; i < count && (*out)->len < max_sources; ++i) {
    DeskPassage* passage = source_of(session, shelf, &raw[i]);
    if (passage) g_ptr_array_add(*out, passage);
  }
  return KV_OK;
}

static guint count_attended(kv_session* session) {
  kv_session_document document;
  kv_init(&document, sizeof document);
  guint attended = 0;
  for (uint32_t i = 0; kv_session_get_document(session, i, &document, NULL) == KV_OK; ++i)
    if (document.flags & KV_DOCUMENT_ATTENDED) ++attended;
  return attended;
}

kv_status desk_collection_ask(const DeskShelf* shelf, kv_model* model, const DeskAsking* asking,
                              DeskOutcome* outcome, kv_error* error) {
  kv_session* session = NULL;
  kv_status status =
      kv_library_compose(shelf->library, model, NULL, 0, NULL, NULL, &session, error);
  if (status != KV_OK) return status;
  status = desk_session_ask(session, asking, outcome, error);
  if ((status == KV_OK || status == KV_CANCELLED) && outcome->facts.answer_tokens > 0) {
    outcome->documents = count_attended(session);
    const kv_status traced = sources_of(session, shelf, &outcome->passages, error);
    if (traced != KV_OK) status = traced;
  }
  kv_session_close(session);
  return status;
}
