#include "window.h"

#include "all.h"
#include "banner.h"
#include "library.h"
#include "page.h"
#include "row.h"

struct _DeskWindow {
  AdwApplicationWindow parent;
  DeskLibrary* library;
  GPtrArray* waiting; /* files, until there is a model */
  DeskBanner* banner;
  GQueue messages; /* strings; the head is in the banner */
  AdwFlap* flap;
  AdwWindowTitle* heading;
  GtkListBox* list;
  GtkStack* pages;
  DeskAll* all; /* in `pages` once it was shown */
  AdwStatusPage* failed;
  GtkFileChooserNative* chooser; /* while it is there */
  gboolean closing, closed;
};

G_DEFINE_TYPE(DeskWindow, desk_window, ADW_TYPE_APPLICATION_WINDOW)

/* ---- documents ------------------------------------------------------------------------------- */

static DeskPage* current_page(DeskWindow* self) {
  GtkWidget* child = gtk_stack_get_visible_child(self->pages);
  return DESK_IS_PAGE(child) ? DESK_PAGE(child) : NULL;
}

static DeskPage* page_of(DeskWindow* self, DeskDocument* document) {
  for (GtkWidget* child = gtk_widget_get_first_child(GTK_WIDGET(self->pages)); child;
       child = gtk_widget_get_next_sibling(child))
    if (DESK_IS_PAGE(child) && desk_page_document(DESK_PAGE(child)) == document)
      return DESK_PAGE(child);
  return NULL;
}

static gboolean text_is_shown(DeskWindow* self) {
  g_autoptr(GVariant) state = g_action_group_get_action_state(G_ACTION_GROUP(self), "show-text");
  return g_variant_get_boolean(state);
}

static gboolean shows_all(DeskWindow* self) {
  return self->all && gtk_stack_get_visible_child(self->pages) == GTK_WIDGET(self->all);
}

static void update(DeskWindow* self) {
  const char* const none = shows_all(self) ? "All Documents" : "Kvasir Desk";
  DeskPage* page = current_page(self);
  DeskDocument* document = page ? desk_page_document(page) : NULL;
  const DeskState state = document ? desk_document_state(document) : DESK_CLOSED;
  g_autofree char* summary = document ? desk_document_summary(document) : NULL;
  GAction* stop = g_action_map_lookup_action(G_ACTION_MAP(self), "stop");
  GAction* text = g_action_map_lookup_action(G_ACTION_MAP(self), "show-text");
  adw_window_title_set_title(self->heading, document ? desk_document_name(document) : none);
  adw_window_title_set_subtitle(
      self->heading, document && state != DESK_CLOSED && state != DESK_FAILED ? summary : "");
  gtk_window_set_title(GTK_WINDOW(self), document ? desk_document_name(document) : none);
  g_simple_action_set_enabled(G_SIMPLE_ACTION(stop),
                              state == DESK_PREFILLING || state == DESK_ANSWERING ||
                                  (shows_all(self) && desk_all_is_busy(self->all)));
  g_simple_action_set_enabled(G_SIMPLE_ACTION(text), document != NULL);
}

/* A fold hides the text, too. */
static void text_revealed(DeskWindow* self) {
  DeskPage* page = current_page(self);
  GAction* action = g_action_map_lookup_action(G_ACTION_MAP(self), "show-text");
  if (!page) return;
  const gboolean shown = adw_flap_get_reveal_flap(desk_page_flap(page));
  g_simple_action_set_state(G_SIMPLE_ACTION(action), g_variant_new_boolean(shown));
}

