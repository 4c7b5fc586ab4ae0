/* Lines of a page and the paragraphs that they are. */
#include "paragraphs.h"

static void check(const char* page, const char* expected) {
  g_autoptr(GString) text = g_string_new(NULL);
  desk_append_paragraphs(text, page);
  g_assert_cmpstr(text->str, ==, expected);
}

static void test_long_lines_continue(void) {
  check(
      "To Sherlock Holmes she is always\nthe woman. I have seldom heard him\nmention her.\n"
      "In his eyes she eclipses and\npredominates the whole of her sex.",
      "To Sherlock Holmes she is always the woman. I have seldom heard him mention her.\n"
      "In his eyes she eclipses and predominates the whole of her sex.");
}

static void test_headings_items_and_blank_lines_stay(void) {
  check("Contents\n1 One\n2 Two\n\nA line that is as long as the text is wide\ngoes on.",
        "Contents\n1 One\n2 Two\n\nA line that is as long as the text is wide goes on.");
  check("A line that is as long as the text is wide\n\nanother",
        "A line that is as long as the text is wide\n\nanother");
}

static void test_words_are_whole_again(void) {
  check("the photograph was com-\npromising", "the photograph was compromising");
  check("the house in Baker-\nStreet is dark", "the house in Baker- Street is dark");
  check("der gro\xC3\x9F-\nz\xC3\xBCgige K\xC3\xB6nig",
        "der gro\xC3\x9Fz\xC3\xBCgige K\xC3\xB6nig");
}

static void test_odd_pages(void) {
  check("", "");
  check("\n\n", "\n\n");
  check("-\nx", "- x");
}

int main(int argc, char** argv) {
  g_test_init(&argc, &argv, NULL);
  g_test_add_func("/paragraphs/long-lines", test_long_lines_continue);
  g_test_add_func("/paragraphs/kept-breaks", test_headings_items_and_blank_lines_stay);
  g_test_add_func("/paragraphs/hyphens", test_words_are_whole_again);
  g_test_add_func("/paragraphs/odd-pages", test_odd_pages);
  return g_test_run();
}
