#include "sequence.h"

#include <string.h>
#include <utime.h>

static const gsize max_marks = 1024;  /* bytes of the chat format's marks before a document */
static const guint64 max_talk = 4096; /* tokens for a question and its answer */

void desk_sequence_restart(DeskSequence* sequence) {
  kv_session_close(sequence->session);
  sequence->session = NULL;
  sequence->tokens = 0;
  sequence->bytes = 0;
  sequence->mapped = FALSE;
}

void desk_sequence_clear(DeskSequence* sequence) {
  desk_sequence_restart(sequence);
  kv_close(sequence->model);
  g_clear_pointer(&sequence->text, g_bytes_unref);
  g_clear_pointer(&sequence->path, g_free);
  sequence->model = NULL;
}

char* desk_sequence_explain(const char* name, kv_status status) {
  const char* reason = status == KV_CORRUPT || status == KV_NOT_A_CACHE ? "is damaged"
                       : status == KV_MODEL_MISMATCH                    ? "belongs to another model"
                       : status == KV_VERSION ? "comes from a newer version"
                                              : NULL;
  if (!reason) return NULL;
  return g_strdup_printf("The saved file of “%s” %s. The document is prefilled again.", name,
                         reason);
}

static int32_t* tokens_of(const DeskSequence* sequence, gsize* count) {
  *count = 0;
  kv_session_tokens(sequence->session, NULL, 0, count, NULL);
  int32_t* tokens = g_new(int32_t, *count + 1);
  if (kv_session_tokens(sequence->session, tokens, *count, count, NULL) != KV_OK) *count = 0;
  return tokens;
}

static GBytes* spell(const DeskSequence* sequence, const int32_t* tokens, gsize count) {
  gsize size = 0;
  kv_detokenize(sequence->model, tokens, count, 0, NULL, 0, &size, NULL);
  g_autofree char* text = g_malloc(size + 1);
  if (kv_detokenize(sequence->model, tokens, count, 0, text, size, &size, NULL) != KV_OK)
    return g_bytes_new(NULL, 0);
  return g_bytes_new_take(g_steal_pointer(&text), size);
}

/* What all tokens of the session spell. */
static GBytes* sequence_text(const DeskSequence* sequence) {
  gsize count = 0;
  g_autofree int32_t* tokens = tokens_of(sequence, &count);
  return spell(sequence, tokens, count);
}

/* Finds the prefilled part of the text in the sequence, behind the marks of the chat format. */
static gboolean find_text(DeskSequence* sequence) {
  g_autoptr(GBytes) all = sequence_text(sequence);
  gsize held = 0, size = 0;
  const char *has = g_bytes_get_data(all, &held), *text = g_bytes_get_data(sequence->text, &size);
  for (gsize marks = 0; marks < MIN(held, max_marks); ++marks) {
    const gsize bytes = held - marks;
    if (bytes > size || memcmp(has + marks, text, bytes) != 0) continue;
    sequence->bytes = bytes;
    return TRUE;
  }
  return FALSE;
}

static int32_t* tokenize(const DeskSequence* sequence, GBytes* text, gsize* count) {
  gsize size = 0;
  const char* data = text ? g_bytes_get_data(text, &size) : NULL;
  *count = 0;
  kv_tokenize(sequence->model, data, size, KV_TOKENIZE_DOCUMENT, NULL, NULL, 0, count, NULL);
  int32_t* tokens = g_new(int32_t, *count + 1);
  if (kv_tokenize(sequence->model, data, size, KV_TOKENIZE_DOCUMENT, NULL, tokens, *count, count,
                  NULL) != KV_OK)
    *count = 0;
  return tokens;
}

/* For a cache file without a text, such as one of another program. */
static void take_sequence_text(DeskSequence* sequence) {
  g_autoptr(GBytes) all = sequence_text(sequence);
  gsize count = 0, marks = 0, size = 0;
  g_autofree int32_t* tokens = tokenize(sequence, NULL, &count);
  g_autoptr(GBytes) opening = spell(sequence, tokens, count);
  const char *text = g_bytes_get_data(all, &size), *begin = g_bytes_get_data(opening, &marks);
  if (marks > size || (marks > 0 && memcmp(text, begin, marks) != 0)) marks = 0;
  char* valid = g_utf8_make_valid(text + marks, (gssize)(size - marks));
  sequence->bytes = strlen(valid);
  sequence->text = g_bytes_new_take(valid, strlen(valid));
}

static void count_tokens(DeskSequence* sequence) {
  size_t count = 0;
  kv_session_tokens(sequence->session, NULL, 0, &count, NULL);
  sequence->tokens = count;
}

kv_status desk_sequence_load(DeskSequence* sequence, const char* name, char** why,
                             kv_error* error) {
  *why = NULL;
  desk_sequence_restart(sequence);
  const kv_status status =
      kv_load(sequence->model, sequence->path, NULL, NULL, &sequence->session, error);
  if (status == KV_NOT_FOUND) return KV_OK;
  if (status != KV_OK) {
    *why = desk_sequence_explain(name, status);
    return *why ? KV_OK : status;
  }
  sequence->mapped = TRUE;
  count_tokens(sequence);
  utime(sequence->path, NULL); /* the file's time is the document's last use */
  if (!sequence->text) {
    take_sequence_text(sequence);
  } else if (!find_text(sequence)) {
    *why = g_strdup_printf(
        "The saved file of “%s” has another text. The document is prefilled again.", name);
    desk_sequence_restart(sequence);
  }
  return KV_OK;
}

