#include "page.h"

#include "exchange.h"
#include "words.h"

struct _DeskPage {
  AdwBin parent;
  DeskDocument* document;
  GtkRevealer *notice, *strip;
  GtkLabel *notice_text, *strip_text;
  GtkWidget *try_again, *strip_stop, *strip_go_on, *ask, *stop, *text_pane;
  GtkStack* talk;
  AdwStatusPage* empty;
  GtkScrolledWindow* scroller;
  GtkBox* exchanges;
  GtkProgressBar* strip_progress;
  GtkEntry* entry;
  GtkTextView* text;
  GtkTextTag* shown_passage;
  gboolean has_text;
};

G_DEFINE_TYPE(DeskPage, desk_page, ADW_TYPE_BIN)

/* ---- the document's text -------------------------------------------------------------------------------------------- */

static void fill_text(DeskPage* self) {
  GBytes* text = desk_document_text(self->document);
  if (!text || self->has_text) return;
  gsize size = 0;
  const char* data = g_bytes_get_data(text, &size);
  GtkTextBuffer* buffer = gtk_text_view_get_buffer(self->text);
  gtk_text_buffer_set_text(buffer, data, (int)size);
  self->shown_passage = gtk_text_buffer_create_tag(buffer, NULL, "background", "#f8e45c",
                                                   "foreground", "#241f31", NULL);
  self->has_text = TRUE;
}

static void show_passage(DeskExchange* exchange, guint number, gpointer pointer) {
  DeskPage* self = pointer;
  const DeskPassage* passage =
      g_ptr_array_index(desk_exchange_answer(exchange)->outcome.passages, number);
  GtkTextBuffer* buffer = gtk_text_view_get_buffer(self->text);
  const char* data = g_bytes_get_data(desk_document_text(self->document), NULL);
  GtkTextIter from, to, begin, end;
  if (!gtk_widget_get_visible(self->text_pane))
    gtk_widget_activate_action(GTK_WIDGET(self), "win.show-text", NULL);
  gtk_text_buffer_get_bounds(buffer, &from, &to);
  gtk_text_buffer_remove_tag(buffer, self->shown_passage, &from, &to);
  gtk_text_buffer_get_iter_at_offset(buffer, &begin,
                                     (int)g_utf8_pointer_to_offset(data, data + passage->begin));
  gtk_text_buffer_get_iter_at_offset(buffer, &end,
                                     (int)g_utf8_pointer_to_offset(data, data + passage->end));
  gtk_text_buffer_apply_tag(buffer, self->shown_passage, &begin, &end);
  gtk_text_buffer_place_cursor(buffer, &begin);
  gtk_text_view_scroll_to_mark(self->text, gtk_text_buffer_get_insert(buffer), 0, TRUE, 0, 0.3);
}

/* ---- what is under way ---------------------------------------------------------------------------------------------- */

static void show_strip(DeskPage* self, DeskState state) {
  const gboolean reads = state == DESK_READING || state == DESK_KEEPING || state == DESK_OPENING;
  const gboolean part = state == DESK_READY && !desk_document_is_complete(self->document);
  if (reads) {
    g_autofree char* summary = desk_document_summary(self->document);
    gtk_label_set_label(self->strip_text, summary);
    gtk_progress_bar_set_fraction(self->strip_progress,
                                  state == DESK_KEEPING ? 1 : desk_document_share(self->document));
  } else if (part) {
    const double share = desk_document_part(self->document);
    g_autofree char *percent = desk_percent(share),
                    *text =
                        g_strdup_printf("The first %s was read; answers know only that", percent);
    gtk_label_set_label(self->strip_text, text);
    gtk_progress_bar_set_fraction(self->strip_progress, share);
  }
  gtk_widget_set_visible(self->strip_stop, reads);
  gtk_widget_set_sensitive(self->strip_stop, state == DESK_READING);
  gtk_widget_set_visible(self->strip_go_on, part || (state == DESK_CLOSED && self->has_text));
  if (state == DESK_CLOSED && self->has_text) {
    gtk_label_set_label(self->strip_text, "Nothing was read yet");
    gtk_progress_bar_set_fraction(self->strip_progress, 0);
  }
  gtk_revealer_set_reveal_child(self->strip,
                                reads || part || (state == DESK_CLOSED && self->has_text));
}

static void show_empty(DeskPage* self, DeskState state) {
  adw_status_page_set_title(self->empty, desk_document_name(self->document));
  if (state == DESK_READING || state == DESK_KEEPING) {
    adw_status_page_set_description(self->empty,
                                    "It is being read, once; what was read is kept. A question "
                                    "waits until it can be answered.");
  } else if (state == DESK_READY || state == DESK_ANSWERING) {
    g_autofree char* tokens = desk_grouped(desk_document_tokens(self->document));
    g_autofree char* text = g_strdup_printf("%s tokens were read. Ask what it says.", tokens);
    adw_status_page_set_description(self->empty, text);
  } else {
    adw_status_page_set_description(self->empty, NULL);
  }
}

static void show(DeskPage* self) {
  const DeskState state = desk_document_state(self->document);
  const char* notice = desk_document_notice(self->document);
  fill_text(self);
  if (notice) gtk_label_set_label(self->notice_text, notice);
  gtk_revealer_set_reveal_child(self->notice, notice != NULL);
  gtk_widget_set_visible(self->try_again, state == DESK_FAILED);
  gtk_widget_set_visible(self->stop, state == DESK_ANSWERING);
  gtk_widget_set_visible(self->ask, state != DESK_ANSWERING);
  gtk_widget_set_sensitive(self->ask, gtk_entry_get_text_length(self->entry) > 0 &&
                                          state != DESK_FAILED && state != DESK_CLOSED);
  show_strip(self, state);
  show_empty(self, state);
}

