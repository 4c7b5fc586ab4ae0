#include "library.h"

#include <errno.h>
#include <glib/gstdio.h>
#include <string.h>

#include "job.h"
#include "text.h"
#include "words.h"
#include "worker.h"

struct _DeskLibrary {
  GObject parent;
  DeskShelf shelf;
  kv_model* model;
  GListStore* documents;
  DeskWorker* worker;
  GCancellable* cancellable; /* of the thread's work */
  guint open;                /* documents that are still to be closed */
  gboolean closing;
};

G_DEFINE_TYPE(DeskLibrary, desk_library, G_TYPE_OBJECT)

enum { STARTED, ADDED, MESSAGE, CLOSED, SIGNALS };
static guint signals[SIGNALS];

static void desk_library_finalize(GObject* object) {
  DeskLibrary* self = DESK_LIBRARY(object);
  desk_worker_free(self->worker);
  g_object_unref(self->documents);
  g_object_unref(self->cancellable);
  kv_library_close(self->shelf.library);
  kv_close(self->model);
  g_free(self->shelf.all_caches);
  g_free(self->shelf.caches);
  g_free(self->shelf.texts);
  G_OBJECT_CLASS(desk_library_parent_class)->finalize(object);
}

static void desk_library_class_init(DeskLibraryClass* class) {
  G_OBJECT_CLASS(class)->finalize = desk_library_finalize;
  signals[STARTED] = g_signal_new("started", DESK_TYPE_LIBRARY, G_SIGNAL_RUN_LAST, 0, NULL, NULL,
                                  NULL, G_TYPE_NONE, 1, G_TYPE_STRING);
  signals[ADDED] = g_signal_new("added", DESK_TYPE_LIBRARY, G_SIGNAL_RUN_LAST, 0, NULL, NULL, NULL,
                                G_TYPE_NONE, 1, DESK_TYPE_DOCUMENT);
  signals[MESSAGE] = g_signal_new("message", DESK_TYPE_LIBRARY, G_SIGNAL_RUN_LAST, 0, NULL, NULL,
                                  NULL, G_TYPE_NONE, 1, G_TYPE_STRING);
  signals[CLOSED] = g_signal_new("closed", DESK_TYPE_LIBRARY, G_SIGNAL_RUN_LAST, 0, NULL, NULL,
                                 NULL, G_TYPE_NONE, 0);
}

static void desk_library_init(DeskLibrary* self) {
  self->shelf.all_caches = g_build_filename(g_get_user_data_dir(), "kvasir-desk", "caches", NULL);
  self->shelf.texts = g_build_filename(g_get_user_data_dir(), "kvasir-desk", "texts", NULL);
  self->documents = g_list_store_new(DESK_TYPE_DOCUMENT);
  self->worker = desk_worker_new();
  self->cancellable = g_cancellable_new();
}

DeskLibrary* desk_library_new(void) { return g_object_new(DESK_TYPE_LIBRARY, NULL); }
kv_model* desk_library_model(DeskLibrary* self) { return self->model; }
const DeskShelf* desk_library_shelf(DeskLibrary* self) { return &self->shelf; }
GListModel* desk_library_documents(DeskLibrary* self) { return G_LIST_MODEL(self->documents); }

DeskDocument* desk_library_find(DeskLibrary* self, const char* name) {
  for (guint i = 0; i < g_list_model_get_n_items(G_LIST_MODEL(self->documents)); ++i) {
    g_autoptr(DeskDocument) document = g_list_model_get_item(G_LIST_MODEL(self->documents), i);
    if (g_str_equal(desk_document_name(document), name)) return document; /* the list has it */
  }
  return NULL;
}

static void post_message(DeskLibrary* self, const char* message) {
  g_signal_emit(self, signals[MESSAGE], 0, message);
}

/* ---- starting -------------------------------------------------------------------------------- */

typedef struct Start {
  DeskLibrary* self;
  char *model_path, *caches;
  kv_model* model;
  kv_library* library;
  GArray* saved;    /* kv_library_document */
  GPtrArray* texts; /* of Known */
  kv_status status;
  kv_error error;
} Start;

/* A document whose text is known. */
typedef struct Known {
  char* name;
  guint64 bytes; /* of the text */
  double part;   /* prefilled; -1: unknown */
} Known;

