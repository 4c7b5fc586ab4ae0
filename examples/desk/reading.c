#include "reading.h"

#include <json-glib/json-glib.h>
#include <string.h>
#include <utime.h>

static const gsize longest_marks = 1024; /* bytes; chat formats put a few words before a document */

void desk_reading_restart(DeskReading* reading) {
  kv_session_close(reading->session);
  reading->session = NULL;
  reading->tokens = 0;
  reading->bytes = reading->marks = 0;
  reading->mapped = FALSE;
}

void desk_reading_clear(DeskReading* reading) {
  desk_reading_restart(reading);
  kv_close(reading->model);
  g_clear_pointer(&reading->text, g_bytes_unref);
  g_clear_pointer(&reading->path, g_free);
  reading->model = NULL;
}

char* desk_reading_explain(const char* name, kv_status status, const char* message) {
  switch (status) {
    case KV_CORRUPT:
    case KV_NOT_A_CACHE:
      return g_strdup_printf("The saved reading of “%s” was damaged, so it is read again. (%s)",
                             name, message);
    case KV_MODEL_MISMATCH:
      return g_strdup_printf(
          "The saved reading of “%s” belongs to another model, so it is read again.", name);
    case KV_VERSION:
      return g_strdup_printf(
          "The saved reading of “%s” was made by a newer version, so it is read again.", name);
    default:
      return NULL;
  }
}

/* All that the session's tokens spell. */
static GBytes* sequence_text(const DeskReading* reading) {
  gsize count = 0, size = 0;
  g_autofree int32_t* tokens = desk_tokens_of(reading, &count);
  kv_detokenize(reading->model, tokens, count, 0, NULL, 0, &size, NULL);
  g_autofree char* text = g_malloc(size + 1);
  if (kv_detokenize(reading->model, tokens, count, 0, text, size, &size, NULL) != KV_OK)
    return g_bytes_new(NULL, 0);
  return g_bytes_new_take(g_steal_pointer(&text), size);
}

/* Finds the text in what the session has: behind the chat format's marks, as far as it was read. */
static gboolean find_text(DeskReading* reading) {
  g_autoptr(GBytes) sequence = sequence_text(reading);
  gsize held = 0, size = 0;
  const char *has = g_bytes_get_data(sequence, &held),
             *text = g_bytes_get_data(reading->text, &size);
  for (gsize marks = 0; marks < MIN(held, longest_marks); ++marks) {
    const gsize bytes = held - marks;
    if (bytes > size || memcmp(has + marks, text, bytes) != 0) continue;
    reading->marks = marks;
    reading->bytes = bytes;
    return TRUE;
  }
  return FALSE;
}

/* For a reading that has no text beside it, as one that another program saved. */
static void take_sequence_text(DeskReading* reading) {
  g_autoptr(GBytes) sequence = sequence_text(reading);
  gsize size = 0;
  const char* text = g_bytes_get_data(sequence, &size);
  char* valid = g_utf8_make_valid(text, (gssize)size);
  const gboolean same =
      strlen(valid) == size; /* otherwise passages are found a little beside their places */
  reading->bytes = same ? size : strlen(valid);
  reading->text = g_bytes_new_take(valid, strlen(valid));
}

static void count_tokens(DeskReading* reading) {
  size_t count = 0;
  kv_session_tokens(reading->session, NULL, 0, &count, NULL);
  reading->tokens = count;
}

kv_status desk_reading_load(DeskReading* reading, const char* name, char** why, kv_error* error) {
  *why = NULL;
  desk_reading_restart(reading);
  const kv_status status =
      kv_load(reading->model, reading->path, NULL, NULL, &reading->session, error);
  if (status == KV_NOT_FOUND) return KV_OK;
  if (status != KV_OK) {
    *why = desk_reading_explain(name, status, error->message);
    return *why ? KV_OK : status;
  }
  reading->mapped = TRUE;
  count_tokens(reading);
  utime(reading->path, NULL); /* a document's last use is its file's time */
  if (!reading->text) {
    take_sequence_text(reading);
  } else if (!find_text(reading)) {
    *why =
        g_strdup_printf("The saved reading of “%s” is of another text, so it is read again.", name);
    desk_reading_restart(reading);
  }
  return KV_OK;
}

