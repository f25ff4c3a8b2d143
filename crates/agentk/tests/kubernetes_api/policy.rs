//! The policy of the cluster's owner, and the audit log: with a scripted API server that sees every request
//! that agentk sends, and with the real one.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{fs, path::Path};

use agentk::{
    audit::{Audit, Output},
    module::{Modules, kubernetes_api::Guard},
    policy::{PolicyFile, PolicyMetrics},
};
use http_tunnel::HEADER_EXTRA;
use percent_encoding::percent_decode_str;
use prometheus_client::registry::Registry;
use prost::Message as _;
use proto::gitlab::agent::{
    grpctool::http_request,
    kubernetes_api::rpc::{HeaderExtra, ImpersonationConfig},
    prototool::{HttpRequest, Values},
};
use serde_json::Value;
use testkit::kubernetes::Kubernetes;
use tokio::{net::TcpListener, task::JoinHandle};

use crate::{
    real::admin,
    support::{Peer, at, fetch, fetch_of, get, guarded, listen, request},
};

/// Pods of the namespace `a`, and config maps there for one user and group.
const POLICY: &str = r#"
agent:
  - {verbs: [get, list, create], resources: [pods], namespaces: [a]}
impersonated:
  users: ["kas:jane"]
  groups: ["kas:*"]
  rules: [{verbs: [get, list], resources: [configmaps], namespaces: [a]}]
"#;

/// A guard with this policy, and an audit log if there is a path for it.
fn guard(folder: &Path, policy: &str, audit: Option<&Path>) -> (Guard, Option<Audit>) {
    let file = folder.join("policy.yaml");
    fs::write(&file, policy).unwrap();
    let mut registry = Registry::default();
    // Nothing follows the file: it does not change.
    let (policy, _) = PolicyFile::open(&file, PolicyMetrics::new(&mut registry)).unwrap();
    let audit = audit.map(|path| Audit::open(&Output::File(path.to_owned()), false, &mut registry).unwrap());
    (Guard::new(Some(policy), audit.clone()), audit)
}

/// An API server that answers each request with `{}`, and returns the heads of all requests in the end.
fn api_server(listener: TcpListener, last: &'static str) -> JoinHandle<Vec<String>> {
    tokio::spawn(async move {
        let mut heads = Vec::new();
        loop {
            let mut peer = Peer::accept(&listener).await;
            let head = peer.head().await;
            let is_last = head.starts_with(last);
            heads.push(head);
            peer.write("HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}").await;
            if is_last {
                return heads;
            }
        }
    })
}

/// The request that tells the API server of a test that it was the last one.
const LAST: &str = "GET /version?last=";

async fn send_last(modules: &Modules) {
    let mut last = get("/version");
    last.query.insert("last".to_owned(), Values { value: vec![String::new()] });
    assert_eq!(fetch(modules, last, b"").await.unwrap().0.status_code, 200);
}

fn with(mut request: HttpRequest, name: &str, values: &[&str]) -> HttpRequest {
    let value = values.iter().map(|value| (*value).to_owned()).collect();
    request.header.insert(name.to_owned(), Values { value });
    request
}

fn plain(request: HttpRequest) -> http_request::Header {
    http_request::Header { request: Some(request), ..Default::default() }
}

/// A request with a verbatim target.
fn verbatim(method: &str, target: &str) -> http_request::Header {
    http_request::Header { target: target.to_owned().into(), ..plain(request(method, "", &[])) }
}

fn as_user(header: http_request::Header, username: &str, groups: &[&str]) -> http_request::Header {
    let user = ImpersonationConfig {
        username: username.to_owned(),
        groups: groups.iter().map(|group| (*group).to_owned()).collect(),
        ..Default::default()
    };
    let value = HeaderExtra { imp_config: Some(user) }.encode_to_vec();
    let extra = prost_types::Any { type_url: HEADER_EXTRA.to_owned(), value };
    http_request::Header { extra: Some(extra), ..header }
}

