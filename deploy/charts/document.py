#!/usr/bin/env python3
"""Copies the comments that document values from values.yaml to README.md and values.schema.json of each chart.

    deploy/charts/document.py            writes them
    deploy/charts/document.py --check    fails if they are out of date

Needs PyYAML. Every value, or the map that contains it, must have a comment that begins with `# --`. The schema must have
exactly the values of values.yaml.
"""

import json
import pathlib
import re
import sys

import yaml

BEGIN, END = "<!-- values: written by document.py -->", "<!-- end of values -->"


def documented(text):
    """Returns the documentation of each documented path, in the order of the file."""
    docs, path, comment = {}, [], []
    for line in text.splitlines():
        words = re.match(r"^( *)# ?(.*)$", line)
        if words:
            if words[2].startswith("-- "):
                comment = [words[2][3:]]
            elif comment:
                comment.append(words[2])
            continue
        key = re.match(r"^( *)([A-Za-z][A-Za-z0-9]*):", line)
        if key:
            del path[len(key[1]) // 2:]
            path.append(key[2])
            if comment:
                docs[".".join(path)] = " ".join(comment)
        comment = []
    return docs


def leaves(values, docs, path=""):
    """Yields each value with its path: documented ones, and those in no documented map."""
    for key, value in values.items():
        here = f"{path}.{key}" if path else key
        if here in docs or not isinstance(value, dict) or not value:
            yield here, value
        else:
            yield from leaves(value, docs, here)


def properties(schema, path=""):
    """Yields each property of the schema that has no closed map of properties below it, with its path."""
    for key, below in schema.get("properties", {}).items():
        here = f"{path}.{key}" if path else key
        yield here, below
        if below.get("additionalProperties") is False and "properties" in below:
            yield from properties(below, here)


def table(docs, values):
    lines = ["| value | default | what it is |", "| --- | --- | --- |"]
    for path, value in leaves(values, docs):
        default = json.dumps(value, ensure_ascii=False)
        default = "" if value in ("", None) else f"`{default}`"
        lines.append(f"| `{path}` | {default} | {docs[path].replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def document(chart):
    """Returns the problems of a chart, and the expected content of its files."""
    text = (chart / "values.yaml").read_text()
    values, docs = yaml.safe_load(text), documented(text)
    problems = [f"{path} has no comment that begins with `# --`" for path, _ in leaves(values, docs) if path not in docs]
    schema = json.loads((chart / "values.schema.json").read_text())
    known = dict(properties(schema))
    for path, _ in leaves(values, docs):
        if path not in known:
            problems.append(f"{path} is not in values.schema.json")
        elif path in docs:
            known[path]["description"] = docs[path]
    for path in known:
        at = values
        for key in path.split("."):
            at = at.get(key) if isinstance(at, dict) else None
            if at is None and path != "global" and path not in docs:
                if not any(path.startswith(f"{documented}.") for documented in docs):
                    problems.append(f"{path} of values.schema.json is no value")
                break
    if problems:
        return problems, {}
    readme = (chart / "README.md").read_text()
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    return [], {
        chart / "README.md": f"{before}{BEGIN}\n\n{table(docs, values)}\n\n{END}{after}",
        chart / "values.schema.json": json.dumps(schema, indent=2, ensure_ascii=False) + "\n",
    }


def main():
    check, failed = "--check" in sys.argv[1:], False
    for chart in sorted(path.parent for path in pathlib.Path(__file__).parent.glob("*/Chart.yaml")):
        problems, files = document(chart)
        for file, text in files.items():
            if file.read_text() != text:
                if check:
                    problems.append(f"{file.name} is not current: run deploy/charts/document.py")
                else:
                    file.write_text(text)
        for problem in problems:
            failed = True
            print(f"{chart.name}: {problem}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
