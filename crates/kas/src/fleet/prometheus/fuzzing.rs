//! For fuzzing: questions of clients of Prometheus.

use std::time::Duration;

use http::StatusCode;
use promql::Scope;

use super::{
    form::{Form, Sent},
    one::{Api, api, narrow},
    reply::Reply,
    times,
};

/// A question: the first line is its path, the second one its query, and the rest is its body; also a time
/// and a step alone. No panic; what goes on is what came, times are fixed once and bounded, and a narrowed
/// question has the scope.
pub fn fuzz(bytes: &[u8]) {
    let mut parts = bytes.splitn(3, |byte| *byte == b'\n');
    let mut part = || parts.next().unwrap_or_default();
    let (path, query, body) = (part(), part(), part());
    let path = String::from_utf8_lossy(path).into_owned();
    times::fuzz(&path);
    let refused = Reply::error(StatusCode::BAD_REQUEST, &path);
    assert!(serde_json::from_str::<serde_json::Value>(&refused.text()).is_ok(), "{}", refused.text());
    let Ok(form) = Form::of(query, body) else { return };
    let (Sent::Query(sent) | Sent::Body(sent)) = form.sent();
    assert!(sent.bytes().all(|byte| byte.is_ascii_graphic()), "{sent}");
    assert_eq!(Form::of(sent.as_bytes(), b"").as_ref(), Ok(&form), "it is read as it is written");

    let mut fixed = form.clone();
    if let Ok(now) = times::instant(&mut fixed, Duration::from_secs(1_500_000_000)) {
        assert_eq!(times::instant(&mut fixed, Duration::ZERO), Ok(now), "the time is fixed once");
    }
    if let Ok(times) = times::range(&form) {
        assert!(times.is_range());
    }
    let scope = Scope::parse("{fuzz=\"scope\"}").expect("it is one");
    let Some(api) = api(&path) else { return };
    let mut narrowed = form;
    if narrow(api, &mut narrowed, &scope).is_err() {
        return;
    }
    match api {
        Api::Series => {
            assert!(narrowed.get("match[]").is_some(), "all series are none of this scope");
            assert!(narrowed.all("match[]").all(|selector| selector.contains("fuzz=\"scope\"")));
        }
        Api::Expression => {
            let has = |form: &Form| {
                form.all("query").map(|text| text.contains("fuzz=\"scope\"")).collect::<Vec<_>>()
            };
            let mut again = narrowed.clone();
            // What is written is longer, and may be beyond a limit.
            if narrow(api, &mut again, &scope).is_ok() {
                assert_eq!(has(&narrowed), has(&again));
            }
        }
        Api::Whole => panic!("nothing narrows {path}"),
        Api::Build => {}
    }
}