/* ---- what the user does --------------------------------------------------------------------------------------------- */

static gboolean to_end(gpointer pointer) {
  DeskPage* self = pointer;
  GtkAdjustment* place = gtk_scrolled_window_get_vadjustment(self->scroller);
  gtk_adjustment_set_value(place, gtk_adjustment_get_upper(place));
  return G_SOURCE_REMOVE;
}

static void ask_clicked(DeskPage* self) {
  g_autofree char* question =
      g_strstrip(g_strdup(gtk_editable_get_text(GTK_EDITABLE(self->entry))));
  const DeskState state = desk_document_state(self->document);
  if (!*question || state == DESK_FAILED || state == DESK_CLOSED) return;
  g_autoptr(DeskAnswer) answer = desk_answer_new(question);
  GtkWidget* exchange = desk_exchange_new(answer);
  g_signal_connect_object(exchange, "show-passage", G_CALLBACK(show_passage), self, 0);
  gtk_box_append(self->exchanges, exchange);
  gtk_stack_set_visible_child_name(self->talk, "talk");
  gtk_editable_set_text(GTK_EDITABLE(self->entry), "");
  desk_document_ask(self->document, answer);
}

static void entry_changed(DeskPage* self) { show(self); }
static void go_on_clicked(DeskPage* self) { desk_document_go_on(self->document); }
static void dismiss_clicked(DeskPage* self) { desk_document_dismiss(self->document); }
static void try_again_clicked(DeskPage* self) {
  gtk_widget_activate_action(GTK_WIDGET(self), "win.open-document", "s",
                             desk_document_name(self->document));
}

/* The conversation has become longer: its end is shown, once it has its place. */
static void grew(DeskPage* self) {
  g_idle_add_full(G_PRIORITY_DEFAULT_IDLE, to_end, g_object_ref(self), g_object_unref);
}

/* ---- the widget ----------------------------------------------------------------------------------------------------- */

static void desk_page_dispose(GObject* object) {
  g_clear_object(&DESK_PAGE(object)->document);
  G_OBJECT_CLASS(desk_page_parent_class)->dispose(object);
}

static void desk_page_class_init(DeskPageClass* class) {
  GtkWidgetClass* widget = GTK_WIDGET_CLASS(class);
  G_OBJECT_CLASS(class)->dispose = desk_page_dispose;
  gtk_widget_class_set_template_from_resource(widget, "/org/kvasir/Desk/page.ui");
  gtk_widget_class_bind_template_child(widget, DeskPage, notice);
  gtk_widget_class_bind_template_child(widget, DeskPage, strip);
  gtk_widget_class_bind_template_child(widget, DeskPage, notice_text);
  gtk_widget_class_bind_template_child(widget, DeskPage, strip_text);
  gtk_widget_class_bind_template_child(widget, DeskPage, try_again);
  gtk_widget_class_bind_template_child(widget, DeskPage, strip_stop);
  gtk_widget_class_bind_template_child(widget, DeskPage, strip_go_on);
  gtk_widget_class_bind_template_child(widget, DeskPage, ask);
  gtk_widget_class_bind_template_child(widget, DeskPage, stop);
  gtk_widget_class_bind_template_child(widget, DeskPage, text_pane);
  gtk_widget_class_bind_template_child(widget, DeskPage, talk);
  gtk_widget_class_bind_template_child(widget, DeskPage, empty);
  gtk_widget_class_bind_template_child(widget, DeskPage, scroller);
  gtk_widget_class_bind_template_child(widget, DeskPage, exchanges);
  gtk_widget_class_bind_template_child(widget, DeskPage, strip_progress);
  gtk_widget_class_bind_template_child(widget, DeskPage, entry);
  gtk_widget_class_bind_template_child(widget, DeskPage, text);
  gtk_widget_class_bind_template_callback(widget, ask_clicked);
  gtk_widget_class_bind_template_callback(widget, entry_changed);
  gtk_widget_class_bind_template_callback(widget, go_on_clicked);
  gtk_widget_class_bind_template_callback(widget, dismiss_clicked);
  gtk_widget_class_bind_template_callback(widget, try_again_clicked);
}

static void desk_page_init(DeskPage* self) { gtk_widget_init_template(GTK_WIDGET(self)); }

GtkWidget* desk_page_new(DeskDocument* document) {
  DeskPage* self = g_object_new(DESK_TYPE_PAGE, NULL);
  self->document = g_object_ref(document);
  g_signal_connect_object(document, "changed", G_CALLBACK(show), self, G_CONNECT_SWAPPED);
  g_signal_connect_object(gtk_scrolled_window_get_vadjustment(self->scroller), "notify::upper",
                          G_CALLBACK(grew), self, G_CONNECT_SWAPPED);
  show(self);
  return GTK_WIDGET(self);
}

DeskDocument* desk_page_document(DeskPage* page) { return page->document; }
void desk_page_show_text(DeskPage* page, gboolean shown) {
  gtk_widget_set_visible(page->text_pane, shown);
}
void desk_page_focus_entry(DeskPage* page) { gtk_widget_grab_focus(GTK_WIDGET(page->entry)); }
