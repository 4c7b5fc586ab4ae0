# Turns the headers' C comments into Doxygen's. A comment that begins a line documents the
# declaration after it; a comment behind code documents that code.
1s,^/\* ,/** @file\n * ,
# What section 3 of the header says of every struct, and of every callback's pointer.
s,^  uint32_t struct_size;$,&  /**< sizeof the struct: kv_init sets it */,
/^ \*/s,#include,\\#include,
# Headings, and lines of examples and tables.
s,^/\* ==== \([1-9][^=]*[^= ]\) =*\ *\*/$,,
s,^/\* -- \(.*[^ -]\) -- \*/$,,
s,^/\* ==== \([1-9][^=]*[^= ]\) =*$,/* \1,
s,^ \*   \(.*\)$, * <tt>\1</tt><br>,
s,^\( *\)/\* ,\1/** ,
s,\([^ ]\)\( *\)/\* ,\1\2/**< ,
