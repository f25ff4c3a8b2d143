//! kas as far as a feed sees it, and an API server that is not asked.

use std::sync::atomic::{AtomicUsize, Ordering};

use ::gitops::decode::Limits;
use bytes::BytesMut;
use futures_util::FutureExt as _;
use grpc::{Code, MessageReader, Status};
use http::HeaderMap;
use http_body_util::{BodyExt as _, Full};
use proto::gitlab::agent::{
    agentcfg::GitopsCf,
    gitops::rpc::{
        ObjectsToSynchronizeResponse,
        objects_to_synchronize_response::{Header, Message, Object, Trailer},
    },
};
use tokio::{net::TcpListener, sync::watch, time::advance};
use tokio_util::task::TaskTracker;

use super::*;
use crate::{calls::Opener, cluster::ClusterAccess, module::Pushed};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn header() -> Message {
    Message::Header(Header { commit_id: COMMIT.to_owned(), project_id: 42 })
}

fn object(path: &str, data: &'static [u8]) -> Message {
    Message::Object(Object { source: path.to_owned(), data: data.into() })
}

/// A kas that answers each call with these messages and this status.
fn answering(messages: Vec<Message>, status: Status) -> Opener {
    Arc::new(move |method, _| {
        assert_eq!(method, "/gitlab.agent.gitops.rpc.Gitops/GetObjectsToSynchronize");
        let mut body = BytesMut::new();
        for message in &messages {
            let response = ObjectsToSynchronizeResponse { message: Some(message.clone()) };
            body.extend_from_slice(&grpc::encode(&response));
        }
        let mut trailers = HeaderMap::new();
        status.write_to(&mut trailers);
        let body = Full::new(body.freeze()).with_trailers(std::future::ready(Some(Ok(trailers))));
        let reader = MessageReader::new(grpc::boxed(body), 1 << 20);
        Box::pin(std::future::ready(Ok(reader)))
    })
}

fn entry() -> ManifestProjectCf {
    ManifestProjectCf { id: "group/manifests".to_owned(), ..ManifestProjectCf::default() }
}

async fn asked(messages: Vec<Message>, status: Status) -> Result<Vec<(String, usize)>, FeedError> {
    let calls = Arc::new(Calls::default());
    let _lent = calls.lend(answering(messages, status));
    let feed = Feed::new(Arc::clone(&calls), &entry());
    if feed.head("").await?.is_none() {
        return Ok(Vec::new());
    }
    let limits = Limits { file: 6, total: 10, ..Limits::default() };
    let sent = feed.set(&limits).await?;
    assert_eq!((&*sent.commit, sent.project), (COMMIT, 42));
    Ok(sent.files.iter().map(|file| (file.path.to_string(), file.content.len())).collect())
}

fn ok() -> Status {
    Status::new(Code::Ok, "")
}

#[tokio::test]
async fn a_set_is_read_whole_or_not_at_all() {
    let trailer = || Message::Trailer(Trailer {});
    let whole = vec![header(), object("a", b"123"), object("a", b"45"), object("b", b""), trailer()];
    let files = asked(whole, ok()).await.unwrap();
    assert_eq!(files, [("a".to_owned(), 5), ("b".to_owned(), 0)]);
    assert_eq!(asked(Vec::new(), ok()).await, Ok(Vec::new()), "nothing has changed");
    for cut in [
        vec![object("a", b"1")],
        vec![header(), object("a", b"1")],
        vec![header(), header()],
        vec![Message::Header(Header { commit_id: "../x".to_owned(), project_id: 42 })],
        vec![Message::Header(Header { commit_id: COMMIT.to_owned(), project_id: -1 })],
    ] {
        assert!(matches!(asked(cut.clone(), ok()).await, Err(FeedError::Unavailable(_))), "{cut:?}");
    }
    for large in [
        vec![header(), object("a", b"1234567"), trailer()],
        vec![header(), object("a", b"123456"), object("b", b"123456"), trailer()],
    ] {
        assert!(matches!(asked(large.clone(), ok()).await, Err(FeedError::Wrong(_))), "{large:?}");
    }
}