#[tokio::test]
async fn a_refused_request_gets_a_status_of_kubernetes_and_never_reaches_the_api_server() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("audit.log");
    let (guard, audit) = guard(folder.path(), POLICY, Some(&log));
    let (listener, url) = listen().await;
    let server = api_server(listener, LAST);
    let modules = guarded(&at(url), guard).await;

    let (header, body) = fetch(&modules, get("/api/v1/namespaces/b/pods?secret=query"), b"").await.unwrap();
    assert_eq!((header.status_code, header.status.as_str()), (403, "403 Forbidden"));
    assert_eq!(header.header["Content-Type"].value, ["application/json"]);
    assert_eq!(header.header["Content-Length"].value, [body.len().to_string()]);
    assert!(!header.header.contains_key("Retry-After"));
    let status: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(
        (&status["kind"], &status["reason"], &status["code"]),
        (&"Status".into(), &"Forbidden".into(), &403.into())
    );
    assert_eq!(
        status["message"],
        "agentk: the policy of this agent does not allow its own account to list pods in namespace \"b\" (request 0123abc)"
    );
    // Also while its body is uploaded.
    let upload = vec![b'x'; 300_000];
    let post = request("POST", "/api/v1/namespaces/b/pods", &[("Authorization", "Bearer secret-token")]);
    assert_eq!(fetch(&modules, post, &upload).await.unwrap().0.status_code, 403);

    let allowed = request("POST", "/api/v1/namespaces/a/pods", &[("Authorization", "Bearer secret-token")]);
    assert_eq!(fetch(&modules, allowed, b"secret-body").await.unwrap().0.status_code, 200);
    let jane = as_user(plain(get("/api/v1/namespaces/a/configmaps/x")), "kas:jane", &["kas:dev"]);
    assert_eq!(fetch_of(&modules, jane, b"").await.unwrap().0.status_code, 200);
    send_last(&modules).await;
    let heads = server.await.unwrap();
    let lines: Vec<&str> = heads.iter().filter_map(|head| head.lines().next()).collect();
    assert_eq!(
        lines,
        [
            "POST /api/v1/namespaces/a/pods HTTP/1.1",
            "GET /api/v1/namespaces/a/configmaps/x HTTP/1.1",
            "GET /version?last= HTTP/1.1"
        ]
    );

    // One line for each of them, with what decided.
    audit.unwrap().flush().await;
    let text = fs::read_to_string(&log).unwrap();
    assert!(!text.contains("secret"), "{text}");
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let seen: Vec<_> = lines
        .iter()
        .map(|line| {
            let field = |name: &str| line[name].as_str().unwrap_or("-").to_owned();
            let status = line["status"].as_u64().unwrap();
            format!("{} {} {} {} {status}", field("user"), field("verb"), field("decision"), field("rule"))
        })
        .collect();
    assert_eq!(
        seen,
        [
            "- list deny agent 403",
            "- create deny agent 403",
            "- create allow agent[0] 200",
            "kas:jane get allow impersonated.rules[0] 200",
            "- get allow discovery 200",
        ]
    );
    assert_eq!((&lines[2]["bytes_in"], &lines[2]["bytes_out"]), (&11.into(), &2.into()));
    assert_eq!((&lines[3]["namespace"], &lines[3]["name"]), (&"a".into(), &"x".into()));
    assert!(
        lines.iter().all(|line| line["request_id"] == "0123abc" && line.get("outcome").is_none()),
        "{text}"
    );
}

