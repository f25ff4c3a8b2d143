//! How Gitaly is called: credentials, metadata, addresses, connections, limits, repetitions, and what happens
//! to answers that make no sense.

mod common;

use std::{sync::Arc, time::Duration};

use gitaly::{GitalyRepository, Limits, Priority, Rate};
use grpc::Code;
use http::HeaderValue;
use prometheus_client::{encoding::text::encode, registry::Registry};
use repository::{
    Commit, Content, Depth, Error, ReadLimits, RepoPath, Repository as _, Revision,
    contract::{Git, What},
};
use tempfile::TempDir;
use testkit::{
    certificates::Certificates,
    gitaly::{Scripted, Small},
};

use common::{TOKEN, client, client_with, repository, server};

const LIMITS: ReadLimits = ReadLimits { file: 1_000, total: 10_000 };

/// A server with one repository that has one commit.
struct Fixture {
    folder: TempDir,
    small: Small,
    repository: GitalyRepository,
    commit: Commit,
}

fn path(path: &str) -> RepoPath {
    RepoPath::new(path).unwrap()
}

async fn fixture() -> Fixture {
    fixture_with(Limits::default(), &mut Registry::default()).await
}

async fn fixture_with(limits: Limits, registry: &mut Registry) -> Fixture {
    let folder = tempfile::tempdir().unwrap();
    let git = Git::init(folder.path().join("a.git"));
    let commit = git.commit("refs/heads/main", &[(b"a", What::File(b"content".to_vec()))]);
    let small = Small::start(folder.path(), Some(TOKEN)).await.unwrap();
    let client = client_with(limits, None, registry);
    let repository = repository(&client, small.address(), TOKEN, "a.git", None);
    Fixture { folder, small, repository, commit }
}

impl Fixture {
    async fn head(&self) -> Result<Option<Commit>, Error> {
        self.repository.resolve(&Revision::Head).await
    }

    async fn read(&self) -> Result<Vec<Content>, Error> {
        self.repository.read(&self.commit, &[path("a")], LIMITS).await
    }

    async fn list(&self) -> Result<Vec<String>, Error> {
        let listing = self.repository.list(&self.commit, None, Depth::Below, 10).await?;
        Ok(listing.entries.into_iter().map(|entry| entry.path.to_string()).collect())
    }
}

