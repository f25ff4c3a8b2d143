"""Validates CycloneDX files, named by the arguments, against the schema of the version that they say they have."""

import json
import sys

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

failed = False
for name in sys.argv[1:]:
    with open(name, encoding="utf-8") as file:
        text = file.read()
    version = SchemaVersion.from_version(json.loads(text)["specVersion"])
    for error in JsonStrictValidator(version).validate_str(text, all_errors=True) or ():
        print(f"{name}: {error}", file=sys.stderr)
        failed = True
sys.exit(failed)
