"""Calls kas like any Python program: with grpcio, and stubs that grpcio-tools generates from proto/.

What it is told comes as JSON on standard input; it says what it has checked, and ends with 0 when all of that held.
"""

import base64
import hashlib
import hmac
import json
import os
import sys
import tempfile
import time
import uuid

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_tools import protoc

WITHIN = 20  # seconds that any call may take
KIB = 1024


def stubs(proto, out):
    """Compiles every file of proto/ into a folder, and makes the modules importable."""
    files = [os.path.join(folder, name) for folder, _, names in os.walk(proto) for name in names]
    well_known = os.path.join(os.path.dirname(protoc.__file__), "_proto")
    arguments = [f"-I{proto}", f"-I{well_known}", f"--python_out={out}", f"--grpc_python_out={out}"]
    if protoc.main(["protoc", *arguments, *files]) != 0:
        raise SystemExit("protoc failed")
    sys.path.insert(0, out)


def part(value):
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def sign(secret, issuer, alg="HS256", claims=None, exp=60, nbf=-5):
    """Returns a token in the format of GitLab (lib/json_web_token), with the changes of a case."""
    now = int(time.time())
    said = {"jti": str(uuid.uuid4()), "aud": "gitlab-kas", "iss": issuer}
    said |= {"iat": now, "nbf": now + nbf, "exp": now + exp} | (claims or {})
    said = {name: value for name, value in said.items() if value is not None}
    text = part({"alg": alg, "typ": "JWT"}) + b"." + part(said)
    digest = {"HS384": hashlib.sha384, "HS512": hashlib.sha512}.get(alg, hashlib.sha256)
    signature = b"" if alg == "none" else part(hmac.new(secret, text, digest).digest())
    return (text + b"." + signature).decode()


def check(what, holds, got):
    if not holds:
        raise SystemExit(f"{what}: {got!r}")


def refused(call, code, text):
    """Makes a call that must fail in this way."""
    try:
        got = call()
        got = list(got) if hasattr(got, "__next__") else got
    except grpc.RpcError as error:
        check(text, error.code() == code and text in error.details(), (error.code(), error.details()))
        return error
    raise SystemExit(f"{code} {text} expected, got {got!r}")


def tokens(plan, channel, secrets):
    """Valid and invalid tokens of each kind, for methods of kas and for forwarded ones."""
    from gitlab.agent.agent_tracker.rpc_pb2 import GetConnectedAgentsRequest
    from gitlab.agent.agent_tracker.rpc_pb2_grpc import AgentTrackerStub

    own = AgentTrackerStub(channel).GetConnectedAgents
    passed_on = channel.unary_unary("/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest")
    for case in plan["tokens"]:
        changed = {name: case[name] for name in ("alg", "claims", "exp", "nbf") if name in case}
        token = sign(secrets[case.get("secret", "new")], plan["issuer"], **changed)
        value = f"{case.get('scheme', 'Bearer')} {token}".lstrip()
        metadata = [("authorization", value)] * case.get("times", 1)
        call = lambda: own(GetConnectedAgentsRequest(agent_id=1), metadata=metadata, timeout=WITHIN)
        if "message" in case:
            error = refused(call, grpc.StatusCode.UNAUTHENTICATED, case["message"])
            check(case["what"], error.details() == case["message"], error.details())
            refused(
                lambda: passed_on(b"", metadata=[*metadata, ("kas-agent-id", "1")], timeout=WITHIN),
                grpc.StatusCode.UNAUTHENTICATED,
                case["message"],
            )
        else:
            check(case["what"], len(call().agents) == 1, case)


def kas_api(channel, metadata):
    from kas.api.v1 import api_pb2 as api
    from kas.api.v1.api_pb2_grpc import KasApiStub

    kas = KasApiStub(channel)
    call = {"metadata": metadata, "timeout": WITHIN}
    agents = kas.ConnectedAgentsById(api.ConnectedAgentsByIdRequest(agent_id=1), **call).agents
    check("the agent is connected", [agent.id for agent in agents] == [1] and agents[0].version != "", agents)
    listed = kas.ConnectedAgentsForProject(api.ConnectedAgentsForProjectRequest(project_id=1), **call).agents
    check("and of its project", [agent.id for agent in listed] == [1], listed)
    first = kas.GetPods(api.GetPodsRequest(agent_id=1, page_size=5), **call)
    rest = kas.GetPods(api.GetPodsRequest(agent_id=1, page_token=first.next_page_token), **call)
    names = [pod.name for pod in [*first.pods, *rest.pods]]
    check("pods in pages", len(first.pods) == 5 and len(names) >= 12 and "web-1" in names, names)
    replicas = kas.ListReplicas(api.ListReplicasRequest(), **call).replicas
    check("one replica", [replica.standing for replica in replicas] == ["self"], replicas)
    told = kas.ExplainAgent(api.ExplainAgentRequest(agent_id=1), **call)
    check("how a request would go", len(told.replicas) == 1 and "idle tunnels here" in told.route[0], told)
    watch = kas.WatchConnectedAgents(api.WatchConnectedAgentsRequest(agent_id=1), **call)
    events = [next(watch).WhichOneof("event"), next(watch).WhichOneof("event")]
    check("a watch begins with what is", events == ["connected", "snapshot_complete"], events)
    watch.cancel()
    refused(
        lambda: kas.GetPods(api.GetPodsRequest(agent_id=0), **call),
        grpc.StatusCode.INVALID_ARGUMENT,
        "agent_id: ",
    )
    late = refused(
        lambda: kas.GetPods(api.GetPodsRequest(agent_id=2), metadata=metadata, timeout=0.5),
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "",
    )
    check("the deadline counts", late.code() == grpc.StatusCode.DEADLINE_EXCEEDED, late)


