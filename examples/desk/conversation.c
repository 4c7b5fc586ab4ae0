#include "conversation.h"

static const char* const document = "document";

static DeskAnswer* load_answer(GKeyFile* file, const char* group) {
  g_autofree char *question = g_key_file_get_string(file, group, "question", NULL),
                  *text = g_key_file_get_string(file, group, "answer", NULL);
  if (!question || !text) return NULL;
  DeskAnswer* answer = desk_answer_new(question);
  DeskOutcome* outcome = &answer->outcome;
  g_string_append(answer->text, text);
  answer->state = g_key_file_get_boolean(file, group, "stopped", NULL) ? DESK_ANSWER_STOPPED
                                                                       : DESK_ANSWER_WHOLE;
  kv_init(&outcome->facts, sizeof outcome->facts);
  outcome->facts.stop_reason = (uint32_t)g_key_file_get_uint64(file, group, "stop-reason", NULL);
  outcome->facts.answer_tokens = g_key_file_get_uint64(file, group, "tokens", NULL);
  outcome->facts.first_token_ns = g_key_file_get_uint64(file, group, "first-token-ns", NULL);
  outcome->facts.total_ns = g_key_file_get_uint64(file, group, "total-ns", NULL);
  outcome->tokens_read = g_key_file_get_double(file, group, "tokens-read", NULL);
  outcome->strategy = g_key_file_get_string(file, group, "strategy", NULL);
  outcome->passages = desk_passages_new();
  gsize quotes = 0, places = 0;
  g_auto(GStrv) quote = g_key_file_get_string_list(file, group, "quotes", &quotes, NULL);
  /* share, place, begin, end of each passage */
  g_autofree double* place = g_key_file_get_double_list(file, group, "places", &places, NULL);
  for (gsize i = 0; i < quotes && 4 * i + 3 < places; ++i) {
    const double* p = place + 4 * i;
    if (!(p[2] >= 0 && p[2] <= p[3] && p[3] < (double)G_MAXINT)) continue;
    DeskPassage* passage = g_new0(DeskPassage, 1);
    *passage = (DeskPassage){p[0], (gsize)p[2], (gsize)p[3], p[1], g_strdup(quote[i]), NULL};
    g_ptr_array_add(outcome->passages, passage);
  }
  return answer;
}

DeskConversation desk_conversation_load(const char* path) {
  DeskConversation conversation = {g_ptr_array_new_with_free_func(g_object_unref), -1};
  g_autoptr(GKeyFile) file = g_key_file_new();
  if (!g_key_file_load_from_file(file, path, G_KEY_FILE_NONE, NULL)) return conversation;
  if (g_key_file_has_key(file, document, "part", NULL))
    conversation.part = g_key_file_get_double(file, document, "part", NULL);
  for (guint i = 1;; ++i) {
    g_autofree char* group = g_strdup_printf("answer %u", i);
    if (!g_key_file_has_group(file, group)) return conversation;
    DeskAnswer* answer = load_answer(file, group);
    if (answer) g_ptr_array_add(conversation.answers, answer);
  }
}

static void format_answer(GKeyFile* file, const char* group, const DeskAnswer* answer) {
  const DeskOutcome* outcome = &answer->outcome;
  const guint count = outcome->passages ? outcome->passages->len : 0;
  g_key_file_set_string(file, group, "question", answer->question);
  g_key_file_set_string(file, group, "answer", answer->text->str);
  g_key_file_set_boolean(file, group, "stopped", answer->state == DESK_ANSWER_STOPPED);
  g_key_file_set_uint64(file, group, "stop-reason", outcome->facts.stop_reason);
  g_key_file_set_uint64(file, group, "tokens", outcome->facts.answer_tokens);
  g_key_file_set_uint64(file, group, "first-token-ns", outcome->facts.first_token_ns);
  g_key_file_set_uint64(file, group, "total-ns", outcome->facts.total_ns);
  g_key_file_set_double(file, group, "tokens-read", outcome->tokens_read);
  g_key_file_set_string(file, group, "strategy", outcome->strategy ? outcome->strategy : "");
  g_autofree const char** quotes = g_new0(const char*, count + 1);
  g_autofree double* places = g_new0(double, 4 * count + 1);
  for (guint i = 0; i < count; ++i) {
    const DeskPassage* passage = g_ptr_array_index(outcome->passages, i);
    quotes[i] = passage->quote;
    places[4 * i] = passage->share;
    places[4 * i + 1] = passage->at;
    places[4 * i + 2] = (double)passage->begin;
    places[4 * i + 3] = (double)passage->end;
  }
  if (count == 0) return;
  g_key_file_set_string_list(file, group, "quotes", quotes, count);
  g_key_file_set_double_list(file, group, "places", places, 4 * (gsize)count);
}

char* desk_conversation_format(const DeskConversation* conversation) {
  g_autoptr(GKeyFile) file = g_key_file_new();
  g_key_file_set_double(file, document, "part", conversation->part);
  guint number = 0;
  for (guint i = 0; i < conversation->answers->len; ++i) {
    const DeskAnswer* answer = g_ptr_array_index(conversation->answers, i);
    if (answer->state != DESK_ANSWER_WHOLE && answer->state != DESK_ANSWER_STOPPED) continue;
    g_autofree char* group = g_strdup_printf("answer %u", ++number);
    format_answer(file, group, answer);
  }
  return g_key_file_to_data(file, NULL, NULL);
}

gboolean desk_conversation_save(const char* path, const char* content, GError** error) {
  return g_file_set_contents_full(path, content, -1, G_FILE_SET_CONTENTS_CONSISTENT, 0600, error);
}