static void show_document(DeskWindow* self, DeskDocument* document) {
  if (self->closing) return;
  DeskPage* page = page_of(self, document);
  if (!page) {
    page = DESK_PAGE(desk_page_new(document));
    gtk_stack_add_child(self->pages, GTK_WIDGET(page));
    g_signal_connect_object(document, "changed", G_CALLBACK(update), self, G_CONNECT_SWAPPED);
    g_signal_connect_object(desk_page_flap(page), "notify::reveal-flap", G_CALLBACK(text_revealed),
                            self, G_CONNECT_SWAPPED);
  }
  desk_page_show_text(page, text_is_shown(self));
  gtk_stack_set_visible_child(self->pages, GTK_WIDGET(page));
  desk_document_open(document, desk_library_model(self->library));
  update(self);
}

static void row_selected(GtkListBox* list, GtkListBoxRow* row, gpointer pointer) {
  (void)list;
  if (row) show_document(pointer, desk_row_document(DESK_ROW(row)));
}

/* A click or Enter on a row, not a move through the list: the user writes a question next. */
static void row_activated(GtkListBox* list, GtkListBoxRow* row, gpointer pointer) {
  DeskPage* page = current_page(pointer);
  (void)list;
  (void)row;
  if (page) desk_page_focus_entry(page);
  if (adw_flap_get_folded(DESK_WINDOW(pointer)->flap))
    adw_flap_set_reveal_flap(DESK_WINDOW(pointer)->flap, FALSE);
}

static void select_document(DeskWindow* self, DeskDocument* document) {
  for (int i = 0;; ++i) {
    GtkListBoxRow* row = gtk_list_box_get_row_at_index(self->list, i);
    if (!row) return;
    if (desk_row_document(DESK_ROW(row)) != document) continue;
    gtk_list_box_select_row(self->list, row);
    show_document(self, document); /* also if it was selected before */
    row_activated(self->list, row, self);
    return;
  }
}

static void show_source(DeskWindow* self, const DeskPassage* passage) {
  DeskDocument* document = desk_library_find(self->library, passage->document);
  if (!document) return; /* it was removed */
  select_document(self, document);
  desk_page_show_passage(page_of(self, document), passage);
}

static void ask_all(GSimpleAction* action, GVariant* parameter, gpointer pointer) {
  DeskWindow* self = pointer;
  (void)action;
  (void)parameter;
  if (self->closing || !desk_library_model(self->library)) return;
  if (!self->all) {
    self->all = DESK_ALL(desk_all_new(self->library));
    gtk_stack_add_child(self->pages, GTK_WIDGET(self->all));
    g_signal_connect_object(self->all, "changed", G_CALLBACK(update), self, G_CONNECT_SWAPPED);
    g_signal_connect_object(self->all, "show-source", G_CALLBACK(show_source), self,
                            G_CONNECT_SWAPPED);
  }
  gtk_list_box_unselect_all(self->list);
  gtk_stack_set_visible_child(self->pages, GTK_WIDGET(self->all));
  desk_all_focus_entry(self->all);
  if (adw_flap_get_folded(self->flap)) adw_flap_set_reveal_flap(self->flap, FALSE);
  update(self);
}

static GtkWidget* make_row(gpointer document, gpointer unused) {
  (void)unused;
  return desk_row_new(document);
}

/* Removes the pages of removed documents. */
static void documents_changed(DeskWindow* self) {
  GtkWidget* next = NULL;
  for (GtkWidget* child = gtk_widget_get_first_child(GTK_WIDGET(self->pages)); child;
       child = next) {
    next = gtk_widget_get_next_sibling(child);
    if (!DESK_IS_PAGE(child)) continue;
    DeskDocument* document = desk_page_document(DESK_PAGE(child));
    if (desk_library_find(self->library, desk_document_name(document)) == document) continue;
    if (gtk_stack_get_visible_child(self->pages) == child)
      gtk_stack_set_visible_child_name(self->pages, "welcome");
    g_signal_handlers_disconnect_by_data(document, self);
    gtk_stack_remove(self->pages, child);
  }
  update(self);
}

/* ---- the library's signals ------------------------------------------------------------------- */

