//! Which targets are refused, and which an older agent can be asked for.

#![allow(clippy::unwrap_used)] // a test may panic

use std::collections::BTreeMap;

use kube_request::{InvalidTarget, Parameters, RequestInfo, Target};
use proptest::prelude::*;

#[test]
fn path_is_decoded_once() {
    for (sent, path) in [
        ("/", "/"),
        ("/api/v1/pods", "/api/v1/pods"),
        ("/a%2Fb?c", "/a/b"),
        ("/a%252Fb", "/a%2Fb"),
        ("/a//b;c=d+e", "/a//b;c=d+e"),
        ("/%C3%BC/%41", "/ü/A"),
        ("/ü", "/ü"),
        ("/a%3Fb%23c", "/a?b#c"),
        ("/...", "/..."),
        ("/a%5C..%5Cb", "/a\\..\\b"),
        ("/x?/../%2e%2e/%zz%0a", "/x"),
    ] {
        let target = Target::parse(sent).unwrap();
        assert_eq!(target.path(), path);
        assert_eq!((target.path_bytes(), target.as_sent().as_str()), (path.as_bytes(), sent));
    }
    let target = Target::parse("/%ff%C3/a").unwrap();
    assert_eq!((target.path(), target.path_bytes()), ("/\u{fffd}\u{fffd}/a", &b"/\xff\xc3/a"[..]));
}

#[test]
fn invalid_targets_are_refused_with_the_reason() {
    let percent = |at| InvalidTarget::PercentEncoding { at };
    let control = |byte| InvalidTarget::ControlCharacter { byte };
    for (sent, reason) in [
        ("", InvalidTarget::NotAbsolute),
        ("*", InvalidTarget::NotAbsolute),
        ("?a", InvalidTarget::NotAbsolute),
        ("http://h/", InvalidTarget::NotAbsolute),
        ("/a#b", InvalidTarget::Fragment),
        ("/a?b#c", InvalidTarget::Fragment),
        ("/a b", InvalidTarget::Uri),
        ("/a\r\nb", InvalidTarget::Uri),
        ("/a?b\0", InvalidTarget::Uri),
        ("/%", percent(1)),
        ("/%4", percent(1)),
        ("/%41%4g", percent(4)),
        ("/%%41", percent(1)),
        ("/a%00", control(0)),
        ("/a%0d%0ab", control(13)),
        ("/%7f", control(127)),
        ("/.", InvalidTarget::DotSegment),
        ("/a/../b", InvalidTarget::DotSegment),
        ("/a/%2e%2E", InvalidTarget::DotSegment),
        ("/a/.%2e/b?c", InvalidTarget::DotSegment),
        ("/a%2F..%2Fb", InvalidTarget::DotSegment),
        ("/a%2F%2e", InvalidTarget::DotSegment),
    ] {
        assert_eq!(Target::parse(sent), Err(reason), "{sent:?}");
    }
    assert_eq!(Target::parse(&b"/\xff"[..]), Err(InvalidTarget::Uri));
    assert_eq!(Target::parse(format!("/{}", "a".repeat(65_534))), Err(InvalidTarget::Uri));
    assert!(Target::parse(format!("/?{}", "&".repeat(9_999))).is_ok());
    assert_eq!(Target::parse(format!("/?{}", "&".repeat(10_000))), Err(InvalidTarget::TooManyParameters));
    // The text of a client is not in the message.
    assert_eq!(
        percent(4).to_string(),
        "the path has a percent sign without two hexadecimal digits at byte 4"
    );
    assert_eq!(control(0).to_string(), "the path has a control character (0x00)");
}

#[test]
fn url_path_carries_what_stays_the_same_decoded() {
    let fits = |sent: &str| {
        let target = Target::parse(sent.to_owned()).unwrap();
        target.fits_url_path(RequestInfo::new("GET", &target).is_proxy())
    };
    for sent in ["/", "/a//b;c", "/a%252Fb", "/%C3%BC?x=%C3%BC+%2F", "/a?b;c&%zz", "/api/v1/pods?a&a=b"] {
        assert!(fits(sent), "{sent}");
    }
    for sent in ["/a%2Fb", "/a%2fb", "/%ff", "/?a=%ff", "/?%ff"] {
        assert!(!fits(sent), "{sent}");
    }
    // The API server ignores malformed parameters, but a service behind it may not.
    assert!(fits("/api/v1/nodes/n/proxy/?a"));
    assert!(!fits("/api/v1/nodes/n/proxy/?a;b") && !fits("/api/v1/nodes/n/proxy/?%zz"));
}

