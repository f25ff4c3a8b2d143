//! A request that is lent a tunnel, while another one waits for it here, in every order that the scheduler of
//! `museum` chooses.
//!
//! Both replicas, the agent and the streams between them are tasks of their own. The locks, flags and
//! wake-ups of the registry, of the lease and of what waits for a leased tunnel are those of
//! [`sync`](crate::sync). A lease that nobody returns is a deadlock, which fails.

use std::future::poll_fn;

use http_body::Body as _;
use museum::schedule::{block_on, explore_without_time, join, point, spawn};

use super::*;
use crate::flaw::{Flaw, must_fail_with};

/// Writes to `out` what a body says, until it ends.
async fn carry(
    mut body: impl http_body::Body<Data = Bytes, Error = BoxError> + Send + Unpin + 'static,
    out: Pipe,
) {
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        point();
        match frame.expect("nobody resets the stream").into_data() {
            Ok(data) => out.write(data),
            Err(trailers) => {
                let status = Status::from_headers(&trailers.into_trailers().unwrap()).unwrap();
                assert_eq!(status.code(), Code::Ok, "{status}");
                break;
            }
        }
    }
    out.end();
}

/// The agent: answers one request. Returns its stream, which stays open.
async fn answer_one(mut body: TunnelBody, agent: Pipe) -> TunnelBody {
    let (expected, mut read) = (whole(b"first"), BytesMut::new());
    while read.len() < expected.len() {
        let frame = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await.expect("a request").unwrap();
        read.put_slice(&frame.into_data().unwrap());
    }
    assert_eq!(read, expected);
    for part in [control(request::HEADER), message(request::MESSAGE, b"first"), control(request::TRAILER)] {
        point();
        agent.write(part);
    }
    body
}

/// The caller of the borrower.
async fn finish(mut call: Call) {
    assert!(matches!(call.0.head().await.unwrap(), Head::Headers(_)));
    let mut said = BytesMut::new();
    loop {
        let frame =
            poll_fn(|cx| Pin::new(&mut call.0).poll_frame(cx)).await.expect("trailers first").unwrap();
        match frame.into_data() {
            Ok(data) => said.extend_from_slice(&data),
            Err(trailers) => {
                let status = Status::from_headers(&trailers.into_trailers().unwrap()).unwrap();
                return assert_eq!((&said[..], status.code()), (&plain(b"first")[..], Code::Ok));
            }
        }
    }
}

/// In any order of the end of a lent request, of a request that begins to wait here, and of the lease that
/// the borrower gets or does not get: the request here gets the tunnel, and the borrower its response.
#[test]
fn schedules_of_a_lent_tunnel_and_a_request() {
    fn run() {
        explore_without_time(|| {
            let mut lab = Lab::new();
            // Two requests begin together, so a lease is worthwhile.
            for _ in 0..2 {
                assert!(block_on(lab.take()).is_none());
            }
            let call = lab.borrow();
            let agent_end = spawn(answer_one(lab.to_agent.take().unwrap(), lab.agent.clone()));
            let registry = Arc::clone(&lab.registry);
            let here = async move {
                match registry.acquire(agent(), &METHOD.into(), None, Features::NONE).unwrap() {
                    Acquired::Now(grant) => drop(grant),
                    Acquired::Wait(mut waiting) => drop(waiting.granted().await.expect("a tunnel")),
                }
            };
            let tasks = [
                spawn(carry(lab.lend.take().unwrap(), lab.lent.clone())),
                spawn(carry(lab.pump.take().unwrap(), lab.asked.clone())),
                spawn(finish(call)),
                spawn(here),
            ];
            join(tasks);
            let _open = join([agent_end]);
            assert_eq!(lab.counts(), (1, 0), "the tunnel is idle here");
        });
    }
    run();
    must_fail_with(Flaw::LeaseAfterUnlock, run);
}