#[tokio::test]
async fn a_request_that_fails_or_is_cancelled_is_in_the_audit_log_too() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("audit.log");
    let mut registry = Registry::default();
    let audit = Audit::open(&Output::File(log.clone()), false, &mut registry).unwrap();
    let (listener, url) = listen().await;
    let modules = guarded(&at(url), Guard::new(None, Some(audit.clone()))).await;
    let server = async {
        drop(Peer::accept(&listener).await);
        let mut peer = Peer::accept(&listener).await;
        peer.head().await;
        peer.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n").await;
        peer
    };
    let client = async {
        assert!(fetch(&modules, get("/api/v1/pods"), b"").await.is_err());
        let (caller, answer) = crate::support::call(&modules, &[]);
        caller.whole(get("/api/v1/pods?watch=1"), b"").await;
        let mut reply = crate::support::Reply::new(crate::support::within(answer).await);
        assert_eq!(reply.header().await.status_code, 200);
        assert_eq!(reply.data().await, "one");
    };
    let (_peer, ()) = tokio::join!(server, client);
    audit.flush().await;
    let text = fs::read_to_string(&log).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert_eq!((&lines[0]["verb"], &lines[0]["outcome"]), (&"list".into(), &"UNAVAILABLE".into()));
    assert!(lines[0].get("status").is_none() && lines[0].get("decision").is_none(), "{text}");
    assert_eq!((&lines[1]["verb"], &lines[1]["outcome"]), (&"watch".into(), &"cancelled".into()));
    assert_eq!((&lines[1]["status"], &lines[1]["bytes_out"]), (&200.into(), &3.into()));
    assert_eq!(lines[1]["request_id"].as_str().map(str::len), Some(32));
}

/// Everything of this list is outside of [`POLICY`].
fn lies() -> Vec<http_request::Header> {
    let pods = "/api/v1/namespaces/a/pods";
    let secrets = "/api/v1/namespaces/a/secrets";
    let unknown_extra = prost_types::Any { type_url: "type.googleapis.com/other".to_owned(), value: vec![] };
    let broken_extra = prost_types::Any { type_url: HEADER_EXTRA.to_owned(), value: vec![0xff] };
    let map = || plain(get("/api/v1/namespaces/a/configmaps"));
    let mut lies = vec![
        plain(get(secrets)),
        plain(get("/api/v1/pods")),
        plain(request("DELETE", pods, &[])),
        // Other methods have other verbs, whatever their case.
        plain(request("get", secrets, &[])),
        plain(request("CONNECT", "example.com:443", &[])),
        plain(request("GET /api/v1/secrets HTTP/1.1\r\nX:", pods, &[])),
        // As another user.
        as_user(map(), "system:admin", &[]),
        as_user(map(), "kas:jane", &["system:masters"]),
        as_user(map(), "kas:jane", &["kas:dev", " system:masters"]),
        as_user(map(), "kas:jane\r\nimpersonate-group: system:masters", &[]),
        as_user(map(), "", &["system:masters"]),
        as_user(plain(get(secrets)), "kas:jane", &[]),
        as_user(
            plain(with(get("/api/v1/namespaces/a/configmaps"), "impersonate-GROUP", &["system:masters"])),
            "kas:jane",
            &[],
        ),
        http_request::Header { extra: Some(unknown_extra), ..plain(get(secrets)) },
        http_request::Header { extra: Some(broken_extra), ..plain(get(secrets)) },
        plain(with(get(pods), "iMPERSONATE-uSER", &["system:admin"])),
        plain(with(get(pods), "Impersonate-Group", &["system:masters"])),
        plain(with(get(pods), "impersonate-extra-x", &["y"])),
        plain(with(
            get("/api/v1/namespaces/a/configmaps"),
            "Impersonate-User",
            &["kas:jane", "system:admin"],
        )),
        plain(with(get("/api/v1/namespaces/a/configmaps"), "Impersonate-User", &["kas:jane\t"])),
        plain(with(
            with(get("/api/v1/namespaces/a/configmaps"), "Impersonate-User", &["kas:jane"]),
            "Connection",
            &["Impersonate-User"],
        )),
        plain(with(get(secrets), "Impersonate-User ", &["kas:jane"])),
        // Two paths: only one of them is judged, and neither is sent.
        http_request::Header { target: pods.into(), ..plain(get(secrets)) },
        http_request::Header { target: secrets.into(), ..plain(get(pods)) },
        // A path that only looks like another one.
        plain(get("/api/v1/namespaces/a/pods/../secrets")),
        plain(get("/api/v1/namespaces/a/pods/x/../../secrets")),
        plain(get("api/v1/namespaces/a/secrets")),
    ];
    for target in [
        secrets,
        "/api/v1/namespaces/a/pods/..%2fsecrets",
        "/api/v1/namespaces/a/pods/%2e%2e/secrets",
        "/api/v1/namespaces/a/pods/%2E%2E%2Fsecrets",
        "/api/v1/namespaces/a%2Fsecrets",
        "/api/v1/namespaces%2Fa%2Fsecrets%2Fpods",
        "/api/v1/namespaces/a/./secrets",
        "//api/v1/namespaces/a/secrets",
        "/api/v1/namespaces/a/secrets//pods",
        "/api/v1/namespaces/b/pods",
        "/api/v1/namespaces/a/pods/x/exec?command=sh",
        "/api/v1/namespaces/a/pods/x%2Fexec?command=sh",
        "/api/v1/namespaces/a/pods/x/proxy/",
        "/api/v1/proxy/namespaces/a/pods/x",
        "/api/v1/namespaces/a/pods#/../secrets",
        "http://evil/api/v1/namespaces/a/pods",
        "/api/v1/namespaces/a/secrets?/api/v1/namespaces/a/pods",
        "/api/v1/namespaces/a/pods HTTP/1.1\r\n\r\nGET /api/v1/secrets",
        "/api/v1/namespaces/a/pods?watch=1",
        "/api/v1/namespaces/a/pods%00/../secrets",
        "/apis/apps/v1/namespaces/a/secrets",
        "/metrics",
        "*",
        "",
    ] {
        lies.push(verbatim("GET", target));
    }
    lies
}