static void free_known(gpointer pointer) {
  Known* known = pointer;
  g_free(known->name);
  g_free(known);
}

static void list_texts(Start* start) {
  const DeskShelf* shelf = &start->self->shelf;
  const DeskShelf here = {.caches = start->caches};
  g_autoptr(GDir) folder = g_dir_open(shelf->texts, 0, NULL);
  const char* file = NULL;
  while (folder && (file = g_dir_read_name(folder))) {
    if (!g_str_has_suffix(file, ".txt")) continue;
    Known* known = g_new0(Known, 1);
    known->name = g_strndup(file, strlen(file) - 4);
    g_autofree char *text = desk_shelf_text_path(shelf, known->name),
                    *talk = desk_shelf_conversation_path(&here, known->name);
    GStatBuf facts;
    known->bytes = g_stat(text, &facts) == 0 ? (guint64)facts.st_size : 0;
    DeskConversation conversation = desk_conversation_load(talk);
    known->part = conversation.part;
    g_ptr_array_unref(conversation.answers);
    g_ptr_array_add(start->texts, known);
  }
}

/* The folder of the model's cache files. Each model has its own file of a document. */
static char* caches_of(const DeskShelf* shelf, const kv_model* model) {
  kv_model_info info;
  kv_init(&info, sizeof info);
  kv_model_get_info(model, &info, NULL);
  info.fingerprint[16] = '\0'; /* enough to distinguish models */
  return g_build_filename(shelf->all_caches, info.fingerprint, NULL);
}

static void start_work(gpointer pointer) {
  Start* start = pointer;
  const DeskShelf* shelf = &start->self->shelf;
  if (g_mkdir_with_parents(shelf->all_caches, 0700) != 0 ||
      g_mkdir_with_parents(shelf->texts, 0700) != 0) {
    start->status = KV_IO;
    g_snprintf(start->error.message, sizeof start->error.message, "%s: %s", shelf->texts,
               g_strerror(errno));
    return;
  }
  start->status = kv_open(start->model_path, NULL, NULL, &start->model, &start->error);
  if (start->status == KV_OK) {
    start->caches = caches_of(shelf, start->model);
    start->status = kv_library_open(start->caches, NULL, &start->library, &start->error);
  }
  kv_library_document saved;
  kv_init(&saved, sizeof saved);
  while (start->status == KV_OK) {
    start->status = kv_library_list(start->library, start->saved->len, &saved, &start->error);
    if (start->status == KV_OK) g_array_append_val(start->saved, saved);
  }
  if (start->status == KV_NOT_FOUND && start->error.sys_errno == 0 && start->library)
    start->status = KV_OK; /* the end of the list */
  list_texts(start);
}

/* A sentence, or NULL. */
static char* start_failure(const Start* start) {
  if (start->status == KV_OK) return NULL;
  g_autofree char *file = g_path_get_basename(start->model_path),
                  *name = g_filename_display_name(file),
                  *failure = start->status == KV_NOT_FOUND
                                 ? g_strdup("The file is missing.")
                                 : desk_failure(start->status, start->error.message);
  return g_strdup_printf("“%s”: %s", name, failure);
}

static void start_done(gpointer pointer) {
  Start* start = pointer;
  DeskLibrary* self = start->self;
  if (start->status == KV_OK && !self->closing && !self->model) {
    self->model = g_steal_pointer(&start->model);
    self->shelf.library = g_steal_pointer(&start->library);
    self->shelf.caches = g_steal_pointer(&start->caches);
    for (guint i = 0; i < start->saved->len; ++i) {
      const kv_library_document* saved = &g_array_index(start->saved, kv_library_document, i);
      g_autoptr(DeskDocument) document = desk_document_new(&self->shelf, saved->name);
      desk_document_set_saved(document, saved);
      g_list_store_append(self->documents, document);
    }
    for (guint i = 0; i < start->texts->len; ++i) {
      const Known* known = g_ptr_array_index(start->texts, i);
      DeskDocument* document = desk_library_find(self, known->name);
      if (!document) {
        g_autoptr(DeskDocument) created = desk_document_new(&self->shelf, known->name);
        g_list_store_append(self->documents, created);
        document = created; /* the list has it */
      }
      desk_document_set_known(document, known->bytes, known->part);
    }
  }
  g_autofree char* failure = start_failure(start);
  g_signal_emit(self, signals[STARTED], 0, failure);
  kv_library_close(start->library);
  kv_close(start->model);
  g_array_unref(start->saved);
  g_ptr_array_unref(start->texts);
  g_free(start->model_path);
  g_free(start->caches);
  g_free(start);
  g_object_unref(self);
}

