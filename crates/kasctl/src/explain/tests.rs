//! The exit code of each status.

use std::collections::BTreeMap;

use super::*;

fn call(kind: CallKind) -> Call {
    Call {
        kind,
        address: "grpc://kas:8153".to_owned(),
        secret: "/s/api-secret".to_owned(),
        correlation: "abc".to_owned(),
        timeout: Some(Duration::from_secs(30)),
        is_answering: false,
    }
}

fn agent() -> ids::AgentId {
    ids::AgentId::new(7).unwrap()
}

fn request(safe: bool) -> CallKind {
    CallKind::Request { agent: agent(), safe }
}

fn words(kind: CallKind, status: &Status) -> String {
    call(kind).explain(status, ServerProtocol::Http2).to_string()
}

fn exit(kind: CallKind, status: &Status) -> Exit {
    call(kind).explain(status, ServerProtocol::Http2).exit()
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
fn the_outcome_reported_by_kas_is_decisive() {
    for kind in [CallKind::Read(agent()), request(false)] {
        for code in [Code::Unavailable, Code::DeadlineExceeded, Code::ResourceExhausted] {
            assert_eq!(exit(kind, &with_outcome(code, DOMAIN, "not_started")), Exit::NotStarted);
        }
        for code in [Code::Unavailable, Code::DeadlineExceeded] {
            assert_eq!(exit(kind, &with_outcome(code, DOMAIN, "unknown")), Exit::Unknown);
        }
    }
}

#[test]
fn a_detail_of_another_domain_does_not_count() {
    let forged = with_outcome(Code::Unavailable, "agent.example", "not_started");
    assert_eq!(exit(request(false), &forged), Exit::Unknown);
    assert_eq!(exit(request(false), &with_outcome(Code::Unavailable, DOMAIN, "later")), Exit::Unknown);
}

#[test]
fn codes_without_detail_are_interpreted_by_the_kind_of_call() {
    for (code, kas, read, sent) in [
        (Code::Unauthenticated, Exit::Unauthenticated, Exit::Unauthenticated, Exit::Unauthenticated),
        (Code::NotFound, Exit::Failure, Exit::Failure, Exit::Failure),
        (Code::FailedPrecondition, Exit::Failure, Exit::Failure, Exit::Failure),
        // kas adds a detail to its own failures: without one, the agent could not respond.
        (Code::Unavailable, Exit::Unreachable, Exit::Failure, Exit::Unknown),
        (Code::DeadlineExceeded, Exit::Failure, Exit::Failure, Exit::Unknown),
        (Code::Unknown, Exit::Failure, Exit::Failure, Exit::Unknown),
        (Code::InvalidArgument, Exit::Failure, Exit::Failure, Exit::Failure),
        (Code::PermissionDenied, Exit::Failure, Exit::Failure, Exit::Failure),
        (Code::Unimplemented, Exit::Failure, Exit::Failure, Exit::Failure),
    ] {
        let status = Status::new(code, "m");
        assert_eq!(exit(CallKind::Kas, &status), kas, "{code:?}");
        assert_eq!(exit(CallKind::Read(agent()), &status), read, "{code:?}");
        assert_eq!(exit(request(false), &status), sent, "{code:?}");
    }
}

#[test]
fn the_origin_of_a_refusal_is_named() {
    let kas = "kas at grpc://kas:8153 refused the call: ";
    let denied = Status::permission_denied("m");
    assert!(words(CallKind::Kas, &denied).starts_with(kas));
    assert!(words(request(false), &denied).starts_with("agent 7 refused the request: PERMISSION_DENIED: m"));
    for (status, http) in [
        (denied, "403"),
        (Status::failed_precondition("m"), "401"),
        (Status::aborted("m"), "410"),
        (Status::invalid_argument("unable to parse"), "400 or 422"),
        (Status::unavailable("the API server answered 503: m"), "503"),
        (Status::unknown("the API server answered 500: m"), "500"),
    ] {
        let text = words(CallKind::Read(agent()), &status);
        let start = format!("the API server of agent 7 refused it (HTTP {http}): {}", said(&status));
        assert!(text.starts_with(&start), "{text}");
    }
    let field = Status::invalid_argument("namespace must be a name");
    assert!(words(CallKind::Read(agent()), &field).starts_with(kas));
    // With the detail, the status is from kas, whatever the code is.
    let text = words(CallKind::Read(agent()), &with_outcome(Code::FailedPrecondition, DOMAIN, "not_started"));
    assert!(text.starts_with("kas at ") && text.contains("omit --connection"), "{text}");
    // If an agent responds, the token was valid.
    let late = Call { is_answering: true, ..call(request(false)) };
    let failure = late.explain(&Status::unauthenticated("m"), ServerProtocol::Http2);
    assert_eq!(failure.exit(), Exit::Failure);
    assert!(failure.to_string().starts_with("agent 7 refused"), "{failure}");
}

#[test]
fn an_unsent_request_had_no_effect() {
    for text in [
        "cannot reach the Kubernetes API server at h: tcp connect error: Connection refused (os error 111)",
        "cannot get agentk's own credentials for the Kubernetes API server at h: no such file",
        "dial tcp 10.0.0.1:443: connect: connection refused",
    ] {
        let status = Status::unavailable(text);
        for kind in [CallKind::Read(agent()), request(true), request(false)] {
            assert_eq!(exit(kind, &status), Exit::NotStarted);
            let text = words(kind, &status);
            assert!(text.starts_with("agent 7 did not send the request to its API server"), "{text}");
            assert!(text.contains("had no effect, so trying again is safe"), "{text}");
        }
    }
    // An API server that was reached and then lost is a different case.
    let broke =
        Status::unavailable("the connection to the Kubernetes API server at h broke before the response");
    assert_eq!(exit(request(false), &broke), Exit::Unknown);
}

#[test]
fn only_a_write_may_have_had_an_effect() {
    let unknown = [
        Status::unavailable("m"),
        Status::deadline_exceeded("m"),
        Status::cancelled("m"),
        with_outcome(Code::Unavailable, DOMAIN, "unknown"),
        with_outcome(Code::DeadlineExceeded, DOMAIN, "unknown"),
    ];
    for status in &unknown {
        let text = words(request(false), status);
        assert!(text.contains("it may have had an effect: check before you try again"), "{text}");
        let text = words(request(true), status);
        assert!(text.contains("it only reads, so it had no effect and trying again is safe"), "{text}");
        assert_eq!(exit(request(true), status), Exit::Unknown, "no complete response");
    }
    for (safe, effect) in [(true, "no effect"), (false, "may have had")] {
        for failure in [
            call(request(safe)).explain_no_response(ServerProtocol::Http2),
            call(request(safe)).explain_broken("it ended"),
            call(request(safe)).explain(&lost_status("eof", false, None), ServerProtocol::Http2),
        ] {
            assert!(failure.to_string().contains(effect), "{failure}");
        }
    }
}

#[test]
fn every_failure_of_a_call_names_the_id_that_was_sent() {
    let mut failures = Vec::new();
    for kind in [CallKind::Kas, CallKind::Read(agent()), request(true), request(false)] {
        for protocol in [
            ServerProtocol::Silent,
            ServerProtocol::Http2,
            ServerProtocol::Http1,
            ServerProtocol::Tls,
            ServerProtocol::Other,
        ] {
            failures.push(call(kind).explain(&lost_status("eof", false, None), protocol));
            failures.push(call(kind).explain(&lost_status("refused", true, None), protocol));
            failures.push(call(kind).explain(&lost_status("web", false, Some(502)), protocol));
            failures.push(call(kind).explain_no_response(protocol));
        }
        failures.push(call(kind).explain_broken("it ended"));
        for code in 1..17 {
            let code = Code::from_i32(code);
            failures.push(call(kind).explain(&Status::new(code, "m"), ServerProtocol::Http2));
            failures.push(call(kind).explain(&with_outcome(code, DOMAIN, "unknown"), ServerProtocol::Http2));
            failures
                .push(call(kind).explain(&with_outcome(code, DOMAIN, "not_started"), ServerProtocol::Http2));
        }
    }
    for failure in failures {
        assert!(failure.to_string().ends_with(" (correlation id abc)"), "{failure}");
    }
}

#[test]
fn unimplemented_asks_whether_it_is_the_agent_port() {
    for kind in [CallKind::Kas, CallKind::Read(agent()), request(true)] {
        let text = words(kind, &Status::unimplemented("unknown method /a/b"));
        assert!(text.contains("is this the agent port? the API listener is :8153 by default"), "{text}");
    }
    let text = words(request(true), &Status::unimplemented("agent 7 does not serve /a/b"));
    assert!(text.starts_with("agent 7 does not serve this call"), "{text}");
    assert!(!text.contains("agent port"), "{text}");
}

#[test]
fn answers_that_are_not_grpc_are_not_those_of_kas() {
    for kind in [CallKind::Kas, CallKind::Read(agent()), request(true), request(false)] {
        let failure = call(kind).explain(&lost_status("web", false, Some(404)), ServerProtocol::Http2);
        assert_eq!(failure.exit(), Exit::Unreachable);
        assert!(failure.to_string().contains("another server"), "{failure}");
    }
    // A proxy that timed out may have forwarded it.
    let gateway = lost_status("web", false, Some(504));
    assert_eq!(exit(request(false), &gateway), Exit::Unknown);
    assert_eq!(exit(request(true), &gateway), Exit::Unreachable);
}

fn lost_status(text: &str, is_unsent: bool, http: Option<u16>) -> Status {
    let http = http.map(|status| http::StatusCode::from_u16(status).unwrap());
    let mut status = Status::unknown("m");
    status.set_source(std::sync::Arc::new(Lost { text: text.to_owned(), is_unsent, http }));
    status
}

#[test]
fn other_ends_that_are_not_kas_are_named() {
    for (protocol, words) in [
        (ServerProtocol::Silent, "grpcs://"),
        (ServerProtocol::Tls, "grpcs://"),
        (ServerProtocol::Http1, "HTTP/1"),
        (ServerProtocol::Other, "does not speak"),
    ] {
        let failure = call(request(false)).explain(&lost_status("eof", false, None), protocol);
        assert_eq!(failure.exit(), Exit::Unreachable);
        assert!(failure.to_string().contains(words), "{failure}");
    }
    let eof = lost_status("eof", false, None);
    assert_eq!(exit(CallKind::Kas, &eof), Exit::Unreachable);
    assert_eq!(exit(request(true), &eof), Exit::Unreachable, "it only reads");
    assert_eq!(exit(request(false), &eof), Exit::Unknown);
    assert_eq!(exit(request(false), &lost_status("refused", true, None)), Exit::NotStarted);
}

#[test]
fn messages_are_one_line_and_name_the_next_step() {
    assert_eq!(
        words(CallKind::Kas, &Status::not_found("no\nagent\u{1b}[0m")),
        "kas at grpc://kas:8153 refused the call: NOT_FOUND: no\\nagent\\u{1b}[0m (correlation id abc)"
    );
    let text = words(CallKind::Kas, &Status::unauthenticated(""));
    assert!(text.contains("signed with /s/api-secret: UNAUTHENTICATED; use"), "{text}");
}

/// Passed on whole, one sentence would read: "repeat it only if that is safe; it only reads, so it had no
/// effect and trying again is safe".
#[test]
fn advice_about_repeating_is_given_once() {
    for (said, left) in [
        ("the request may have run; repeat it only if that is safe", "the request may have run"),
        ("this kas is shutting down: repeat the request", "this kas is shutting down"),
        ("agent 3 had no idle tunnel: repeat the request later", "agent 3 had no idle tunnel"),
        ("too many wait: repeat this one later", "too many wait"),
        ("it closed its tunnel: repeat it", "it closed its tunnel"),
        (
            "r is silent: repeat the request when it answers",
            "r is silent: repeat the request when it answers",
        ),
        ("", ""),
    ] {
        assert_eq!(without_advice(said), left);
    }
}
