#include "application.h"

#include <glib-unix.h>
#include <kvasir.h>
#include <signal.h>

#include "window.h"

struct _DeskApplication {
  AdwApplication parent;
  char* model_path; /* NULL: no option, and no bundled model */
};

G_DEFINE_TYPE(DeskApplication, desk_application, ADW_TYPE_APPLICATION)

static DeskWindow* window_of(GApplication* application) {
  GtkWindow* window = gtk_application_get_active_window(GTK_APPLICATION(application));
  while (window && gtk_window_get_transient_for(window))
    window = gtk_window_get_transient_for(window);
  if (!window)
    window = GTK_WINDOW(
        desk_window_new(GTK_APPLICATION(application), DESK_APPLICATION(application)->model_path));
  return DESK_WINDOW(window);
}

static void desk_application_activate(GApplication* application) {
  gtk_window_present(GTK_WINDOW(window_of(application)));
}

static void desk_application_open(GApplication* application, GFile** files, int count,
                                  const char* hint) {
  DeskWindow* window = window_of(application);
  (void)hint;
  gtk_window_present(GTK_WINDOW(window));
  desk_window_open_files(window, files, count);
}

static int desk_application_handle_local_options(GApplication* application, GVariantDict* options) {
  DeskApplication* self = DESK_APPLICATION(application);
  g_autoptr(GError) error = NULL;
  const gboolean named = g_variant_dict_lookup(options, "model", "^ay", &self->model_path);
  static const char* const bundled[] = {INSTALLED_MODEL, SOURCE_MODEL};
  for (gsize i = 0; !self->model_path && i < G_N_ELEMENTS(bundled); ++i)
    if (g_file_test(bundled[i], G_FILE_TEST_EXISTS)) self->model_path = g_strdup(bundled[i]);
  if (!g_application_register(application, NULL, &error)) {
    g_printerr("%s\n", error->message);
    return 1;
  }
  if (named && g_application_get_is_remote(application)) {
    g_printerr("Kvasir Desk is running: close its window to use another model.\n");
    return 1;
  }
  return -1;
}

static void open_files(GSimpleAction* action, GVariant* parameter, gpointer application) {
  (void)action;
  (void)parameter;
  desk_window_choose_files(window_of(application));
}

static void about(GSimpleAction* action, GVariant* parameter, gpointer application) {
  const uint32_t version = kv_version();
  g_autofree char* text =
      g_strdup_printf("%u.%u.%u", version / 10000, version / 100 % 100, version % 100);
  (void)action;
  (void)parameter;
  adw_show_about_window(GTK_WINDOW(window_of(application)), "application-name", "Kvasir Desk",
                        "application-icon", "org.kvasir.Desk", "version", text, "license-type",
                        GTK_LICENSE_MIT_X11, "comments",
                        "Answers questions about long documents, on this computer.", NULL);
}

static void quit(GSimpleAction* action, GVariant* parameter, gpointer application) {
  GtkWindow* window = gtk_application_get_active_window(application);
  (void)action;
  (void)parameter;
  if (window) gtk_window_close(GTK_WINDOW(window_of(application)));
  else g_application_quit(application);
}

static gboolean interrupted(gpointer application) {
  quit(NULL, NULL, application);
  return G_SOURCE_CONTINUE;
}

static const GActionEntry actions[] = {
    {.name = "open", .activate = open_files},
    {.name = "about", .activate = about},
    {.name = "quit", .activate = quit},
};

static const struct {
  const char *action, *keys[2];
} shortcuts[] = {
    {"app.open", {"<Control>o", NULL}}, {"app.quit", {"<Control>q", NULL}},
    {"win.stop", {"Escape", NULL}},     {"win.show-text", {"<Control>d", NULL}},
    {"win.show-library", {"F9", NULL}}, {"win.ask-all", {"<Control>l", NULL}},
};

static void desk_application_startup(GApplication* application) {
  G_APPLICATION_CLASS(desk_application_parent_class)->startup(application);
  g_action_map_add_action_entries(G_ACTION_MAP(application), actions, G_N_ELEMENTS(actions),
                                  application);
  for (gsize i = 0; i < G_N_ELEMENTS(shortcuts); ++i)
    gtk_application_set_accels_for_action(GTK_APPLICATION(application), shortcuts[i].action,
                                          (const char**)shortcuts[i].keys);
  gtk_window_set_default_icon_name("org.kvasir.Desk");
  g_unix_signal_add(SIGINT, interrupted, application);
  g_unix_signal_add(SIGTERM, interrupted, application);
}

static void desk_application_finalize(GObject* object) {
  g_free(DESK_APPLICATION(object)->model_path);
  G_OBJECT_CLASS(desk_application_parent_class)->finalize(object);
}

static void desk_application_class_init(DeskApplicationClass* class) {
  GApplicationClass* application = G_APPLICATION_CLASS(class);
  G_OBJECT_CLASS(class)->finalize = desk_application_finalize;
  application->startup = desk_application_startup;
  application->activate = desk_application_activate;
  application->open = desk_application_open;
  application->handle_local_options = desk_application_handle_local_options;
}

static void desk_application_init(DeskApplication* self) {
  static const GOptionEntry options[] = {
      {.long_name = "model",
       .short_name = 'm',
       .arg = G_OPTION_ARG_FILENAME,
       .description = "The model, a GGUF file",
       .arg_description = "MODEL"},
      {0},
  };
  g_application_add_main_option_entries(G_APPLICATION(self), options);
  g_application_set_option_context_parameter_string(G_APPLICATION(self), "[DOCUMENT…]");
  g_application_set_option_context_summary(
      G_APPLICATION(self), "Answers questions about documents: text, Markdown, PDF.");
}

DeskApplication* desk_application_new(void) {
  return g_object_new(DESK_TYPE_APPLICATION, "application-id", "org.kvasir.Desk", "flags",
                      G_APPLICATION_HANDLES_OPEN, NULL);
}