gboolean desk_reading_is_complete(const DeskReading* reading) {
  return reading->session && reading->text && reading->bytes >= g_bytes_get_size(reading->text);
}

kv_status desk_reading_go_on(DeskReading* reading, kv_cancel* cancel, kv_progress_fn progress,
                             void* user, kv_error* error) {
  kv_status status = KV_OK;
  if (!reading->session) status = kv_session_open(reading->model, NULL, &reading->session, error);
  if (status != KV_OK) return status;
  gsize size = 0;
  const char* text = g_bytes_get_data(reading->text, &size);
  kv_call_options options;
  kv_call_options_init(&options, sizeof options);
  options.cancel = cancel;
  options.progress = progress;
  options.progress_user = user;
  uint64_t bytes = 0;
  status = kv_prefill(reading->session, text + reading->bytes, size - reading->bytes, &options,
                      NULL, &bytes, error);
  const gsize read = reading->bytes + bytes;
  count_tokens(reading);
  if (read == 0) {
    desk_reading_restart(reading);
  } else if (
      !find_text(
          reading)) { /* a tokenizer that does not spell what it was given: passages are found a little beside their places */
    reading->bytes = read;
  }
  return status;
}

kv_status desk_reading_save(DeskReading* reading, kv_error* error) {
  kv_status status = kv_save(reading->session, reading->path, NULL, error);
  kv_session* mapped = NULL;
  if (status == KV_OK &&
      kv_load(reading->model, reading->path, NULL, NULL, &mapped, NULL) == KV_OK) {
    kv_session_close(reading->session);
    reading->session = mapped;
    reading->mapped = TRUE;
  }
  return status;
}

/* How the answer was found, from what the library tells of its last one. */
static void take_statistics(const DeskReading* reading, DeskOutcome* outcome) {
  size_t size = 0;
  kv_stats(reading->session, NULL, 0, &size, NULL);
  g_autofree char* json = g_malloc0(size + 1);
  g_autoptr(JsonParser) parser = json_parser_new();
  if (kv_stats(reading->session, json, size, &size, NULL) != KV_OK ||
      !json_parser_load_from_data(parser, json, -1, NULL))
    return;
  JsonObject* stats = json_node_get_object(json_parser_get_root(parser));
  const double present = (double)outcome->facts.tokens_present;
  outcome->strategy =
      g_strdup(json_object_get_string_member_with_default(stats, "strategy_planned", ""));
  outcome->tokens_read = outcome->pages_touched =
      1; /* where all is in the window, which is always read */
  if (present <= 0) return;
  outcome->tokens_read = (double)outcome->facts.tokens_read / present;
  outcome->pages_touched =
      json_object_get_double_member_with_default(stats, "last_pages_touched", 0) *
      json_object_get_double_member_with_default(stats, "page_tokens", 0) / present;
}

kv_status desk_reading_ask(DeskReading* reading, const char* question, kv_cancel* cancel,
                           kv_text_fn on_text, void* user, DeskOutcome* outcome, kv_error* error) {
  kv_generate_options options;
  kv_generate_options_init(&options, sizeof options);
  options.cancel = cancel;
  options.trace = 1;
  outcome->facts.struct_size = sizeof outcome->facts;
  kv_status status = kv_generate(reading->session, question, strlen(question), &options, on_text,
                                 user, &outcome->facts, error);
  if (status != KV_OK && status != KV_CANCELLED) return status;
  take_statistics(reading, outcome);
  if (outcome->facts.answer_tokens == 0) return status;
  const kv_status traced = desk_passages_of(reading, &outcome->passages, error);
  return traced == KV_OK ? status : traced;
}

void desk_outcome_clear(DeskOutcome* outcome) {
  g_clear_pointer(&outcome->passages, g_ptr_array_unref);
  g_clear_pointer(&outcome->strategy, g_free);
}