fn code(error: &Error) -> &'static str {
    match error {
        Error::Backend { code, .. } => code,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn calls_carry_metadata_and_the_repository() {
    let fixture = fixture().await;
    assert_eq!(fixture.head().await, Ok(Some(fixture.commit)));
    let named = fixture.repository.with_correlation(HeaderValue::from_static("the-request"));
    named.resolve(&Revision::Head).await.unwrap();
    let seen = fixture.small.seen();
    for call in &seen {
        assert_eq!(call.method, "FindCommit");
        let header = |name: &str| call.headers[name].to_str().unwrap();
        assert_eq!(header("x-gitlab-client-name"), "gitlab-kas");
        assert_eq!(header("user-agent"), "gitlab-kas/test/0");
        assert_eq!(header("gitaly-feature-x"), "true");
        assert_eq!(header("te"), "trailers");
        assert!(header("grpc-timeout").len() <= 9);
        assert_eq!(call.headers.get_all("authorization").iter().count(), 1);
        assert!(header("authorization").starts_with("Bearer v2."));
        let repository = call.repository.as_ref().unwrap();
        assert_eq!(repository.storage_name, "default");
        assert_eq!(repository.relative_path, "a.git");
        assert_eq!(repository.gl_repository, "project-1");
        assert_eq!(repository.gl_project_path, "group/project");
    }
    let id = |at: usize| seen[at].headers["x-gitlab-correlation-id"].to_str().unwrap();
    assert_eq!(id(1), "the-request");
    assert_eq!(id(0).len(), 32);
}

#[tokio::test]
async fn a_wrong_token_is_told_apart_and_does_not_pause_the_server() {
    let fixture = fixture().await;
    let client = client();
    for token in ["another secret", ""] {
        let wrong = repository(&client, fixture.small.address(), token, "a.git", None);
        for _ in 0..3 {
            let error = wrong.resolve(&Revision::Head).await.unwrap_err();
            let Error::Denied(text) = &error else { panic!("{error:?}") };
            assert!(text.starts_with("gitaly refuses the token: its secret or a clock is wrong"), "{text}");
            assert!(!text.contains(TOKEN));
        }
        // As after GitLab was asked anew.
        let right = wrong.with_server(Arc::new(server(fixture.small.address(), TOKEN)));
        assert_eq!(right.resolve(&Revision::Head).await, Ok(Some(fixture.commit)));
    }
    fixture.small.script([Scripted::Status(Code::PermissionDenied, "no".to_owned())]);
    assert!(matches!(fixture.head().await, Err(Error::Denied(_))));
}

#[tokio::test]
async fn connections_are_shared_by_calls_with_the_same_address_and_token() {
    let fixture = fixture().await;
    fixture.small.delay(Duration::from_millis(50));
    let calls = (0..8).map(|_| fixture.head());
    for result in futures_util::future::join_all(calls).await {
        assert_eq!(result, Ok(Some(fixture.commit)));
    }
    fixture.list().await.unwrap();
    assert_eq!(fixture.small.connections(), 1);
    let other = fixture.repository.with_server(Arc::new(server(fixture.small.address(), "another")));
    other.resolve(&Revision::Head).await.unwrap_err();
    assert_eq!(fixture.small.connections(), 2);
}

#[tokio::test]
async fn all_kinds_of_addresses_are_called() {
    let fixture = fixture().await;
    let root = fixture.folder.path();
    let certificates = Certificates::new(root, &["localhost", "127.0.0.1"]).unwrap();
    let secure = Small::start_tls(root, Some(TOKEN), &certificates).await.unwrap();
    let socket = Small::start_unix(root, Some(TOKEN), &root.join("socket")).await.unwrap();
    let port = fixture.small.address().rsplit_once(':').unwrap().1.to_owned();
    let secure_port = secure.address().rsplit_once(':').unwrap().1.to_owned();
    let trusting = client_with(Limits::default(), Some(&certificates.ca), &mut Registry::default());
    for address in [
        secure.address().to_owned(),
        format!("tls://localhost:{secure_port}"),
        socket.address().to_owned(),
        format!("dns:localhost:{port}"),
        format!("dns:///localhost:{port}"),
    ] {
        let repository = repository(&trusting, &address, TOKEN, "a.git", None);
        assert_eq!(repository.resolve(&Revision::Head).await, Ok(Some(fixture.commit)), "{address}");
    }
    // Without the authority, nothing is sent.
    let before = secure.seen().len();
    let distrusting = repository(&client(), secure.address(), TOKEN, "a.git", None);
    let error = distrusting.resolve(&Revision::Head).await.unwrap_err();
    assert_eq!(code(&error), "UNAVAILABLE");
    assert!(error.to_string().contains("TLS with tls://"), "{error}");
    assert_eq!(secure.seen().len(), before);
    let absent = repository(&client(), "unix:/nonexistent/socket", TOKEN, "a.git", None);
    let error = absent.resolve(&Revision::Head).await.unwrap_err();
    assert!(error.to_string().contains("cannot connect to unix:/nonexistent/socket"), "{error}");
}

#[tokio::test]
async fn temporary_failures_are_repeated_and_others_are_not() {
    let mut registry = Registry::default();
    let fixture = fixture_with(Limits::default(), &mut registry).await;
    let status = |code, text: &str| Scripted::Status(code, text.to_owned());
    for scripted in [
        status(Code::Unavailable, "restarts"),
        status(Code::ResourceExhausted, "too many"),
        status(Code::DeadlineExceeded, "slow"),
        Scripted::Reset(Vec::new()),
        Scripted::HangUp,
        Scripted::Http(503),
    ] {
        fixture.small.script([scripted.clone(), scripted.clone()]);
        assert_eq!(fixture.head().await, Ok(Some(fixture.commit)), "{scripted:?}");
    }
    fixture.small.script(vec![status(Code::Unavailable, "is down"); 3]);
    let before = fixture.small.seen().len();
    let error = fixture.head().await.unwrap_err();
    assert_eq!((code(&error), fixture.small.seen().len() - before), ("UNAVAILABLE", 3));
    assert!(error.to_string().contains("UNAVAILABLE: is down"), "{error}");
    for code_ in [Code::NotFound, Code::Internal, Code::InvalidArgument, Code::FailedPrecondition] {
        fixture.small.script([status(code_, "no")]);
        let before = fixture.small.seen().len();
        let error = fixture.head().await.unwrap_err();
        assert_eq!((code(&error), fixture.small.seen().len() - before), (code_.name(), 1));
    }
    assert_eq!(fixture.head().await, Ok(Some(fixture.commit)));
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    for line in [
        "gitaly_calls_total{rpc=\"FindCommit\",code=\"OK\"} 7",
        "gitaly_calls_total{rpc=\"FindCommit\",code=\"NOT_FOUND\"} 1",
        "gitaly_calls_total{rpc=\"FindCommit\",code=\"RESOURCE_EXHAUSTED\"} 2",
        "gitaly_seconds_count{rpc=\"FindCommit\"} ",
    ] {
        assert!(text.contains(line), "{line} is not in {text}");
    }
}

/// Fails if a call can outlast its deadline, which is 10 s here.
#[tokio::test]
async fn a_call_without_an_answer_ends_at_its_deadline() {
    let fixture = fixture().await;
    fixture.head().await.unwrap();
    fixture.small.script([Scripted::Silence]);
    // The connection is there: nothing but the deadline happens from now on.
    tokio::time::pause();
    let begun = tokio::time::Instant::now();
    let error = fixture.head().await.unwrap_err();
    assert_eq!(code(&error), "DEADLINE_EXCEEDED");
    let took = begun.elapsed();
    assert!((Duration::from_secs(10)..Duration::from_millis(10_100)).contains(&took), "{took:?}");
}

#[tokio::test]
async fn calls_in_flight_are_limited_and_polls_get_half() {
    let limits = Limits { in_flight_per_server: 4, ..Limits::default() };
    let fixture = fixture_with(limits, &mut Registry::default()).await;
    fixture.small.delay(Duration::from_millis(20));
    let poll = fixture.repository.with_priority(Priority::Poll);
    let polls = (0..12).map(|_| poll.resolve(&Revision::Head));
    for result in futures_util::future::join_all(polls).await {
        assert_eq!(result, Ok(Some(fixture.commit)));
    }
    assert_eq!(fixture.small.most_open(), 2);
    let requests = (0..12).map(|_| fixture.head());
    futures_util::future::join_all(requests).await;
    assert_eq!(fixture.small.most_open(), 4);
}

#[tokio::test]
async fn calls_beyond_the_rate_are_not_sent() {
    let mut registry = Registry::default();
    let slow = Rate { per_second: 0.01, burst: 4 };
    for limits in
        [Limits { all: slow, ..Limits::default() }, Limits { per_server: slow, ..Limits::default() }]
    {
        let fixture = fixture_with(limits, &mut registry).await;
        let poll = fixture.repository.with_priority(Priority::Poll);
        for _ in 0..2 {
            poll.resolve(&Revision::Head).await.unwrap();
        }
        assert_eq!(code(&poll.resolve(&Revision::Head).await.unwrap_err()), "RESOURCE_EXHAUSTED");
        for _ in 0..2 {
            fixture.head().await.unwrap();
        }
        let error = fixture.head().await.unwrap_err();
        assert!(error.to_string().contains("the limits of calls to Gitaly"), "{error}");
        assert_eq!(fixture.small.seen().len(), 4);
    }
}

#[tokio::test]
async fn a_server_that_restarts_is_called_again() {
    let fixture = fixture().await;
    fixture.head().await.unwrap();
    for _ in 0..3 {
        fixture.small.stop();
        fixture.small.restart().await.unwrap();
        assert_eq!(fixture.head().await, Ok(Some(fixture.commit)));
    }
}

/// The bytes that a client must not trust: what any of them does must be an error, and not the end.
#[tokio::test]
async fn answers_that_make_no_sense_are_errors() {
    let fixture = fixture().await;
    let id = fixture.commit.to_string();
    let field = |tag: u8, bytes: &[u8]| {
        let mut field = vec![tag << 3 | 2, u8::try_from(bytes.len()).unwrap()];
        field.extend_from_slice(bytes);
        field
    };
    let commit = |id: &str| field(1, &field(1, id.as_bytes()));
    for messages in [
        vec![],
        vec![commit(&id), commit(&id)],
        vec![commit("not an id")],
        vec![commit("")],
        vec![vec![0xff; 20]],
        vec![field(1, &[0xff])],
    ] {
        fixture.small.script([Scripted::Messages(messages.clone())]);
        let error = fixture.head().await.unwrap_err();
        assert_eq!(code(&error), "PROTOCOL", "{messages:?}: {error}");
    }
    for bytes in [
        // A length of 4 GiB, a compressed message, the half of a message.
        vec![0, 0xff, 0xff, 0xff, 0xff],
        vec![1, 0, 0, 0, 1, 0],
        vec![0, 0, 0, 0, 9, 0],
    ] {
        fixture.small.script([Scripted::Bytes(bytes.clone())]);
        assert_eq!(code(&fixture.head().await.unwrap_err()), "PROTOCOL", "{bytes:?}");
    }
    let oid = field(1, id.as_bytes());
    let entry = |path: &str, rest: &[u8]| field(1, &[&oid[..], &field(3, path.as_bytes()), rest].concat());
    for message in [
        entry("", &[]),
        entry("a", &[0x20, 7]),
        field(1, &[field(1, b"x"), field(3, b"a")].concat()),
        vec![0xff; 9],
    ] {
        fixture.small.script([Scripted::Messages(vec![message.clone()])]);
        assert_eq!(code(&fixture.list().await.unwrap_err()), "PROTOCOL", "{message:?}");
    }
    for wrong in ["../a", "a//b", "/a", "a/./b", "a\0"] {
        fixture.small.script([Scripted::Messages(vec![entry(wrong, &[])])]);
        let error = fixture.list().await.unwrap_err();
        assert!(matches!(&error, Error::User(text) if text.starts_with("ProtocolError: ")), "{error:?}");
    }
    // Of another folder than the one that was asked for.
    fixture.small.script([Scripted::Messages(vec![entry("other/a", &[])])]);
    let under = path("folder");
    let error = fixture.repository.list(&fixture.commit, Some(&under), Depth::Below, 9).await.unwrap_err();
    assert_eq!(code(&error), "PROTOCOL");

    let blob = |size: u8, data: &[u8], path: &str| {
        [&[0x08, size][..], &field(2, data), &field(3, id.as_bytes()), &field(7, path.as_bytes()), &[0x40, 2]]
            .concat()
    };
    for messages in [
        vec![],
        vec![blob(3, b"abc", "other")],
        vec![blob(3, b"ab", "a")],
        vec![blob(3, b"abcd", "a")],
        vec![blob(3, b"ab", "a"), field(2, b"cd")],
        vec![field(2, b"abc")],
        vec![blob(3, b"abc", "a"), blob(3, b"abc", "a")],
        // A negative size, an object of another type.
        vec![
            [&blob(0, b"", "a")[..], &[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]]
                .concat(),
        ],
        vec![[&blob(0, b"", "a")[..], &[0x40, 4]].concat()],
    ] {
        fixture.small.script([Scripted::Messages(messages.clone())]);
        let error = fixture.read().await.unwrap_err();
        assert_eq!(code(&error), "PROTOCOL", "{messages:?}: {error}");
    }
    fixture.small.script([Scripted::Messages(vec![blob(3, b"ab", "a"), field(2, b"c")])]);
    assert!(matches!(&fixture.read().await.unwrap()[..], [Content::Data { data, .. }] if data == "abc"));
    // What was cut off is read again.
    fixture.small.script([Scripted::Reset(vec![blob(3, b"ab", "a")])]);
    assert!(matches!(&fixture.read().await.unwrap()[..], [Content::Data { data, .. }] if data == "content"));
    assert_eq!(fixture.list().await.unwrap(), ["a"]);
}

/// A repository that GitLab has and Gitaly has not is a fault of the server: agents keep what they have.
#[tokio::test]
async fn a_repository_that_does_not_exist_is_not_an_empty_one() {
    let fixture = fixture().await;
    let absent = repository(&client(), fixture.small.address(), TOKEN, "absent.git", None);
    assert_eq!(code(&absent.resolve(&Revision::Head).await.unwrap_err()), "NOT_FOUND");
    let listed = absent.list(&fixture.commit, None, Depth::Below, 10).await;
    assert_eq!(code(&listed.unwrap_err()), "NOT_FOUND");
    let read = absent.read(&fixture.commit, &[path("a")], LIMITS).await;
    assert_eq!(code(&read.unwrap_err()), "NOT_FOUND");
}