gboolean desk_sequence_is_complete(const DeskSequence* sequence) {
  return sequence->session && sequence->text && sequence->bytes >= g_bytes_get_size(sequence->text);
}

kv_status desk_sequence_prefill(DeskSequence* sequence, kv_cancel* cancel, kv_progress_fn progress,
                                void* user, kv_error* error) {
  kv_status status = KV_OK;
  if (!sequence->session)
    status = kv_session_open(sequence->model, NULL, &sequence->session, error);
  if (status != KV_OK) return status;
  gsize size = 0;
  const char* text = g_bytes_get_data(sequence->text, &size);
  kv_control control;
  kv_init(&control, sizeof control);
  control.cancel = cancel;
  control.progress = progress;
  control.user = user;
  uint64_t bytes = 0;
  status = kv_prefill(sequence->session, text + sequence->bytes, size - sequence->bytes, &control,
                      NULL, &bytes, error);
  const gsize done = sequence->bytes + bytes;
  count_tokens(sequence);
  if (done == 0) desk_sequence_restart(sequence);
  else if (!find_text(sequence)) sequence->bytes = done; /* the tokens spell another text */
  return status;
}

static guint64 context_of(const DeskSequence* sequence) {
  kv_model_info info;
  kv_init(&info, sizeof info);
  kv_model_get_info(sequence->model, &info, NULL);
  return info.context_tokens;
}

void desk_sequence_lengths(const DeskSequence* sequence, guint64* tokens, guint64* context) {
  gsize count = 0;
  g_free(tokenize(sequence, sequence->text, &count));
  *tokens = count;
  *context = context_of(sequence);
}

GBytes* desk_sequence_first_part(const DeskSequence* sequence) {
  const guint64 context = context_of(sequence), room = MIN(max_talk, context / 4);
  gsize count = 0, marks_count = 0, size = 0;
  g_autofree int32_t *tokens = tokenize(sequence, sequence->text, &count),
                     *marks = tokenize(sequence, NULL, &marks_count);
  g_autoptr(GBytes) part = spell(sequence, tokens, MIN(count, context - room));
  g_autoptr(GBytes) opening = spell(sequence, marks, marks_count);
  const char* text = g_bytes_get_data(sequence->text, &size);
  gsize end = g_bytes_get_size(part) - MIN(g_bytes_get_size(part), g_bytes_get_size(opening));
  end = MIN(end, size);
  while (end > 0 && end < size && !g_ascii_isspace(text[end])) --end; /* a whole word */
  return end > 0 ? g_bytes_new(text, end) : NULL;
}

kv_status desk_sequence_save(DeskSequence* sequence, kv_error* error) {
  kv_status status = kv_save(sequence->session, sequence->path, NULL, error);
  kv_session* mapped = NULL;
  if (status == KV_OK &&
      kv_load(sequence->model, sequence->path, NULL, NULL, &mapped, NULL) == KV_OK) {
    kv_session_close(sequence->session);
    sequence->session = mapped;
    sequence->mapped = TRUE;
  }
  return status;
}

static void take_statistics(DeskOutcome* outcome, kv_session* session) {
  kv_session_stats stats;
  kv_init(&stats, sizeof stats);
  if (kv_session_get_stats(session, &stats, NULL) != KV_OK) return;
  const double present = (double)outcome->facts.tokens_present;
  outcome->strategy = g_strdup(stats.decode_strategy);
  /* Without sealed tokens everything is in the window, which is always read. */
  outcome->tokens_read = present > 0 ? (double)outcome->facts.tokens_read / present : 1;
}

kv_status desk_session_ask(kv_session* session, const DeskAsking* asking, DeskOutcome* outcome,
                           kv_error* error) {
  kv_generate_options options;
  kv_control control;
  kv_init(&options, sizeof options);
  kv_init(&control, sizeof control);
  kv_init(&outcome->facts, sizeof outcome->facts);
  options.flags = KV_TRACE_PASSAGES;
  control.cancel = asking->cancel;
  const kv_status status =
      kv_generate(session, asking->question, strlen(asking->question), &options, &control,
                  asking->on_text, asking->user, &outcome->facts, error);
  if (status == KV_OK || status == KV_CANCELLED) take_statistics(outcome, session);
  return status;
}

kv_status desk_sequence_ask(DeskSequence* sequence, const DeskAsking* asking, DeskOutcome* outcome,
                            kv_error* error) {
  const kv_status status = desk_session_ask(sequence->session, asking, outcome, error);
  if (status != KV_OK && status != KV_CANCELLED) return status;
  if (outcome->facts.answer_tokens == 0) return status;
  const kv_status traced = desk_passages_of(sequence, &outcome->passages, error);
  return traced == KV_OK ? status : traced;
}

void desk_outcome_clear(DeskOutcome* outcome) {
  g_clear_pointer(&outcome->passages, g_ptr_array_unref);
  g_clear_pointer(&outcome->strategy, g_free);
}