#[tokio::test]
async fn statuses_tell_whose_fault_it_is() {
    use FeedError::{Denied, NotServed, Unavailable, Wrong};
    let wrong = "GitOps: failed to get objects to synchronize: manifest file: FileTooBig";
    let of = async |code, text: &str| asked(vec![], Status::new(code, text)).await.unwrap_err();
    assert!(matches!(of(Code::Unimplemented, "unknown service").await, NotServed(_)));
    let text = "GitOps: kas applies for this agent";
    assert_eq!(of(Code::FailedPrecondition, text).await, NotServed(text.to_owned()));
    assert_eq!(of(Code::FailedPrecondition, wrong).await, Wrong(wrong.to_owned()));
    assert!(matches!(of(Code::PermissionDenied, "forbidden").await, Denied(_)));
    assert!(matches!(of(Code::Unavailable, "x").await, Unavailable(_)));
    let long = of(Code::Internal, &"x\n".repeat(100_000)).await.to_string();
    assert!(long.len() < 1_100 && !long.contains('\n'), "{}", long.len());
}

#[tokio::test(start_paused = true)]
async fn where_kas_applies_nothing_is_asked_of_the_cluster() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = format!("http://{}", listener.local_addr().unwrap());
    let access = ClusterAccess { kube_server: Some(server), ..ClusterAccess::default() };
    let calls = Arc::new(Calls::default());
    let module = Arc::new(Gitops::new(
        Arc::clone(&calls),
        access.connect().await.unwrap(),
        Guard::default(),
        ("agents", "pod"),
        ("v0", "c"),
        &mut Registry::default(),
    ));
    let count = Arc::new(AtomicUsize::new(0));
    let refusing =
        answering(vec![], Status::new(Code::FailedPrecondition, "GitOps: kas applies for this agent"));
    let counted = Arc::clone(&count);
    let _lent = calls.lend(Arc::new(move |method, message| {
        counted.fetch_add(1, Ordering::Relaxed);
        refusing(method, message)
    }));
    let pushed = watch::Sender::new(Pushed::default());
    let leave = CancellationToken::new();
    let tasks = TaskTracker::new();
    tasks.spawn(Arc::clone(&module).run(Context::new(pushed.subscribe(), leave.clone())));
    let push = |projects: Vec<ManifestProjectCf>| {
        let gitops = Some(GitopsCf { manifest_projects: projects });
        let configuration = AgentConfiguration { agent_id: 7, gitops, ..AgentConfiguration::default() };
        pushed.send_modify(|pushed| pushed.configuration = Some(Arc::new(configuration)));
    };

    // Without projects, not even kas is asked.
    push(Vec::new());
    advance(Duration::from_secs(3_600)).await;
    assert_eq!(count.load(Ordering::Relaxed), 0);

    push(vec![entry()]);
    sleep(Duration::from_secs(1)).await;
    assert_eq!(count.load(Ordering::Relaxed), 1);
    assert_eq!(module.said.lock().as_deref(), Some("GitOps: kas applies for this agent"));
    sleep(Duration::from_secs(3_600)).await;
    let asked = count.load(Ordering::Relaxed);
    assert!((10..=14).contains(&asked), "{asked} times in an hour");

    leave.cancel();
    tasks.close();
    tasks.wait().await;
    assert!(listener.accept().now_or_never().is_none(), "the API server was called");
}

#[test]
fn of_projects_with_one_name_the_first_counts() {
    let named = |id: &str, namespace: &str| ManifestProjectCf {
        id: id.to_owned(),
        default_namespace: namespace.to_owned(),
        ..ManifestProjectCf::default()
    };
    let mut all = vec![named("a", "1"), named("", "2"), named("a", "3"), named("b", "4")];
    let of = |projects: &[ManifestProjectCf]| {
        let gitops = Some(GitopsCf { manifest_projects: projects.to_vec() });
        Wanted::read(&AgentConfiguration { agent_id: 7, gitops, ..AgentConfiguration::default() })
    };
    assert_eq!(of(&all).projects, [named("a", "1"), named("b", "4")]);
    all.extend((0..200).map(|n| named(&n.to_string(), "")));
    assert_eq!(of(&all).projects.len(), PROJECTS);
    assert!(of(&[]).is_empty() && Wanted::read(&AgentConfiguration::default()).is_empty());
}
