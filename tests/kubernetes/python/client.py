"""Uses a cluster through kas like any Python program: with the package kubernetes of PyPI.

It checks every result, names each part that has passed, and ends with 0 when all have.

    client.py KUBECONFIG NAMESPACE POD LOG      LOG is the file that is the log of the pod
"""

import hashlib
import socket
import sys
import threading

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import portforward, stream

WITHIN = 20  # seconds that anything may take
LARGE = 1 << 20


def check(what, holds, got):
    if not holds:
        raise SystemExit(f"{what}: {got!r}")


def refused(status, reason, call):
    """Makes a call that must fail in this way."""
    try:
        got = call()
    except ApiException as error:
        check(reason, error.status == status and f'"reason":"{reason}"' in error.body, error)
        return
    raise SystemExit(f"{status} {reason} expected, got {got!r}")


def config_map(name, value):
    return {"metadata": {"name": name, "labels": {"of": "python"}}, "data": {"key": value}}


def objects(core, namespace, **_):
    """Creates, changes and deletes an object."""
    core.create_namespaced_config_map(namespace, config_map("python", "one"))
    refused(409, "AlreadyExists", lambda: core.create_namespaced_config_map(namespace, config_map("python", "one")))
    changed = core.patch_namespaced_config_map("python", namespace, {"data": {"key": "two"}})
    check("a patch", changed.data == {"key": "two"}, changed.data)
    changed.data = {"key": "three"}
    replaced = core.replace_namespaced_config_map("python", namespace, changed)
    check("a replacement", replaced.data == {"key": "three"}, replaced.data)
    refused(409, "Conflict", lambda: core.replace_namespaced_config_map("python", namespace, changed))
    read = core.read_namespaced_config_map("python", namespace)
    check("what is read", (read.data, read.metadata.uid) == (replaced.data, replaced.metadata.uid), read)
    applied = core.patch_namespaced_config_map(
        "python",
        namespace,
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "python"}, "data": {"other": "four"}},
        field_manager="python",
        _content_type="application/apply-patch+yaml",
    )
    check("server-side apply", applied.data == {"key": "three", "other": "four"}, applied.data)
    core.delete_namespaced_config_map("python", namespace)
    refused(404, "NotFound", lambda: core.read_namespaced_config_map("python", namespace))


def pages(core, namespace, **_):
    """Lists three objects, two at a time."""
    for name in ("a", "b", "c"):
        core.create_namespaced_config_map(namespace, config_map(f"python-{name}", ""))
    first = core.list_namespaced_config_map(namespace, label_selector="of in (python)", limit=2)
    rest = core.list_namespaced_config_map(
        namespace, label_selector="of in (python)", limit=2, _continue=first.metadata.var_continue
    )
    names = [[item.metadata.name for item in page.items] for page in (first, rest)]
    check("pages", names == [["python-a", "python-b"], ["python-c"]], names)
    core.delete_collection_namespaced_config_map(namespace, label_selector="of=python")


def watches(core, namespace, **_):
    """Sees each change of an object."""
    begin = core.list_namespaced_config_map(namespace).metadata.resource_version
    core.create_namespaced_config_map(namespace, config_map("watched", "one"))
    seen = []
    events = watch.Watch()
    for event in events.stream(
        core.list_namespaced_config_map,
        namespace,
        label_selector="of=python",
        resource_version=begin,
        timeout_seconds=WITHIN,
    ):
        seen.append((event["type"], event["object"].data))
        if event["type"] == "ADDED":
            core.patch_namespaced_config_map("watched", namespace, {"data": {"key": "two"}})
        elif event["type"] == "MODIFIED":
            core.delete_namespaced_config_map("watched", namespace)
        else:
            events.stop()
    one, two = {"key": "one"}, {"key": "two"}
    check("events", seen == [("ADDED", one), ("MODIFIED", two), ("DELETED", two)], seen)


def logs(core, namespace, pod, log):
    """Reads a log while it grows, and leaves."""
    lines = ["first", "second", "third"]
    with open(log, "w", encoding="utf-8") as file:
        print(lines[0], file=file)
    check("the log", core.read_namespaced_pod_log(pod, namespace) == "first\n", pod)
    seen = []
    follow = watch.Watch()
    # With this function, it adds follow=true.
    for line in follow.stream(core.read_namespaced_pod_log, name=pod, namespace=namespace):
        seen.append(line)
        if len(seen) == len(lines):
            follow.stop()
            break
        with open(log, "a", encoding="utf-8") as file:
            print(lines[len(seen)], file=file)
    check("lines of the log", seen == lines, seen)


def run(core, namespace, pod, command, **options):
    """Starts a command in the pod."""
    return stream(
        core.connect_get_namespaced_pod_exec,
        pod,
        namespace,
        command=["sh", "-c", command],
        stdout=True,
        stderr=True,
        _preload_content=False,
        **options,
    )


def execs(core, namespace, pod, **_):
    """Runs commands: with an exit code and both outputs, in a dialogue, and with a large input."""
    command = run(core, namespace, pod, "echo out; echo err >&2; exit 7")
    command.run_forever(timeout=WITHIN)
    got = (command.read_stdout(), command.read_stderr(), command.returncode)
    check("outputs and exit code", got == ("out\n", "err\n", 7), got)

    # The command ends only when it is told to: if the end arrives together with a line, readline_stdout
    # returns nothing.
    script = "for n in 1 2; do read line; echo got $line; done; read end"
    command = run(core, namespace, pod, script, stdin=True)
    for word in ("one", "two"):
        command.write_stdin(f"{word}\n")
        got = command.readline_stdout(timeout=WITHIN)
        check("an answer", got == f"got {word}", got)
    command.write_stdin("end\n")
    command.run_forever(timeout=WITHIN)
    check("the end", command.returncode == 0, command.returncode)

    sent = bytes(at * at % 251 for at in range(LARGE))
    command = run(core, namespace, pod, "sha256sum", stdin=True, binary=True)
    for at in range(0, LARGE, 1 << 15):
        command.write_stdin(sent[at : at + (1 << 15)])
    command.close_channel(0)
    command.run_forever(timeout=WITHIN)
    got = command.read_stdout()
    check("what the command read", got.split()[:1] == [hashlib.sha256(sent).hexdigest().encode()], got)


def forwards_ports(core, namespace, pod, **_):
    """Sends bytes to a port of the pod, which is one of this machine, and reads them again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=echo, args=[server], daemon=True).start()
        forward = portforward(core.connect_get_namespaced_pod_portforward, pod, namespace, ports=str(port))
        sent = bytes(at * at % 251 for at in range(LARGE))
        end = forward.socket(port)
        end.settimeout(WITHIN)
        threading.Thread(target=end.sendall, args=[sent], daemon=True).start()
        got = bytearray()
        while len(got) < LARGE:
            part = end.recv(1 << 16)
            check("more bytes", part, len(got))
            got += part
        check("what came back", got == sent, len(got))
        check("no error", forward.error(port) is None, forward.error(port))
        forward.close()


def echo(server):
    end, _ = server.accept()
    with end:
        while part := end.recv(1 << 16):
            end.sendall(part)


def main():
    kubeconfig, namespace, pod, log = sys.argv[1:]
    core = client.CoreV1Api(config.new_client_from_config(kubeconfig))
    for part in (objects, pages, watches, logs, execs, forwards_ports):
        part(core=core, namespace=namespace, pod=pod, log=log)
        print(part.__name__, "ok", flush=True)


main()