#[tokio::test]
async fn a_lying_kas_gets_nothing_through_that_the_policy_does_not_allow() {
    let folder = tempfile::tempdir().unwrap();
    let (guard, _) = guard(folder.path(), POLICY, None);
    let (listener, url) = listen().await;
    let server = api_server(listener, LAST);
    let modules = guarded(&at(url), guard).await;
    for lie in lies() {
        match fetch_of(&modules, lie.clone(), b"").await {
            Ok((header, _)) => assert_eq!(header.status_code, 403, "{lie:?}"),
            Err(status) => assert_eq!(status.code(), grpc::Code::InvalidArgument, "{lie:?}: {status}"),
        }
    }
    // What says who the client is, and credentials, are not sent: agentk's own permissions count.
    let mut honest = get("/api/v1/namespaces/a/pods");
    for name in ["X-Remote-User", "x-REMOTE-group", "Authorization", "Cookie", "X-Forwarded-For"] {
        honest = with(honest, name, &["system:admin"]);
    }
    assert_eq!(fetch(&modules, honest, b"").await.unwrap().0.status_code, 200);
    send_last(&modules).await;
    let heads = server.await.unwrap();
    assert_eq!(heads.len(), 2, "{heads:?}");
    assert!(!heads[0].contains("system:admin"), "{}", heads[0]);
}

/// Numbers that depend only on the seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % most as u64).unwrap()
    }

    fn one<'a>(&mut self, of: &[&'a str]) -> &'a str {
        of[self.below(of.len())]
    }

    /// Returns the first one in most cases.
    fn mostly_first<'a>(&mut self, of: &[&'a str]) -> &'a str {
        if self.below(5) > 0 { of[0] } else { self.one(of) }
    }
}