#[test]
fn query_is_read_as_go_reads_it() {
    let target = Target::parse("/?b=1+2&a=%3D&b=3=4&c&&;d&%zz=e&f=%ff").unwrap();
    let expected = [("a", &["="][..]), ("b", &["1 2", "3=4"]), ("c", &[""]), ("f", &["\u{fffd}"])];
    let expected: BTreeMap<String, Vec<String>> = expected
        .into_iter()
        .map(|(key, values)| (key.to_owned(), values.iter().map(|value| (*value).to_owned()).collect()))
        .collect();
    assert_eq!(target.query_values(), expected);
    assert_eq!(target.parameter("b").as_deref(), Some("1 2"));
    assert_eq!((target.parameter("d"), target.parameter("c").as_deref()), (None, Some("")));
    assert_eq!(target.query(), "b=1+2&a=%3D&b=3=4&c&&;d&%zz=e&f=%ff");
    assert_eq!(Target::parse("/").unwrap().query(), "");
}

/// Writes a path and a query as an agent does that got them decoded.
fn encoded(target: &Target) -> String {
    use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
    let path: Vec<_> = target
        .path()
        .split('/')
        .map(|segment| utf8_percent_encode(segment, NON_ALPHANUMERIC).to_string())
        .collect();
    let mut query = Vec::new();
    for (key, values) in target.query_values() {
        for value in values {
            let encode = |text| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
            query.push(format!("{}={}", encode(&key), encode(&value)));
        }
    }
    format!("{}?{}", path.join("/"), query.join("&"))
}

/// Texts that are more often targets than random ones.
fn targets() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop::sample::select(vec![
        "/",
        "/",
        "/",
        "api",
        "apis",
        "v1",
        "namespaces",
        "watch",
        "proxy",
        "pods",
        "log",
        "exec",
        "status",
        "%2F",
        "%2e",
        "%25",
        "%",
        ".",
        "..",
        "?",
        "&",
        "watch=1",
        "follow",
        "fieldSelector=metadata.name=",
        "=",
        ",",
        "\\",
        ";",
        "+",
        "%ff",
        "ü",
        "\0",
    ]);
    let text =
        prop::collection::vec(piece, 0..30).prop_map(|pieces| format!("/{}", pieces.concat()).into_bytes());
    prop_oneof![3 => text, 1 => prop::collection::vec(any::<u8>(), 0..200)]
}

proptest! {
    #[test]
    fn any_bytes_are_refused_or_safe(sent in targets(), method in "GET|HEAD|POST|DELETE|[!-~]{0,9}") {
        let Ok(target) = Target::parse(sent.clone()) else { return Ok(()) };
        prop_assert_eq!(target.as_sent().as_str().as_bytes(), &*sent);
        let path = target.path_bytes();
        prop_assert!(path.starts_with(b"/") && !path.iter().any(u8::is_ascii_control));
        prop_assert!(!path.split(|byte| *byte == b'/').any(|segment| matches!(segment, b"." | b"..")));

        let info = RequestInfo::new(&method, &target);
        prop_assert_eq!(info.parts().next().unwrap_or_default(), info.resource());
        prop_assert!(info.is_resource() || info.resource().is_empty() && info.namespace().is_empty());
        if info.verb() != "list" && info.verb() != "watch" {
            prop_assert_eq!(info.parts().nth(1).unwrap_or_default(), info.name());
        }
        if target.fits_url_path(info.is_proxy()) && let Ok(again) = Target::parse(encoded(&target)) {
            prop_assert_eq!(again.path_bytes(), target.path_bytes());
            prop_assert_eq!(RequestInfo::new(&method, &again), info);
        }
    }

    #[test]
    fn any_decoded_request_is_read(method in ".{0,9}", path in ".{0,60}", pairs in prop::collection::vec((".{0,9}", ".{0,30}"), 0..4)) {
        let pairs = pairs.iter().map(|(key, value)| (&**key, &**value));
        let info = RequestInfo::decoded(&method, &path, &Parameters::from_pairs(pairs));
        prop_assert_eq!(info.path(), path);
    }
}