static void show_message(DeskWindow* self) {
  const char* message = g_queue_peek_head(&self->messages);
  const guint more = g_queue_get_length(&self->messages) - (message ? 1 : 0);
  g_autofree char* text =
      more > 0 ? g_strdup_printf("%s (%u more)", message, more) : g_strdup(message);
  desk_banner_show(self->banner, text, NULL, NULL);
}

static void message(DeskWindow* self, const char* text) {
  if (self->closing) return;
  g_queue_push_head(&self->messages, g_strdup(text)); /* the newest first */
  show_message(self);
}

static void banner_response(DeskBanner* banner, guint response, gpointer pointer) {
  DeskWindow* self = pointer;
  (void)banner;
  (void)response;
  g_free(g_queue_pop_head(&self->messages));
  show_message(self);
}

static void started(DeskWindow* self, const char* failure) {
  if (self->closing) return;
  if (failure) {
    g_autofree char* escaped = g_markup_escape_text(failure, -1);
    adw_status_page_set_description(self->failed, escaped);
    gtk_stack_set_visible_child_name(self->pages, "failed");
    return;
  }
  gtk_stack_set_visible_child_name(self->pages, "welcome");
  for (guint i = 0; i < self->waiting->len; ++i)
    desk_library_add(self->library, g_ptr_array_index(self->waiting, i));
  g_ptr_array_set_size(self->waiting, 0);
}

static void added(DeskWindow* self, DeskDocument* document) { select_document(self, document); }

static void closed(DeskWindow* self) {
  self->closed = TRUE;
  gtk_window_destroy(GTK_WINDOW(self));
}

/* Stops the jobs and saves the prefilled parts; then closes the window. */
static gboolean close_request(GtkWindow* window) {
  DeskWindow* self = DESK_WINDOW(window);
  if (self->closed) return GDK_EVENT_PROPAGATE;
  if (!self->closing) {
    self->closing = TRUE;
    if (self->all) desk_all_close(self->all);
    gtk_stack_set_visible_child_name(self->pages, "closing");
    gtk_widget_set_sensitive(GTK_WIDGET(self->flap), FALSE);
    desk_library_close(self->library);
  }
  return GDK_EVENT_STOP;
}

/* ---- files ----------------------------------------------------------------------------------- */

void desk_window_open_files(DeskWindow* self, GFile** files, int count) {
  for (int i = 0; i < count; ++i) {
    if (desk_library_model(self->library)) desk_library_add(self->library, files[i]);
    else g_ptr_array_add(self->waiting, g_object_ref(files[i]));
  }
}

static GtkFileFilter* filter_new(const char* name, const char* const* patterns) {
  GtkFileFilter* filter = gtk_file_filter_new();
  gtk_file_filter_set_name(filter, name);
  for (; *patterns; ++patterns) gtk_file_filter_add_pattern(filter, *patterns);
  return filter;
}

static void choose(DeskWindow* self, const char* title, GCallback chosen, GtkFileFilter* filter) {
  if (self->chooser || self->closing) {
    g_object_unref(filter);
    return;
  }
  self->chooser = gtk_file_chooser_native_new(title, GTK_WINDOW(self), GTK_FILE_CHOOSER_ACTION_OPEN,
                                              "_Open", "_Cancel");
  gtk_native_dialog_set_modal(GTK_NATIVE_DIALOG(self->chooser), TRUE);
  gtk_file_chooser_add_filter(GTK_FILE_CHOOSER(self->chooser), filter);
  g_object_unref(filter);
  g_signal_connect_object(self->chooser, "response", chosen, self, G_CONNECT_SWAPPED);
  gtk_native_dialog_show(GTK_NATIVE_DIALOG(self->chooser));
}

static void files_chosen(DeskWindow* self, int response) {
  g_autoptr(GListModel) files = gtk_file_chooser_get_files(GTK_FILE_CHOOSER(self->chooser));
  for (guint i = 0; response == GTK_RESPONSE_ACCEPT && i < g_list_model_get_n_items(files); ++i) {
    g_autoptr(GFile) file = g_list_model_get_item(files, i);
    desk_window_open_files(self, &file, 1);
  }
  g_clear_object(&self->chooser);
}