/// Whether an independent reading of a request's head finds nothing outside of [`POLICY`].
fn is_within(head: &str) -> bool {
    let mut lines = head.lines();
    let mut first = lines.next().unwrap_or_default().split(' ');
    let (Some(method), Some(target)) = (first.next(), first.next()) else { return false };
    let path = target.split('?').next().unwrap_or_default();
    let path = percent_decode_str(path).decode_utf8_lossy().into_owned();
    let (mut users, mut groups, mut impersonates) = (Vec::new(), Vec::new(), false);
    for line in lines.take_while(|line| !line.is_empty()) {
        let Some((name, value)) = line.split_once(':') else { return false };
        let name = name.to_ascii_lowercase();
        impersonates |= name.starts_with("impersonate-");
        // As Go reads a value.
        match name.as_str() {
            "impersonate-user" => users.push(value.trim()),
            "impersonate-group" => groups.push(value.trim()),
            _ => {}
        }
    }
    if impersonates && (users != ["kas:jane"] || !groups.iter().all(|group| group.starts_with("kas:"))) {
        return false;
    }
    let segments: Vec<&str> = path.trim_matches('/').split('/').collect();
    let reads = matches!(method, "GET" | "HEAD");
    let is_discovery = match segments.as_slice() {
        ["version"] => true,
        ["api", rest @ ..] => rest.len() <= 1,
        ["apis", rest @ ..] => rest.len() <= 2,
        _ => false,
    };
    if is_discovery {
        // Outside of resources, the API server authorizes by the method in lower case.
        return matches!(method.to_ascii_lowercase().as_str(), "get" | "head");
    }
    let resource = if impersonates { "configmaps" } else { "pods" };
    let watches = target.split(['?', '&']).any(|part| part.starts_with("watch=") && part != "watch=0");
    (reads || (method == "POST" && !impersonates))
        // A rule without a group is for any.
        && match segments.as_slice() {
            ["api", _, rest @ ..] | ["apis", _, _, rest @ ..] => match rest {
                ["namespaces", "a", found] => *found == resource && !(reads && watches),
                ["namespaces", "a", found, _] => *found == resource,
                _ => false,
            },
            _ => false,
        }
}