def gitlab(channel, metadata):
    from gitlab.agent.agent_tracker import rpc_pb2 as tracker
    from gitlab.agent.agent_tracker.rpc_pb2_grpc import AgentTrackerStub
    from gitlab.agent.event.event_pb2 import GitPushEvent, Project
    from gitlab.agent.notifications.rpc_pb2 import GitPushEventRequest
    from gitlab.agent.notifications.rpc_pb2_grpc import NotificationsStub
    from gitlab.agent.server_info.rpc_pb2 import GetServerInfoRequest
    from gitlab.agent.server_info.rpc_pb2_grpc import ServerInfoStub

    # The feature flags of current GitLab.
    call = {"metadata": [*metadata, ("kas-feature-a-flag", "true")], "timeout": WITHIN}
    stub = AgentTrackerStub(channel)
    for request in (
        tracker.GetConnectedAgentsRequest(agent_id=1),
        tracker.GetConnectedAgentsRequest(project_id=1),
    ):
        agents = stub.GetConnectedAgents(request, **call).agents
        check("connected", [(agent.agent_id, agent.project_id) for agent in agents] == [(1, 1)], agents)
    by = stub.GetConnectedAgentsByAgentIDs(tracker.GetConnectedAgentsByAgentIDsRequest(agent_ids=[1, 2]), **call)
    newest = tracker.GetConnectedAgentksByAgentIDsRequest(agent_ids=[2, 1])
    newest = stub.GetConnectedAgentksByAgentIDs(newest, **call)
    check("by ids", len(by.agents) == 1 and list(by.agents) == list(newest.agents), (by, newest))
    refused(
        lambda: stub.GetConnectedAgents(tracker.GetConnectedAgentsRequest(), **call),
        grpc.StatusCode.INVALID_ARGUMENT,
        "value is required",
    )
    info = ServerInfoStub(channel).GetServerInfo(GetServerInfoRequest(), **call).current_server_info
    check("which kas", info.version.startswith("v"), info)
    event = GitPushEvent(project=Project(id=1, full_path="a/b"))
    NotificationsStub(channel).GitPushEvent(GitPushEventRequest(event=event), **call)


def passed_on(channel, metadata):
    """MakeRequest: a complete response, and one that continues until the caller cancels."""
    from gitlab.agent.grpctool.grpctool_pb2 import HttpRequest
    from gitlab.agent.kubernetes_api.rpc_pb2_grpc import KubernetesApiStub

    make_request = KubernetesApiStub(channel).MakeRequest
    to_agent = [*metadata, ("kas-agent-id", "1")]

    def request(path, query=None):
        head = HttpRequest()
        head.header.request.method = "GET"
        head.header.request.url_path = path
        for name, value in (query or {}).items():
            head.header.request.query[name].value.append(value)
        end = HttpRequest()
        end.trailer.SetInParent()
        return [head, end]

    answer = list(make_request(iter(request("/version")), metadata=to_agent, timeout=WITHIN))
    kinds = [message.WhichOneof("message") for message in answer]
    check("in order", kinds[0] == "header" and kinds[-1] == "trailer", kinds)
    check("status", answer[0].header.response.status_code == 200, answer[0])
    body = b"".join(message.data.data for message in answer)
    check("body", json.loads(body)["platform"] == "demo", body)

    watch = make_request(
        iter(request("/api/v1/pods", {"watch": "true"})), metadata=to_agent, timeout=2 * WITHIN
    )
    check("a watch is answered", next(watch).header.response.status_code == 200, "")
    text = b""
    while text.count(b"\n") < 13:
        text += next(watch).data.data
    check("pods, then an event of a moment ago", json.loads(text.split(b"\n")[0])["type"] == "ADDED", text)
    watch.cancel()

    own = request("/version")
    own[0].header.extra.type_url = "type.googleapis.com/unknown.Extra"
    refused(
        lambda: make_request(iter(own), metadata=to_agent, timeout=WITHIN),
        grpc.StatusCode.INVALID_ARGUMENT,
        "extra is of a type",
    )
    refused(
        lambda: make_request(iter(request("/version")), metadata=metadata, timeout=WITHIN),
        grpc.StatusCode.UNIMPLEMENTED,
        "kas-agent-id",
    )


