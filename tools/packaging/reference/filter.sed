# kvasir.h's comments are C's; this makes them Doxygen's. A comment that begins a line is about what follows, one behind code about that.
1s,^/\* ,/** @file\n * ,
# What the header's rules say of every struct, and of every callback's pointer.
s,^  uint32_t struct_size;$,&  /**< sizeof the struct: the rules for every function */,
s,^  void \*\(log\|progress\)_user;$,&  /**< given to \1 with each call */,
# Headings, and lines of examples.
s,^/\* ---- \(.*[^ -]\) -*\ *\*/$,,
s,^ \*     \(.*\)$, * <tt>\1</tt><br>,
s,^\( *\)/\* ,\1/** ,
s,\([^ ]\)\( *\)/\* ,\1\2/**< ,