void desk_library_start(DeskLibrary* self, const char* model_path) {
  Start* start = g_new0(Start, 1);
  start->self = g_object_ref(self);
  start->model_path = g_strdup(model_path);
  start->saved = g_array_new(FALSE, FALSE, sizeof(kv_library_document));
  start->texts = g_ptr_array_new_with_free_func(free_known);
  desk_worker_push(self->worker, start_work, start_done, start);
}

/* ---- adding ---------------------------------------------------------------------------------- */

typedef struct Addition {
  DeskLibrary* self;
  GFile* file;
  char *name, *remark;
  GError* error;
} Addition;

static gboolean is_text_of(const char* path, GBytes* text) {
  GStatBuf facts;
  if (g_stat(path, &facts) != 0 || (gsize)facts.st_size != g_bytes_get_size(text)) return FALSE;
  g_autofree char* contents = NULL;
  gsize size = 0;
  if (!g_file_get_contents(path, &contents, &size, NULL)) return FALSE;
  return size == g_bytes_get_size(text) &&
         memcmp(contents, g_bytes_get_data(text, NULL), size) == 0;
}

/* Name of the document that has this text, or NULL. */
static char* known_name(const DeskShelf* shelf, GBytes* text) {
  g_autoptr(GDir) folder = g_dir_open(shelf->texts, 0, NULL);
  const char* file = NULL;
  while (folder && (file = g_dir_read_name(folder))) {
    g_autofree char* path = g_build_filename(shelf->texts, file, NULL);
    if (g_str_has_suffix(file, ".txt") && is_text_of(path, text))
      return g_strndup(file, strlen(file) - 4);
  }
  return NULL;
}

/* The file's name without its ending and without what a document's name cannot have. A number makes
 * it unique. */
static char* new_name(const DeskShelf* shelf, GFile* file) {
  g_autofree char *path = g_file_get_basename(file), *shown = g_filename_display_name(path);
  char* dot = strrchr(shown, '.');
  if (dot && dot > shown && strlen(dot) <= 9) *dot = '\0';
  const char* from = shown;
  while (*from == '.') ++from;
  for (char* c = shown; *c; ++c)
    if (*c == '\\' || g_ascii_iscntrl(*c)) *c = '_';
  gsize size = MIN(strlen(from), 150);
  while (size > 0 && ((guchar)from[size] & 0xC0) == 0x80) --size;
  g_autofree char* base = size > 0 ? g_strndup(from, size) : g_strdup("Document");
  for (guint i = 1;; ++i) {
    g_autofree char* name = i == 1 ? g_strdup(base) : g_strdup_printf("%s (%u)", base, i);
    g_autofree char* text = desk_shelf_text_path(shelf, name);
    g_autoptr(GPtrArray) caches = desk_shelf_all_caches(shelf, name);
    if (!g_file_test(text, G_FILE_TEST_EXISTS) && caches->len == 0) return g_steal_pointer(&name);
  }
}

static void add_work(gpointer pointer) {
  Addition* addition = pointer;
  const DeskShelf* shelf = &addition->self->shelf;
  g_autoptr(GBytes) text = desk_text_load(addition->file, addition->self->cancellable,
                                          &addition->remark, &addition->error);
  if (!text) return;
  addition->name = known_name(shelf, text);
  if (addition->name) return;
  addition->name = new_name(shelf, addition->file);
  g_autofree char* path = desk_shelf_text_path(shelf, addition->name);
  if (g_file_set_contents_full(path, g_bytes_get_data(text, NULL), (gssize)g_bytes_get_size(text),
                               G_FILE_SET_CONTENTS_CONSISTENT, 0600, NULL))
    return;
  g_set_error(&addition->error, G_IO_ERROR, G_IO_ERROR_FAILED, "its text could not be saved");
  g_clear_pointer(&addition->name, g_free);
}

