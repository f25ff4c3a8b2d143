"""Helm's own engine for the tests: reads requests as a JSON list from standard input, and writes responses as a JSON list.

    {"do": "render", "chart": DIR, "values": {…}, "name": …, "namespace": …}   → {"objects": […], "notes": …}
    {"do": "lint", "chart": DIR, "values": {…}}                                → {"findings": […]}
    {"do": "install" | "upgrade", "chart", "values", "name", "namespace", "kubeconfig"}  → {"notes": …}
    {"do": "uninstall", "name", "namespace", "kubeconfig"}                     → {}
    {"do": "yaml", "text": …}                                                  → {"objects": […]}

An answer is {"error": …} when Helm refuses.
"""

import json
import sys

import helm_python as helm
import yaml


class Loader(yaml.SafeLoader):
    """Refuses a duplicate key in a map, because tools disagree on which one counts."""

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = {str(key) for key in keys if keys.count(key) > 1}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))} twice in a map{node.start_mark}")
        return super().construct_mapping(node, deep)


def objects(text):
    return [document for document in yaml.load_all(text, Loader) if document]


def render(request):
    with helm.Chart.load(request["chart"]) as chart:
        files = chart.render(request["values"], name=request["name"], namespace=request["namespace"])
    found, notes = [], ""
    for path, text in sorted(files.items()):
        if path.endswith("NOTES.txt"):
            notes = text
        else:
            found += objects(text)
    return {"objects": found, "notes": notes}


def lint(request):
    report = helm.lint(request["chart"], request["values"], strict=True, kube_version="v1.36.0")
    found = [f"{message['path']}: {message['error']}" for message in report["messages"] if message["severity"] > 1]
    return {"findings": found + report["errors"]}


def release(request):
    with helm.Config(kubeconfig_path=request["kubeconfig"], namespace=request["namespace"]) as config:
        if request["do"] == "uninstall":
            config.uninstall(request["name"])
            return {}
        done = getattr(config, request["do"])(request["chart"], request["name"], request["values"])
        return {"notes": done.get("notes", "")}


def answer(request):
    try:
        if request["do"] == "yaml":
            return {"objects": objects(request["text"])}
        return {"render": render, "lint": lint}.get(request["do"], release)(request)
    except helm.HelmError as error:
        return {"error": str(error)}


json.dump([answer(request) for request in json.load(sys.stdin)], sys.stdout, default=str)
