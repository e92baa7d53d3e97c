# Empties FOLDER, so that no record of an earlier run counts.
file(REMOVE_RECURSE ${FOLDER})
file(MAKE_DIRECTORY ${FOLDER})
