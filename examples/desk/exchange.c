#include "exchange.h"

#include "words.h"

struct _DeskExchange {
  AdwBin parent;
  DeskAnswer* answer_shown;
  GtkLabel *question, *answer, *facts;
  GtkSpinner* spinner;
  GtkWidget* looked;
  GtkListBox* passages;
};

G_DEFINE_TYPE(DeskExchange, desk_exchange, ADW_TYPE_BIN)

static guint show_passage;

static GtkWidget* label_new(const char* text, const char* class) {
  GtkWidget* label = gtk_label_new(text);
  gtk_label_set_xalign(GTK_LABEL(label), 0);
  if (class) gtk_widget_add_css_class(label, class);
  return label;
}

static GtkWidget* passage_new(const DeskPassage* passage) {
  g_autofree char *share = desk_percent(passage->share), *at = desk_percent(passage->at);
  g_autofree char* caption =
      passage->document
          ? g_strdup_printf("%s · %s of the attention · %s into it", passage->document, share, at)
          : g_strdup_printf("%s of the attention · %s into the document", share, at);
  GtkWidget *row = gtk_list_box_row_new(), *box = gtk_box_new(GTK_ORIENTATION_VERTICAL, 6),
            *below = gtk_box_new(GTK_ORIENTATION_HORIZONTAL, 10);
  GtkWidget *quote = label_new(passage->quote, "quote"), *words = label_new(caption, "caption"),
            *bar = gtk_level_bar_new_for_interval(0, 1);
  gtk_label_set_wrap(GTK_LABEL(quote), TRUE);
  gtk_label_set_wrap_mode(GTK_LABEL(quote), PANGO_WRAP_WORD_CHAR);
  gtk_label_set_ellipsize(GTK_LABEL(words), PANGO_ELLIPSIZE_END);
  gtk_widget_add_css_class(words, "dim-label");
  gtk_widget_set_hexpand(words, TRUE);
  gtk_level_bar_set_value(GTK_LEVEL_BAR(bar), passage->share);
  gtk_level_bar_remove_offset_value(GTK_LEVEL_BAR(bar), NULL); /* a share is neither good nor bad */
  gtk_widget_set_size_request(bar, 72, -1);
  gtk_widget_set_valign(bar, GTK_ALIGN_CENTER);
  gtk_accessible_update_property(GTK_ACCESSIBLE(bar), GTK_ACCESSIBLE_PROPERTY_LABEL, caption, -1);
  GtkWidget* button = gtk_button_new_from_icon_name("find-location-symbolic");
  gtk_widget_set_tooltip_text(button, "Show It in the Document");
  gtk_accessible_update_property(GTK_ACCESSIBLE(button), GTK_ACCESSIBLE_PROPERTY_LABEL,
                                 "Show It in the Document", -1);
  gtk_widget_add_css_class(button, "flat");
  gtk_widget_add_css_class(button, "circular");
  g_signal_connect_object(button, "clicked", G_CALLBACK(gtk_widget_activate), row,
                          G_CONNECT_SWAPPED);
  gtk_box_append(GTK_BOX(below), bar);
  gtk_box_append(GTK_BOX(below), words);
  gtk_box_append(GTK_BOX(below), button);
  gtk_box_append(GTK_BOX(box), quote);
  gtk_box_append(GTK_BOX(box), below);
  gtk_list_box_row_set_child(GTK_LIST_BOX_ROW(row), box);
  gtk_widget_add_css_class(row, "passage");
  gtk_accessible_update_property(GTK_ACCESSIBLE(row), GTK_ACCESSIBLE_PROPERTY_LABEL, passage->quote,
                                 -1);
  return row;
}

static void show_outcome(DeskExchange* self, const DeskAnswer* answer) {
  const DeskOutcome* outcome = &answer->outcome;
  const guint count = outcome->passages ? outcome->passages->len : 0;
  if (gtk_widget_get_visible(self->looked)) return;
  for (guint i = 0; i < count; ++i)
    gtk_list_box_append(self->passages, passage_new(g_ptr_array_index(outcome->passages, i)));
  gtk_widget_set_visible(self->looked, count > 0);
  if (outcome->facts.answer_tokens == 0) return;
  g_autofree char* read = desk_percent(outcome->tokens_read);
  g_autofree char* of = outcome->documents == 0
                            ? g_strdup("the document")
                            : g_strdup_printf("%u document%s", outcome->documents,
                                              outcome->documents == 1 ? "" : "s");
  g_autofree char* caption = g_strdup_printf(
      "%s of %s read · first word after %.1f s, all after %.1f s%s", read, of,
      (double)outcome->facts.first_token_ns * 1e-9, (double)outcome->facts.total_ns * 1e-9,
      outcome->facts.stop_reason == KV_STOP_MAX_TOKENS ? " · cut at its longest" : "");
  g_autofree char* tooltip =
      g_strdup_printf("Strategy “%s”: each word of the answer read %s of the keys and values of %s",
                      outcome->strategy ? outcome->strategy : "", read, of);
  gtk_label_set_label(self->facts, caption);
  gtk_widget_set_tooltip_text(GTK_WIDGET(self->facts), tooltip);
  gtk_widget_set_visible(GTK_WIDGET(self->facts), TRUE);
}