static void add_done(gpointer pointer) {
  Addition* addition = pointer;
  DeskLibrary* self = addition->self;
  g_autofree char *path = g_file_get_basename(addition->file),
                  *shown = g_filename_display_name(path);
  if (self->closing) {
    /* no window shows the message */
  } else if (!addition->name) {
    g_autofree char* message =
        g_strdup_printf("“%s” was not opened: %s.", shown, addition->error->message);
    post_message(self, message);
  } else {
    DeskDocument* document = desk_library_find(self, addition->name);
    if (!document) {
      g_autoptr(DeskDocument) created = desk_document_new(&self->shelf, addition->name);
      g_list_store_insert(self->documents, 0, created);
      document = created; /* the list has it */
    }
    if (addition->remark) {
      g_autofree char* message = g_strdup_printf("“%s”: %s.", shown, addition->remark);
      post_message(self, message);
    }
    g_signal_emit(self, signals[ADDED], 0, document);
  }
  g_clear_error(&addition->error);
  g_object_unref(addition->file);
  g_free(addition->name);
  g_free(addition->remark);
  g_free(addition);
  g_object_unref(self);
}

void desk_library_add(DeskLibrary* self, GFile* file) {
  if (self->closing) return;
  Addition* addition = g_new0(Addition, 1);
  addition->self = g_object_ref(self);
  addition->file = g_object_ref(file);
  desk_worker_push(self->worker, add_work, add_done, addition);
}

/* ---- renaming, removing, closing ------------------------------------------------------------- */

const char* desk_library_check_name(DeskLibrary* self, const char* name) {
  if (!*name) return "A document has a name.";
  if (strlen(name) > 150) return "The name is too long.";
  if (*name == '.') return "A name does not begin with a dot.";
  if (strpbrk(name, "/\\")) return "A name has no slash and no backslash.";
  for (const char* c = name; *c; ++c)
    if (g_ascii_iscntrl(*c)) return "A name has no line ends and no other control characters.";
  if (desk_library_find(self, name)) return "Another document has this name.";
  return NULL;
}

static void was_renamed(DeskDocument* document, const char* failure, gpointer user) {
  DeskLibrary* self = user;
  g_autofree char* message =
      g_strdup_printf("“%s” was not renamed: %s", desk_document_name(document), failure);
  if (failure) post_message(self, message);
  g_object_unref(self);
}

void desk_library_rename(DeskLibrary* self, DeskDocument* document, const char* name) {
  desk_document_rename(document, name, was_renamed, g_object_ref(self));
}

static void was_removed(DeskDocument* document, const char* failure, gpointer user) {
  DeskLibrary* self = user;
  guint place = 0;
  if (failure) {
    g_autofree char* message =
        g_strdup_printf("“%s” was not removed: %s", desk_document_name(document), failure);
    post_message(self, message);
  } else if (g_list_store_find(self->documents, document, &place)) {
    g_list_store_remove(self->documents, place);
  }
  g_object_unref(self);
}

void desk_library_remove(DeskLibrary* self, DeskDocument* document) {
  desk_document_remove(document, was_removed, g_object_ref(self));
}

static void rest_work(gpointer self) { (void)self; }

static void rest_done(gpointer pointer) {
  DeskLibrary* self = pointer;
  g_signal_emit(self, signals[CLOSED], 0);
  g_object_unref(self);
}

/* After the jobs of the library's thread. */
static void close_rest(DeskLibrary* self) {
  desk_worker_push(self->worker, rest_work, rest_done, g_object_ref(self));
}

static void was_closed(DeskDocument* document, const char* failure, gpointer user) {
  DeskLibrary* self = user;
  (void)document;
  (void)failure;
  if (--self->open == 0) close_rest(self);
}

void desk_library_close(DeskLibrary* self) {
  if (self->closing) return;
  self->closing = TRUE;
  g_cancellable_cancel(self->cancellable);
  self->open = g_list_model_get_n_items(G_LIST_MODEL(self->documents));
  if (self->open == 0) close_rest(self);
  for (guint i = 0, count = self->open; i < count; ++i) {
    g_autoptr(DeskDocument) document = g_list_model_get_item(G_LIST_MODEL(self->documents), i);
    desk_document_close(document, was_closed, self);
  }
}