static void model_chosen(DeskWindow* self, int response) {
  g_autoptr(GFile) file = gtk_file_chooser_get_file(GTK_FILE_CHOOSER(self->chooser));
  g_autofree char* path = file ? g_file_get_path(file) : NULL;
  if (response == GTK_RESPONSE_ACCEPT && path) desk_library_start(self->library, path);
  g_clear_object(&self->chooser);
}

void desk_window_choose_files(DeskWindow* self) {
  static const char* const patterns[] = {"*.txt", "*.text", "*.md",  "*.markdown",
                                         "*.pdf", "*.TXT",  "*.PDF", NULL};
  GtkFileFilter* filter = filter_new("Texts, Markdown, PDF", patterns);
  choose(self, "Open Documents", G_CALLBACK(files_chosen), filter);
  if (!self->chooser) return;
  static const char* const all[] = {"*", NULL};
  g_autoptr(GtkFileFilter) any = filter_new("All Files", all);
  gtk_file_chooser_set_select_multiple(GTK_FILE_CHOOSER(self->chooser), TRUE);
  gtk_file_chooser_add_filter(GTK_FILE_CHOOSER(self->chooser), any);
}

static gboolean dropped(GtkDropTarget* target, const GValue* value, double x, double y,
                        gpointer self) {
  (void)target;
  (void)x;
  (void)y;
  g_autoptr(GSList) files = gdk_file_list_get_files(g_value_get_boxed(value));
  for (GSList* file = files; file; file = file->next)
    desk_window_open_files(self, (GFile**)&file->data, 1);
  return TRUE;
}

/* ---- actions --------------------------------------------------------------------------------- */

static void choose_model(GSimpleAction* action, GVariant* parameter, gpointer self) {
  static const char* const patterns[] = {"*.gguf", NULL};
  (void)action;
  (void)parameter;
  choose(self, "Choose a Model", G_CALLBACK(model_chosen), filter_new("Models (GGUF)", patterns));
}

static void open_document(GSimpleAction* action, GVariant* name, gpointer pointer) {
  DeskWindow* self = pointer;
  DeskDocument* document = desk_library_find(self->library, g_variant_get_string(name, NULL));
  (void)action;
  if (document) select_document(self, document);
}

static void stop(GSimpleAction* action, GVariant* parameter, gpointer self) {
  DeskPage* page = current_page(self);
  (void)action;
  (void)parameter;
  if (page) desk_document_stop(desk_page_document(page));
  else if (shows_all(self)) desk_all_stop(DESK_WINDOW(self)->all);
}

static void show_text(GSimpleAction* action, GVariant* state, gpointer pointer) {
  DeskWindow* self = pointer;
  DeskPage* page = current_page(self);
  g_simple_action_set_state(action, state);
  if (page) desk_page_show_text(page, g_variant_get_boolean(state));
}

/* The subject of a dialog about a document. */
typedef struct Request {
  DeskWindow* window;
  DeskDocument* document;
  GtkEditable* name; /* rename */
} Request;

static void free_request(gpointer pointer, GClosure* unused) {
  Request* request = pointer;
  (void)unused;
  g_object_unref(request->window);
  g_object_unref(request->document);
  g_free(request);
}

static Request* request_new(gpointer window, GVariant* name) {
  DeskWindow* self = window;
  DeskDocument* document =
      self->closing ? NULL : desk_library_find(self->library, g_variant_get_string(name, NULL));
  if (!document) return NULL;
  Request* request = g_new0(Request, 1);
  *request = (Request){g_object_ref(self), g_object_ref(document), NULL};
  return request;
}