static void show(DeskExchange* self) {
  const DeskAnswer* answer = self->answer_shown;
  const gboolean waits = answer->state == DESK_ANSWER_WAITING ||
                         (answer->state == DESK_ANSWER_COMING && answer->text->len == 0);
  gtk_widget_set_visible(GTK_WIDGET(self->spinner), waits);
  gtk_spinner_set_spinning(self->spinner, waits);
  gtk_widget_remove_css_class(GTK_WIDGET(self->answer), "dim-label");
  gtk_widget_remove_css_class(GTK_WIDGET(self->answer), "error");
  if (answer->state == DESK_ANSWER_FAILED) {
    gtk_label_set_label(self->answer, answer->failure);
    gtk_widget_add_css_class(GTK_WIDGET(self->answer), "error");
  } else if (waits || answer->text->len == 0) {
    gtk_label_set_label(self->answer, waits ? "Waiting"
                                      : answer->state == DESK_ANSWER_STOPPED
                                          ? "Stopped"
                                          : "The model gave no answer.");
    gtk_widget_add_css_class(GTK_WIDGET(self->answer), "dim-label");
  } else {
    const char* text = answer->text->str;
    while (*text == ' ' || *text == '\n') ++text; /* the model's own after the mark of its turn */
    g_autofree char* stopped = g_strconcat(text, " … (stopped)", NULL);
    gtk_label_set_label(self->answer, answer->state == DESK_ANSWER_STOPPED ? stopped : text);
  }
  if (answer->state == DESK_ANSWER_WHOLE || answer->state == DESK_ANSWER_STOPPED)
    show_outcome(self, answer);
}

static void passage_activated(GtkListBox* list, GtkListBoxRow* row, gpointer pointer) {
  (void)list;
  g_signal_emit(pointer, show_passage, 0, (guint)gtk_list_box_row_get_index(row));
}

static void desk_exchange_dispose(GObject* object) {
  g_clear_object(&DESK_EXCHANGE(object)->answer_shown);
  G_OBJECT_CLASS(desk_exchange_parent_class)->dispose(object);
}

static void desk_exchange_class_init(DeskExchangeClass* class) {
  GtkWidgetClass* widget = GTK_WIDGET_CLASS(class);
  G_OBJECT_CLASS(class)->dispose = desk_exchange_dispose;
  show_passage = g_signal_new("show-passage", DESK_TYPE_EXCHANGE, G_SIGNAL_RUN_LAST, 0, NULL, NULL,
                              NULL, G_TYPE_NONE, 1, G_TYPE_UINT);
  gtk_widget_class_set_template_from_resource(widget, "/org/kvasir/Desk/exchange.ui");
  gtk_widget_class_bind_template_child(widget, DeskExchange, question);
  gtk_widget_class_bind_template_child(widget, DeskExchange, answer);
  gtk_widget_class_bind_template_child(widget, DeskExchange, facts);
  gtk_widget_class_bind_template_child(widget, DeskExchange, spinner);
  gtk_widget_class_bind_template_child(widget, DeskExchange, looked);
  gtk_widget_class_bind_template_child(widget, DeskExchange, passages);
  gtk_widget_class_bind_template_callback(widget, passage_activated);
}

static void desk_exchange_init(DeskExchange* self) { gtk_widget_init_template(GTK_WIDGET(self)); }

GtkWidget* desk_exchange_new(DeskAnswer* answer) {
  DeskExchange* self = g_object_new(DESK_TYPE_EXCHANGE, NULL);
  self->answer_shown = g_object_ref(answer);
  gtk_label_set_label(self->question, answer->question);
  g_signal_connect_object(answer, "changed", G_CALLBACK(show), self, G_CONNECT_SWAPPED);
  show(self);
  return GTK_WIDGET(self);
}

DeskAnswer* desk_exchange_answer(DeskExchange* exchange) { return exchange->answer_shown; }