def reflection_and_health(channel, metadata):
    health = health_pb2_grpc.HealthStub(channel)
    # Without a token.
    status = health.Check(health_pb2.HealthCheckRequest(), timeout=WITHIN).status
    check("health", status == health_pb2.HealthCheckResponse.SERVING, status)
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=WITHIN)
    check("health, watched", next(watch).status == health_pb2.HealthCheckResponse.SERVING, "")
    watch.cancel()
    refused(
        lambda: health.Check(health_pb2.HealthCheckRequest(service="x"), timeout=WITHIN),
        grpc.StatusCode.NOT_FOUND,
        "",
    )
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = iter(
        [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="kas.api.v1.KasApi"),
        ]
    )
    services, file = reflection.ServerReflectionInfo(ask, metadata=metadata, timeout=WITHIN)
    names = {service.name for service in services.list_services_response.service}
    for name in ("kas.api.v1.KasApi", "gitlab.agent.agent_tracker.rpc.AgentTracker", "grpc.health.v1.Health"):
        check("listed", name in names, names)
    files = file.file_descriptor_response.file_descriptor_proto
    check("described", any(b"WatchConnectedAgents" in one for one in files), len(files))
    refused(
        lambda: reflection.ServerReflectionInfo(iter([]), timeout=WITHIN),
        grpc.StatusCode.UNAUTHENTICATED,
        "Request unauthenticated with bearer",
    )


def headers(plan, channel, metadata):
    """Too large headers: kas responds with an explanation up to twice the limit; above that, HTTP/2 refuses them."""
    from gitlab.agent.agent_registrar.rpc_pb2 import RegisterRequest
    from gitlab.agent.agent_registrar.rpc_pb2_grpc import AgentRegistrarStub
    from gitlab.agent.agent_tracker.rpc_pb2 import GetConnectedAgentsRequest
    from gitlab.agent.agent_tracker.rpc_pb2_grpc import AgentTrackerStub

    own = AgentTrackerStub(channel).GetConnectedAgents
    passed_on = channel.unary_unary("/gitlab.agent.kubernetes_api.rpc.KubernetesApi/MakeRequest")
    with grpc.insecure_channel(plan["agent"]) as agents:
        register = AgentRegistrarStub(agents).Register
        agent = [("authorization", f"Bearer {plan['token']}")]
        calls = [
            (lambda large: own(GetConnectedAgentsRequest(agent_id=1), metadata=metadata + large, timeout=WITHIN), True),
            (lambda large: passed_on(b"", metadata=[*metadata, ("kas-agent-id", "1"), *large], timeout=WITHIN), False),
            (lambda large: register(RegisterRequest(pod_id=7), metadata=agent + large, timeout=WITHIN), True),
        ]
        for call, answers in calls:
            if answers:
                call([("x-large", "x" * 14 * KIB)])
            for large in (
                [("x-large", "x" * 17 * KIB)],
                [("x-large", "x" * 31 * KIB)],
                # Many small values.
                [("x-large", "x" * KIB)] * 20,
            ):
                refused(lambda: call(large), grpc.StatusCode.RESOURCE_EXHAUSTED, "at most 16384 are accepted here")
            refused(lambda: call([("x-large", "x" * 40 * KIB)]), grpc.StatusCode.UNKNOWN, "431")
            # The connection still works.
            if answers:
                call([])


def main():
    plan = json.load(sys.stdin)
    with tempfile.TemporaryDirectory(prefix="kas-python-") as out:
        stubs(plan["proto"], out)
        checks(plan)


def checks(plan):
    secrets = {name: base64.b64decode(secret) for name, secret in plan["secrets"].items()}
    with grpc.insecure_channel(plan["api"]) as channel:
        grpc.channel_ready_future(channel).result(WITHIN)
        metadata = [("authorization", f"bearer {sign(secrets['new'], plan['issuer'])}")]
        for what in (kas_api, gitlab, passed_on, reflection_and_health):
            what(channel, metadata)
            print(what.__name__, "ok", flush=True)
        headers(plan, channel, metadata)
        print("headers ok", flush=True)
    # Connections with only wrong tokens are closed: these have sent a valid one first.
    with grpc.insecure_channel(plan["api"]) as channel:
        tokens(plan, channel, secrets)
        print("tokens ok", len(plan["tokens"]), flush=True)


main()