static void remove_response(AdwMessageDialog* dialog, const char* response, gpointer pointer) {
  Request* request = pointer;
  (void)dialog;
  if (g_str_equal(response, "remove") && !request->window->closing)
    desk_library_remove(request->window->library, request->document);
}

static void remove_document(GSimpleAction* action, GVariant* name, gpointer window) {
  Request* request = request_new(window, name);
  (void)action;
  if (!request) return;
  g_autofree char* heading = g_strdup_printf("Remove “%s”?", g_variant_get_string(name, NULL));
  GtkWidget* dialog = adw_message_dialog_new(
      window, heading,
      "This removes the saved document and its answers. The file it came from stays.");
  adw_message_dialog_add_responses(ADW_MESSAGE_DIALOG(dialog), "cancel", "_Cancel", "remove",
                                   "_Remove", NULL);
  adw_message_dialog_set_response_appearance(ADW_MESSAGE_DIALOG(dialog), "remove",
                                             ADW_RESPONSE_DESTRUCTIVE);
  g_signal_connect_data(dialog, "response", G_CALLBACK(remove_response), request, free_request, 0);
  gtk_window_present(GTK_WINDOW(dialog));
}

static void rename_response(AdwMessageDialog* dialog, const char* response, gpointer pointer) {
  Request* request = pointer;
  (void)dialog;
  if (!g_str_equal(response, "rename") || request->window->closing ||
      desk_document_is_busy(request->document))
    return;
  desk_library_rename(request->window->library, request->document,
                      gtk_editable_get_text(request->name));
}

static void name_changed(GtkEditable* entry, gpointer dialog) {
  Request* request = g_object_get_data(G_OBJECT(dialog), "request");
  const char* why = desk_library_check_name(request->window->library, gtk_editable_get_text(entry));
  adw_message_dialog_set_response_enabled(dialog, "rename", why == NULL);
  adw_message_dialog_set_body(dialog, why ? why : "");
}

static void rename_document(GSimpleAction* action, GVariant* name, gpointer window) {
  Request* request = request_new(window, name);
  (void)action;
  if (!request) return;
  g_autofree char* heading = g_strdup_printf("Rename “%s”", g_variant_get_string(name, NULL));
  GtkWidget *dialog = adw_message_dialog_new(window, heading, NULL), *entry = gtk_entry_new();
  request->name = GTK_EDITABLE(entry);
  gtk_editable_set_text(GTK_EDITABLE(entry), g_variant_get_string(name, NULL));
  gtk_entry_set_activates_default(GTK_ENTRY(entry), TRUE);
  gtk_accessible_update_property(GTK_ACCESSIBLE(entry), GTK_ACCESSIBLE_PROPERTY_LABEL, "New name",
                                 -1);
  adw_message_dialog_set_extra_child(ADW_MESSAGE_DIALOG(dialog), entry);
  adw_message_dialog_add_responses(ADW_MESSAGE_DIALOG(dialog), "cancel", "_Cancel", "rename",
                                   "_Rename", NULL);
  adw_message_dialog_set_response_appearance(ADW_MESSAGE_DIALOG(dialog), "rename",
                                             ADW_RESPONSE_SUGGESTED);
  adw_message_dialog_set_response_enabled(ADW_MESSAGE_DIALOG(dialog), "rename",
                                          FALSE); /* the same name */
  adw_message_dialog_set_default_response(ADW_MESSAGE_DIALOG(dialog), "rename");
  g_object_set_data(G_OBJECT(dialog), "request", request);
  g_signal_connect(entry, "changed", G_CALLBACK(name_changed), dialog);
  g_signal_connect_data(dialog, "response", G_CALLBACK(rename_response), request, free_request, 0);
  gtk_window_present(GTK_WINDOW(dialog));
  gtk_widget_grab_focus(entry);
}

