# SPDX-License-Identifier: Apache-2.0
"""pages.py <headers> <Doxygen's XML> <out>: a page for each public header, one for the C interface, one for the Python
package."""

import pathlib
import sys
import xml.etree.ElementTree as ElementTree

headers, xml, out = map(pathlib.Path, sys.argv[1:])


def write(name, title, body):
    (out / f"{name}.rst").write_text(f"{title}\n{'=' * len(title)}\n\n{body}", encoding="utf-8")


# Doxygen has the functions of a namespace with the namespace, which all headers share. Here they are put with the header
# that declares them. Macros are the headers' own.
members = {}
for name in ("namespacebifolio.xml", "namespacebifolio_1_1cuda.xml"):
    for section in ElementTree.parse(xml / name).iter("sectiondef"):
        for member in section.iter("memberdef"):
            value = member.find("initializer")
            if value is not None and "BIFOLIO_" in "".join(value.itertext()):  # by macros, which Sphinx does not expand
                member.remove(value)
            file = pathlib.Path(member.find("location").get("file")).name
            members.setdefault(file, {}).setdefault(section.get("kind"), []).append(member)
for path in xml.glob("*_8h*.xml"):
    tree = ElementTree.parse(path)
    file = tree.getroot().find("compounddef")
    for child in list(file):
        if child.tag == "innernamespace" or (child.tag == "sectiondef" and child.get("kind") == "define"):
            file.remove(child)
    description = next(i for i, child in enumerate(file) if child.tag in ("briefdescription", "detaileddescription"))
    for kind, found in members.get(file.find("compoundname").text, {}).items():
        section = ElementTree.Element("sectiondef", kind=kind)
        section.extend(found)
        file.insert(description, section)
    tree.write(path, encoding="utf-8", xml_declaration=True)

names = sorted(path.stem for path in headers.glob("*.hpp") if path.stem != "bifolio")
for name in names:
    write(f"cpp_{name}", f"bifolio/{name}.hpp", f".. doxygenfile:: {name}.hpp\n   :project: bifolio\n")
write("c", "bifolio/c/bifolio.h", ".. doxygenfile:: bifolio.h\n   :project: bifolio\n")
write("python", "The Python package", ".. automodule:: bifolio\n   :members:\n   :imported-members:\n\n"
      "Models of transformers\n----------------------\n\n.. automodule:: bifolio.hf\n   :members: Cache\n")
write("index", "bifolio: reference",
      "What every function takes, gives and refuses. How it fits together is on the pages of ``docs/`` in the repository. "
      "All names of C++ are in the namespace ``bifolio``, those of ``cuda.hpp`` in ``bifolio::cuda``.\n\n"
      ".. toctree::\n   :caption: C\n\n   c\n\n"
      ".. toctree::\n   :caption: Python\n\n   python\n\n"
      ".. toctree::\n   :caption: C++\n\n" + "".join(f"   cpp_{name}\n" for name in names))
