//! Which status ends with which exit code.

use std::collections::BTreeMap;

use super::*;

fn call(asked: Asked) -> Call {
    Call {
        asked,
        address: "grpc://kas:8153".to_owned(),
        secret: "/s/api-secret".to_owned(),
        correlation: "abc".to_owned(),
        timeout: Some(Duration::from_secs(30)),
    }
}

fn agent() -> ids::AgentId {
    ids::AgentId::new(7).unwrap()
}

fn exit(asked: Asked, status: &Status) -> Exit {
    call(asked).explain(status, Peer::Http2).exit()
}

fn with_outcome(code: Code, domain: &str, outcome: &str) -> Status {
    let info = rpc::ErrorInfo {
        reason: "ANY".to_owned(),
        domain: domain.to_owned(),
        metadata: BTreeMap::from([(OUTCOME.to_owned(), outcome.to_owned())]),
    };
    let any = prost_types::Any {
        type_url: format!("type.googleapis.com/{ERROR_INFO}"),
        value: info.encode_to_vec(),
    };
    let details =
        rpc::Status { code: code as i32, message: "m".to_owned(), details: vec![any] }.encode_to_vec();
    Status::with_details(code, "m", details.into())
}

#[test]
fn what_kas_says_about_the_outcome_decides() {
    for asked in [Asked::Read(agent()), Asked::Request(agent())] {
        for code in [Code::Unavailable, Code::DeadlineExceeded, Code::ResourceExhausted] {
            assert_eq!(exit(asked, &with_outcome(code, DOMAIN, "not_started")), Exit::NotStarted);
        }
        for code in [Code::Unavailable, Code::DeadlineExceeded] {
            assert_eq!(exit(asked, &with_outcome(code, DOMAIN, "unknown")), Exit::Unknown);
        }
    }
}

#[test]
fn a_detail_of_another_domain_does_not_count() {
    let forged = with_outcome(Code::Unavailable, "agent.example", "not_started");
    assert_eq!(exit(Asked::Request(agent()), &forged), Exit::Unknown);
    assert_eq!(
        exit(Asked::Request(agent()), &with_outcome(Code::Unavailable, DOMAIN, "later")),
        Exit::Unknown
    );
}

#[test]
fn codes_without_detail_are_read_by_what_was_asked() {
    for (code, kas, read, request) in [
        (Code::Unauthenticated, Exit::Unauthenticated, Exit::Unauthenticated, Exit::Unauthenticated),
        (Code::NotFound, Exit::NotStarted, Exit::NotStarted, Exit::NotStarted),
        (Code::FailedPrecondition, Exit::Failure, Exit::NotStarted, Exit::NotStarted),
        // kas says more of its own failures: without detail it is the agent that could not answer.
        (Code::Unavailable, Exit::Unreachable, Exit::Failure, Exit::Unknown),
        (Code::DeadlineExceeded, Exit::Failure, Exit::Failure, Exit::Unknown),
        (Code::Unknown, Exit::Failure, Exit::Failure, Exit::Unknown),
        (Code::InvalidArgument, Exit::Failure, Exit::Failure, Exit::Failure),
        (Code::PermissionDenied, Exit::Failure, Exit::Failure, Exit::Failure),
        (Code::Unimplemented, Exit::Failure, Exit::Failure, Exit::Failure),
    ] {
        let status = Status::new(code, "m");
        assert_eq!(exit(Asked::Kas, &status), kas, "{code:?}");
        assert_eq!(exit(Asked::Read(agent()), &status), read, "{code:?}");
        assert_eq!(exit(Asked::Request(agent()), &status), request, "{code:?}");
    }
}

#[test]
fn other_ends_that_are_not_kas_are_named() {
    let lost = |text: &str, reason| {
        let mut status = Status::unknown("m");
        status.set_source(std::sync::Arc::new(Lost { text: text.to_owned(), reason }));
        status
    };
    for (peer, words) in [
        (Peer::Silent, "grpcs://"),
        (Peer::Tls, "grpcs://"),
        (Peer::Http1, "HTTP/1"),
        (Peer::Other, "does not speak"),
    ] {
        let failure = call(Asked::Request(agent())).explain(&lost("eof", None), peer);
        assert_eq!(failure.exit(), Exit::Unreachable);
        assert!(failure.to_string().contains(words), "{failure}");
    }
    assert_eq!(exit(Asked::Kas, &lost("eof", None)), Exit::Unreachable);
    assert_eq!(exit(Asked::Request(agent()), &lost("eof", None)), Exit::Unknown);
    let refused = lost("refused", Some(h2::Reason::REFUSED_STREAM));
    assert_eq!(exit(Asked::Request(agent()), &refused), Exit::NotStarted);
}

#[test]
fn messages_are_one_line_and_name_the_next_step() {
    let text =
        call(Asked::Read(agent())).explain(&Status::not_found("no\nagent\u{1b}[0m"), Peer::Http2).to_string();
    assert_eq!(
        text,
        "agent 7 is not connected to kas at grpc://kas:8153: NOT_FOUND: no\\nagent\\u{1b}[0m; \
         'kasctl agents' lists those that are (correlation id abc)"
    );
    let text = call(Asked::Kas).explain(&Status::unauthenticated(""), Peer::Http2).to_string();
    assert!(text.contains("signed with /s/api-secret: UNAUTHENTICATED; use"), "{text}");
}