static const GActionEntry actions[] = {
    {.name = "choose-model", .activate = choose_model},
    {.name = "ask-all", .activate = ask_all},
    {.name = "open-document", .activate = open_document, .parameter_type = "s"},
    {.name = "rename", .activate = rename_document, .parameter_type = "s"},
    {.name = "remove", .activate = remove_document, .parameter_type = "s"},
    {.name = "stop", .activate = stop},
    {.name = "show-text", .state = "true", .change_state = show_text},
};

/* ---- the widget ------------------------------------------------------------------------------ */

static void desk_window_dispose(GObject* object) {
  DeskWindow* self = DESK_WINDOW(object);
  g_clear_object(&self->chooser);
  g_clear_object(&self->library);
  g_clear_pointer(&self->waiting, g_ptr_array_unref);
  g_queue_clear_full(&self->messages, g_free);
  G_OBJECT_CLASS(desk_window_parent_class)->dispose(object);
}

static void desk_window_class_init(DeskWindowClass* class) {
  GtkWidgetClass* widget = GTK_WIDGET_CLASS(class);
  G_OBJECT_CLASS(class)->dispose = desk_window_dispose;
  GTK_WINDOW_CLASS(class)->close_request = close_request;
  gtk_widget_class_set_template_from_resource(widget, "/org/kvasir/Desk/window.ui");
  gtk_widget_class_bind_template_child(widget, DeskWindow, banner);
  gtk_widget_class_bind_template_child(widget, DeskWindow, flap);
  gtk_widget_class_bind_template_child(widget, DeskWindow, heading);
  gtk_widget_class_bind_template_child(widget, DeskWindow, list);
  gtk_widget_class_bind_template_child(widget, DeskWindow, pages);
  gtk_widget_class_bind_template_child(widget, DeskWindow, failed);
  gtk_widget_class_bind_template_callback(widget, row_selected);
  gtk_widget_class_bind_template_callback(widget, row_activated);
  gtk_widget_class_bind_template_callback(widget, banner_response);
}

static void desk_window_init(DeskWindow* self) {
  self->waiting = g_ptr_array_new_with_free_func(g_object_unref);
  g_action_map_add_action_entries(G_ACTION_MAP(self), actions, G_N_ELEMENTS(actions), self);
  g_type_ensure(DESK_TYPE_BANNER);
  g_queue_init(&self->messages);
  gtk_widget_init_template(GTK_WIDGET(self));
  g_autoptr(GPropertyAction) show_library =
      g_property_action_new("show-library", self->flap, "reveal-flap");
  g_action_map_add_action(G_ACTION_MAP(self), G_ACTION(show_library));

  GtkDropTarget* target = gtk_drop_target_new(GDK_TYPE_FILE_LIST, GDK_ACTION_COPY);
  g_signal_connect(target, "drop", G_CALLBACK(dropped), self);
  gtk_widget_add_controller(GTK_WIDGET(self), GTK_EVENT_CONTROLLER(target));

  self->library = desk_library_new();
  g_signal_connect_object(self->library, "started", G_CALLBACK(started), self, G_CONNECT_SWAPPED);
  g_signal_connect_object(self->library, "added", G_CALLBACK(added), self, G_CONNECT_SWAPPED);
  g_signal_connect_object(self->library, "message", G_CALLBACK(message), self, G_CONNECT_SWAPPED);
  g_signal_connect_object(self->library, "closed", G_CALLBACK(closed), self, G_CONNECT_SWAPPED);
  gtk_list_box_bind_model(self->list, desk_library_documents(self->library), make_row, NULL, NULL);
  g_signal_connect_object(desk_library_documents(self->library), "items-changed",
                          G_CALLBACK(documents_changed), self, G_CONNECT_SWAPPED | G_CONNECT_AFTER);
  update(self);
}

DeskWindow* desk_window_new(GtkApplication* application, const char* model_path) {
  DeskWindow* self = g_object_new(DESK_TYPE_WINDOW, "application", application, NULL);
  if (model_path) desk_library_start(self->library, model_path);
  else started(self, "The bundled model is missing.");
  return self;
}
