#include "text.h"

#include <poppler.h>
#include <string.h>

#include "paragraphs.h"

/* Of a file. Longer than the context of any model, unless it consists of pictures. */
static const goffset max_bytes = 1 << 30;

static void fail(GError** error, const char* reason) {
  g_clear_error(error);
  g_set_error_literal(error, G_IO_ERROR, G_IO_ERROR_FAILED, reason);
}

/* Replaces the system's text by a reason for the user. */
static void explain(GError** error) {
  const GError* e = *error;
  const gboolean io = e && e->domain == G_IO_ERROR;
  fail(error, io && e->code == G_IO_ERROR_NOT_FOUND           ? "the file is not there"
              : io && e->code == G_IO_ERROR_PERMISSION_DENIED ? "access is not permitted"
              : io && e->code == G_IO_ERROR_IS_DIRECTORY      ? "it is a folder"
                                                              : "it cannot be read");
}

static GBytes* from_pdf(GBytes* file, GCancellable* cancellable, GError** error) {
  PopplerDocument* document = poppler_document_new_from_bytes(file, NULL, error);
  if (!document) {
    const gboolean locked = g_error_matches(*error, POPPLER_ERROR, POPPLER_ERROR_ENCRYPTED);
    fail(error, locked ? "the PDF file has a password" : "the PDF file is damaged");
    return NULL;
  }
  GString* text = g_string_new(NULL);
  const int pages = poppler_document_get_n_pages(document);
  for (int i = 0; i < pages && !g_cancellable_is_cancelled(cancellable); ++i) {
    PopplerPage* page = poppler_document_get_page(document, i);
    g_autofree char* part = page ? poppler_page_get_text(page) : NULL;
    if (part && *part) {
      if (text->len > 0) g_string_append(text, "\n\n");
      desk_append_paragraphs(text, part);
    }
    g_clear_object(&page);
  }
  g_object_unref(document);
  return g_string_free_to_bytes(text);
}

static gboolean begins_with(const char* data, gsize size, const char* mark, gsize mark_size) {
  return size >= mark_size && memcmp(data, mark, mark_size) == 0;
}

/* The file's bytes as UTF-8. A text in no Unicode encoding is taken as Windows-1252, as old texts
 * are. */
static GBytes* from_plain(GBytes* file, char** remark, GError** error) {
  gsize size = 0;
  const char* data = g_bytes_get_data(file, &size);
  if (begins_with(data, size, "\xEF\xBB\xBF", 3)) return g_bytes_new_from_bytes(file, 3, size - 3);
  if (g_utf8_validate(data, (gssize)size, NULL)) return g_bytes_ref(file);
  const gboolean utf16 =
      begins_with(data, size, "\xFF\xFE", 2) || begins_with(data, size, "\xFE\xFF", 2);
  if (!utf16 && memchr(data, 0, size)) {
    fail(error, "it is neither a text nor a PDF file");
    return NULL;
  }
  gsize converted = 0;
  char* text = g_convert(data, (gssize)size, "UTF-8", utf16 ? "UTF-16" : "WINDOWS-1252", NULL,
                         &converted, error);
  if (!text) {
    fail(error, "its encoding is damaged");
    return NULL;
  }
  *remark =
      g_strdup_printf("its text was converted from %s to UTF-8", utf16 ? "UTF-16" : "Windows-1252");
  return g_bytes_new_take(text, converted);
}

static GBytes* load_file(GFile* file, GCancellable* cancellable, GError** error) {
  g_autoptr(GFileInfo) info =
      g_file_query_info(file, G_FILE_ATTRIBUTE_STANDARD_SIZE "," G_FILE_ATTRIBUTE_STANDARD_TYPE, 0,
                        cancellable, error);
  if (!info) {
    explain(error);
    return NULL;
  }
  if (g_file_info_get_size(info) > max_bytes) {
    fail(error, "it is longer than 1 GiB");
    return NULL;
  }
  GBytes* bytes = g_file_load_bytes(file, cancellable, NULL, error);
  if (!bytes) explain(error);
  return bytes;
}

GBytes* desk_text_load(GFile* file, GCancellable* cancellable, char** remark, GError** error) {
  *remark = NULL;
  g_autoptr(GBytes) bytes = load_file(file, cancellable, error);
  if (!bytes) return NULL;
  gsize size = 0;
  const char* data = g_bytes_get_data(bytes, &size);
  const gboolean pdf = begins_with(data, size, "%PDF-", 5);
  g_autoptr(GBytes) text =
      pdf ? from_pdf(bytes, cancellable, error) : from_plain(bytes, remark, error);
  if (g_cancellable_set_error_if_cancelled(cancellable, text ? error : NULL)) return NULL;
  if (!text) return NULL;
  data = g_bytes_get_data(text, &size);
  gsize blank = 0;
  while (blank < size && g_ascii_isspace(data[blank])) ++blank;
  if (blank == size) {
    fail(error, pdf ? "it has no text: its pages may be pictures" : "it is empty");
    return NULL;
  }
  if (memchr(data, 0, size)) {
    fail(error, "it is neither a text nor a PDF file");
    return NULL;
  }
  return g_steal_pointer(&text);
}
