# What Doxygen reads in the place of a header: its first comment belongs to the file; the inline namespace of the ABI is
# no part of the names that callers write; comments of the C header are those of what follows, or precedes, them.
s/namespace bifolio::inline v[0-9_]+/namespace bifolio/
0,/^\/\/\/ /s/^\/\/\/ /\/\/\/ @file\n\/\/\/\n\/\/\/ /
/^\/\* (SPDX|---- )/d
0,/^\/\* /s/^\/\* /\/** @file\n *\n * /
s/^\/\* /\/** /
s/([;,{]) +\/\* /\1 \/**< /
# A struct and its typedef have one name, which Sphinx takes once.
s/^typedef struct (bifolio_[a-z_]+) \{/struct \1 {/
s/^\} bifolio_[a-z_]+;/};/