#[tokio::test]
async fn whatever_is_sent_by_chance_stays_within_the_policy() {
    const REQUESTS: usize = 1_500;
    let folder = tempfile::tempdir().unwrap();
    let (guard, _) = guard(folder.path(), POLICY, None);
    let (listener, url) = listen().await;
    let server = api_server(listener, LAST);
    let modules = guarded(&at(url), guard).await;
    let seed = rand::random::<u64>() | 1;
    println!("seed {seed}");
    let mut dice = Dice(seed);
    let mut sent = 0;
    for _ in 0..REQUESTS {
        let mut path = String::new();
        for choices in [
            &["/", "//", "/%2F"][..],
            &["api/v1", "apis/apps/v1", "version", "api", "API/v1"],
            &["/", "//", "%2f", ""],
            &["namespaces/a", "namespaces%2Fa", "namespaces/b", "watch/namespaces/a", ""],
            &["/", "//", "%2F", ""],
            &["pods", "configmaps", "configmaps", "secrets", "%70ods", "pods%2fx", ""],
            &["", "/x", "/x/exec", "/x/log", "/..", "/%2e%2e/secrets", "//x", "/x%252Fexec"],
            &["", "?watch=1", "?watch=0", "?x=%2F", "?watch=%31&watch=0"],
        ] {
            path.push_str(dice.mostly_first(choices));
        }
        let method = dice.mostly_first(&["GET", "POST", "DELETE", "HEAD", "get", "PATCH"]);
        let mut header = match dice.below(2) {
            0 => verbatim(method, &path),
            _ => plain(request(method, &path, &[])),
        };
        let mut inner = header.request.take().unwrap_or_default();
        for _ in 0..dice.below(3) {
            let name = dice.one(&[
                "Impersonate-User",
                "iMPERSONATE-uSER",
                "Impersonate-Group",
                "impersonate-uid",
                "Accept",
                "X-Remote-User",
            ]);
            let value = dice.one(&[
                "kas:jane",
                "kas:jane",
                "kas:dev",
                "system:masters",
                " kas:jane",
                "kas:jane ",
                "",
                "root",
            ]);
            inner = with(inner, name, &[value]);
        }
        header.request = Some(inner);
        if dice.below(3) == 0 {
            let user = dice.one(&["kas:jane", "kas:jane", "kas:joe", "system:admin", ""]);
            let group = dice.one(&["kas:dev", "kas:dev", "system:masters", "\tsystem:masters"]);
            header = as_user(header, user, &[group][..dice.below(2)]);
        }
        if let Ok((answer, _)) = fetch_of(&modules, header, b"").await {
            assert!([200, 403].contains(&answer.status_code));
            sent += usize::from(answer.status_code == 200);
        }
    }
    send_last(&modules).await;
    let heads = server.await.unwrap();
    for head in &heads[..heads.len() - 1] {
        assert!(is_within(head), "seed {seed}: {head}");
    }
    // Otherwise the test proves nothing.
    assert!(sent > 20, "seed {seed}: only {sent} requests were sent");
    assert_eq!(heads.len(), sent + 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_api_server_gets_only_what_the_policy_allows() -> anyhow::Result<()> {
    let kubernetes = Kubernetes::start().await?;
    for namespace in ["a", "b"] {
        kubernetes.create_pods(namespace, "web", 1).await?;
        kubernetes.create_config_maps(namespace, "map", 1, 10).await?;
    }
    let folder = tempfile::tempdir()?;
    let (guard, _) = guard(folder.path(), POLICY, None);
    // agentk itself may do everything.
    let modules = guarded(&admin(&kubernetes), guard).await;
    let status = async |header: http_request::Header| {
        let (answer, body) = fetch_of(&modules, header, b"").await?;
        let body = String::from_utf8_lossy(&body).into_owned();
        let by_agentk = body.contains("\"message\":\"agentk: ");
        anyhow::Ok((answer.status_code, by_agentk))
    };
    for (header, expected) in [
        (plain(get("/api/v1/namespaces/a/pods")), (200, false)),
        (plain(get("/api/v1/namespaces/b/pods")), (403, true)),
        (plain(get("/api/v1/namespaces/a/secrets")), (403, true)),
        (verbatim("GET", "/api/v1/namespaces%2Fa/pods/web-00000"), (200, false)),
        (verbatim("GET", "/api/v1/namespaces/b%2Fpods/web-00000"), (403, true)),
        (plain(get("/apis")), (200, false)),
        // The policy allows it, and RBAC does not.
        (as_user(plain(get("/api/v1/namespaces/a/configmaps")), "kas:jane", &["kas:dev"]), (403, false)),
        (
            as_user(plain(get("/api/v1/namespaces/a/configmaps")), "kas:jane", &["system:masters"]),
            (403, true),
        ),
        (as_user(plain(get("/version")), "kas:jane", &[]), (200, false)),
    ] {
        assert_eq!(status(header.clone()).await?, expected, "{header:?}");
    }
    let role = ["create", "role", "maps", "--namespace=a", "--verb=list", "--resource=configmaps"];
    kubernetes.kubectl(&role).await?;
    let binding = ["create", "rolebinding", "jane", "--namespace=a", "--role=maps", "--group=kas:dev"];
    kubernetes.kubectl(&binding).await?;
    let jane = || as_user(plain(get("/api/v1/namespaces/a/configmaps")), "kas:jane", &["kas:dev"]);
    // An API server notices the new binding within moments.
    let until = tokio::time::Instant::now() + crate::support::SOON;
    while status(jane()).await?.0 != 200 {
        anyhow::ensure!(tokio::time::Instant::now() < until, "the binding has no effect");
    }
    let other = as_user(plain(get("/api/v1/namespaces/a/pods")), "kas:jane", &["kas:dev"]);
    assert_eq!(status(other).await?, (403, true));
    Ok(())
}
