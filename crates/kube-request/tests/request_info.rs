//! What a request does, compared to what kube-apiserver's `RequestInfo` says.
//!
//! The cases are those of `requestinfo_test.go` in k8s.io/apiserver 0.36, and others that were put to its
//! `NewRequestInfo`.

#![allow(clippy::unwrap_used)] // a test may panic

use std::fmt::Write as _;

use kube_request::{CONNECT, Kind, Parameters, RequestInfo, Target, Upgrade};

fn info(method: &str, sent: &str) -> RequestInfo {
    RequestInfo::new(method, &Target::parse(sent.to_owned()).unwrap())
}

/// Writes all of it in one line: verb, prefix, group, version, namespace, resource, subresource, name, parts.
fn written(info: &RequestInfo) -> String {
    let fields = [
        info.verb(),
        info.api_prefix(),
        info.api_group(),
        info.api_version(),
        info.namespace(),
        info.resource(),
        info.subresource(),
        info.name(),
    ];
    let mut line = String::new();
    for field in fields {
        line += if field.is_empty() { "-" } else { field };
        line.push(' ');
    }
    let parts: Vec<&str> = info.parts().collect();
    write!(line, "{}", parts.join("/")).unwrap();
    line
}

#[test]
fn requests_for_resources_are_those_of_the_api_server() {
    for (request, expected) in [
        // Collections and objects, with and without a namespace.
        ("GET /api/v1/namespaces", "list api - v1 - namespaces - - namespaces"),
        ("GET /api/v1/namespaces/other", "get api - v1 other namespaces - other namespaces/other"),
        ("GET /api/v1/namespaces/other/pods", "list api - v1 other pods - - pods"),
        ("GET /api/v1/namespaces/other/pods/foo", "get api - v1 other pods - foo pods/foo"),
        ("HEAD /api/v1/namespaces/other/pods/foo", "get api - v1 other pods - foo pods/foo"),
        ("GET /api/v1/pods", "list api - v1 - pods - - pods"),
        ("HEAD /api/v1/pods", "list api - v1 - pods - - pods"),
        // Verbs in the path.
        ("GET /api/v1/proxy/namespaces/other/pods/foo", "proxy api - v1 other pods - foo pods/foo"),
        (
            "GET /api/v1/proxy/namespaces/other/pods/foo/subpath/not/a/subresource",
            "proxy api - v1 other pods - foo pods/foo/subpath/not/a/subresource",
        ),
        ("GET /api/v1/watch/pods", "watch api - v1 - pods - - pods"),
        ("GET /api/v1/watch/namespaces/other/pods", "watch api - v1 other pods - - pods"),
        // Watches by the query.
        ("GET /api/v1/pods?watch=true", "watch api - v1 - pods - - pods"),
        ("GET /api/v1/pods?watch=false", "list api - v1 - pods - - pods"),
        ("GET /api/v1/namespaces/other/pods?watch=1", "watch api - v1 other pods - - pods"),
        ("GET /api/v1/namespaces/other/pods?watch=0", "list api - v1 other pods - - pods"),
        // Subresources.
        (
            "GET /api/v1/namespaces/other/pods/foo/status",
            "get api - v1 other pods status foo pods/foo/status",
        ),
        (
            "GET /api/v1/namespaces/other/pods/foo/proxy/subpath",
            "get api - v1 other pods proxy foo pods/foo/proxy/subpath",
        ),
        (
            "PUT /api/v1/namespaces/other/finalize",
            "update api - v1 other namespaces finalize other namespaces/other/finalize",
        ),
        (
            "PUT /api/v1/namespaces/other/status",
            "update api - v1 other namespaces status other namespaces/other/status",
        ),
        // Methods.
        ("PATCH /api/v1/namespaces/other/pods/foo", "patch api - v1 other pods - foo pods/foo"),
        ("DELETE /api/v1/namespaces/other/pods/foo", "delete api - v1 other pods - foo pods/foo"),
        ("POST /api/v1/namespaces/other/pods", "create api - v1 other pods - - pods"),
        ("DELETE /api/v1/nodes", "deletecollection api - v1 - nodes - - nodes"),
        ("DELETE /api/v1/namespaces", "deletecollection api - v1 - namespaces - - namespaces"),
        ("DELETE /api/v1/namespaces/other/pods", "deletecollection api - v1 other pods - - pods"),
        // Groups and versions.
        (
            "DELETE /apis/extensions/v1/namespaces/other/pods",
            "deletecollection apis extensions v1 other pods - - pods",
        ),
        ("POST /apis/extensions/v1/namespaces/other/pods", "create apis extensions v1 other pods - - pods"),
        (
            "POST /apis/extensions/v1beta3/namespaces/other/pods",
            "create apis extensions v1beta3 other pods - - pods",
        ),
        // Not in upstream's tests: methods of no verb, empty segments, slashes at the end, encoding.
        ("OPTIONS /api/v1/pods", "- api - v1 - pods - - pods"),
        ("get /api/v1/pods", "- api - v1 - pods - - pods"),
        ("POST /api/v1/watch/pods/x", "watch api - v1 - pods - x pods/x"),
        ("GET /api/v1/namespaces/a/pods/", "list api - v1 a pods - - pods"),
        ("GET //api/v1/pods//", "list api - v1 - pods - - pods"),
        ("GET /api/v1//pods", "get api - v1 - - - pods /pods"),
        ("GET /api/v1/namespaces//pods", "list api - v1 - pods - - pods"),
        ("GET /api/v1/namespaces/a/pods//log", "list api - v1 a pods log - pods//log"),
        ("DELETE /api/v1/pods//log", "deletecollection api - v1 - pods log - pods//log"),
        ("GET /api/v1/namespaces/a/pods/b%2Fexec", "get api - v1 a pods exec b pods/b/exec"),
        ("GET /api/v1/namespaces/a/pods/b%252Fexec", "get api - v1 a pods - b%2Fexec pods/b%2Fexec"),
        ("GET /%61pi/v1/%70ods", "list api - v1 - pods - - pods"),
        ("GET /api/v1/pods;x/a", "get api - v1 - pods;x - a pods;x/a"),
        ("GET /apis/g/v/watch/namespaces/n/r/o/s/t", "watch apis g v n r s o r/o/s/t"),
        ("GET /api/v1/watch/namespaces/n/status", "watch api - v1 n namespaces status n namespaces/n/status"),
        ("GET /api/v1/namespaces/n/watch", "list api - v1 n watch - - watch"),
    ] {
        let (method, target) = request.split_once(' ').unwrap();
        let info = info(method, target);
        assert!(info.is_resource(), "{request}");
        assert_eq!(written(&info), expected, "{request}");
    }
}

#[test]
fn other_paths_are_not_requests_for_resources() {
    for path in [
        "/",
        "//",
        "/api",
        "/api/version",
        "/api/version/",
        "/apis/group/version/",
        "/apis/extensions/v1beta1",
        "/apis/extensions/v1beta1/",
        "/apis/version/resource",
        "/badprefix/version/resource",
        "/not-api/version/resource",
        "/API/v1/pods",
        "/version",
        "/openapi/v3/apis/apps/v1",
    ] {
        for (method, verb) in [("GET", "get"), ("HEAD", "head"), ("OPTIONS", "options"), ("PURGE", "purge")] {
            let info = info(method, path);
            assert!(!info.is_resource(), "{path}");
            assert_eq!((info.verb(), info.resource(), info.path()), (verb, "", path));
            assert_eq!(info.parts().count(), 0, "{path}");
        }
    }
    for path in [
        "/api/version/resource",
        "/apis/group/version/resource/name/subresource",
        "/api/version/resource/name/subresource",
        "/apis/batch/v1/job",
        "/apis/batch/v1/job/foo",
        "/apis/batch/v1/job/foo/scale",
    ] {
        assert!(info("GET", path).is_resource(), "{path}");
    }
}

#[test]
fn deprecated_path_without_a_resource_has_none() {
    for path in ["/api/v1/watch", "/apis/g/v/proxy/"] {
        let info = info("GET", path);
        assert_eq!((info.is_resource(), info.verb(), info.resource()), (true, "get", ""));
        assert_eq!(info.parts().count(), 0);
    }
}

#[test]
fn list_or_watch_of_one_name_has_this_name() {
    for (query, verb, name) in [
        ("", "list", ""),
        ("fieldSelector=metadata.name=name1", "list", "name1"),
        ("watch=true&fieldSelector=metadata.name=name1", "watch", "name1"),
        ("fieldSelector=foo=bar&labelSelector=baz=qux", "list", ""),
        ("fieldSelector=metadata.name=name1,foo", "list", ""),
        ("fieldSelector=metadata.name=name1,foo&watch=true", "watch", ""),
        ("fieldSelector=metadata.name=name1,foo&watch=false", "list", ""),
        ("fieldSelector=metadata.name=foo&fieldSelector=metadata.name=bar", "list", "foo"),
        // Not in upstream's tests.
        ("fieldSelector=metadata.name%3D%3Dfoo%2Cspec.nodeName!=x", "list", "foo"),
        ("fieldSelector=metadata.name!=foo", "list", ""),
        ("fieldSelector=spec.x=a\\,metadata.name%3Db", "list", ""),
        ("fieldSelector=metadata.name=a%5C%2Cb", "list", "a,b"),
        ("fieldSelector=metadata.name=a%5Cb", "list", ""),
        ("fieldSelector=metadata.name=a%5C", "list", ""),
        ("fieldSelector=metadata.name=a=b", "list", ""),
        ("fieldSelector=metadata.name=..", "list", ""),
        ("fieldSelector=metadata.name=a%2Fb", "list", ""),
        ("fieldSelector=metadata.name=a%2525", "list", ""),
        ("fieldSelector=metadata.name=b,metadata.name=a,", "list", "a"),
        ("fieldSelector=metadata.name=", "list", ""),
        ("fieldSelector=metadata%2Ename=x", "list", "x"),
        ("fieldSelector", "list", ""),
    ] {
        let info = info("GET", &format!("/apis/group/version/resource?{query}"));
        assert_eq!((info.verb(), info.name()), (verb, name), "{query}");
    }
    for (request, verb, name) in [
        ("DELETE /apis/g/v/r?fieldSelector=metadata.name=x", "deletecollection", ""),
        ("GET /apis/g/v/r/name?fieldSelector=metadata.name=x", "get", "name"),
        ("GET /apis/g/v/watch/r?fieldSelector=metadata.name=x", "watch", ""),
        ("GET /apis/g/v/watch/r/name?fieldSelector=metadata.name=x", "watch", "name"),
    ] {
        let (method, target) = request.split_once(' ').unwrap();
        let info = info(method, target);
        assert_eq!((info.verb(), info.name()), (verb, name), "{request}");
    }
}

#[test]
fn first_watch_of_the_query_decides() {
    for (query, watches) in [
        ("watch", true),
        ("watch=", true),
        ("watch=true", true),
        ("watch=no", true),
        ("watch=00", true),
        ("watch=FALSE", false),
        ("watch=fal%C5%BFe", false),
        ("watch=0", false),
        ("watch=0&watch=1", false),
        ("watch=1&watch=0", true),
        ("w%61tch=%31", true),
        ("Watch=1", false),
        ("&&watch=1", true),
        // Go ignores these parameters.
        ("watch=1;x", false),
        ("watch=%zz", false),
        ("watch=%zz&watch=1", true),
        ("x;watch=1", false),
        ("watch=+", true),
    ] {
        for method in ["GET", "HEAD"] {
            let info = info(method, &format!("/api/v1/pods?{query}"));
            assert_eq!(info.verb(), if watches { "watch" } else { "list" }, "{query}");
            assert_eq!(Kind::of(&info, None) == Kind::Watch, watches, "{query}");
        }
        // An object is not watched in this way.
        assert_eq!(info("GET", &format!("/api/v1/namespaces/a?{query}")).verb(), "get");
        assert_eq!(info("POST", &format!("/api/v1/pods?{query}")).verb(), "create");
    }
}

#[test]
fn decoded_request_is_the_same() {
    let sent = info("GET", "/api/v1/namespaces/%C3%BC/pods?watch=1&watch=0&fieldSelector=metadata.name%3Da");
    let pairs = [("fieldSelector", "metadata.name=a"), ("watch", "1"), ("watch", "0")];
    let parameters = Parameters::from_pairs(pairs);
    assert_eq!(RequestInfo::decoded("GET", "/api/v1/namespaces/ü/pods", &parameters), sent);
}

#[test]
fn kind_is_the_first_that_fits() {
    const POD: &str = "/api/v1/namespaces/a/pods/b";
    let socket = Some(Upgrade::WebSocket);
    for (method, path, upgrade, kind) in [
        ("GET", format!("{POD}/exec?command=sh"), socket, Kind::Upgrade),
        ("GET", format!("{POD}/proxy/x?watch=1"), Some(Upgrade::Spdy31), Kind::Upgrade),
        ("GET", "/api/v1/pods?watch=1".into(), socket, Kind::Upgrade),
        ("GET", format!("{POD}/proxy/x?watch=1"), None, Kind::Proxy),
        ("PURGE", "/api/v1/nodes/n/proxy".into(), None, Kind::Proxy),
        ("GET", "/api/v1/proxy/nodes/n".into(), None, Kind::Proxy),
        ("GET", "/proxy".into(), None, Kind::Short),
        ("proxy", "/".into(), None, Kind::Short),
        ("GET", "/api/v1/pods?watch=1&follow=1".into(), None, Kind::Watch),
        ("GET", "/api/v1/watch/namespaces/a/pods/b".into(), None, Kind::Watch),
        ("WATCH", "/".into(), None, Kind::Short),
        ("GET", format!("{POD}?watch=1"), None, Kind::Short),
        ("GET", format!("{POD}/log?follow=true"), None, Kind::Follow),
        ("GET", format!("{POD}/log?follow"), None, Kind::Follow),
        ("GET", format!("{POD}/log?follow=False&follow=1"), None, Kind::Short),
        ("GET", format!("{POD}/log"), None, Kind::Short),
        ("POST", format!("{POD}/log?follow=1"), None, Kind::Short),
        ("GET", "/apis/g/v/namespaces/a/pods/b/log?follow=1".into(), None, Kind::Short),
        ("POST", format!("{POD}/exec?command=sh"), None, Kind::Short),
        ("GET", "/version".into(), None, Kind::Short),
    ] {
        assert_eq!(Kind::of(&info(method, &path), upgrade), kind, "{method} {path}");
    }
    assert_eq!(Kind::ALL.map(Kind::as_str), ["upgrade", "proxy", "watch", "follow", "short"]);
}

#[test]
fn connection_into_the_cluster_has_its_own_verb() {
    const POD: &str = "/api/v1/namespaces/a/pods/b";
    let socket = Some(Upgrade::WebSocket);
    for (method, path, upgrade, verb) in [
        ("GET", format!("{POD}/exec"), socket, CONNECT),
        ("GET", format!("{POD}/exec"), None, CONNECT),
        ("POST", format!("{POD}/attach"), None, CONNECT),
        ("POST", format!("{POD}/portforward"), Some(Upgrade::Spdy31), CONNECT),
        ("DELETE", format!("{POD}/proxy/x"), None, CONNECT),
        ("GET", "/api/v1/nodes/n/proxy/run/x".into(), None, CONNECT),
        ("GET", "/api/v1/namespaces/a/services/s%2Fproxy".into(), None, CONNECT),
        ("GET", "/api/v1/proxy/nodes/n".into(), None, CONNECT),
        ("GET", "/apis/g/v/namespaces/a/machines/m/portforward".into(), None, CONNECT),
        ("GET", "/apis/g/v/namespaces/a/machines/m/vnc".into(), socket, CONNECT),
        ("GET", "/version".into(), socket, CONNECT),
        ("GET", POD.into(), socket, CONNECT),
        ("GET", "/api/v1/watch/namespaces/a/pods/b/exec".into(), None, CONNECT),
        ("GET", "/api/v1/pods?watch=1".into(), socket, "watch"),
        ("GET", format!("{POD}/log?follow=1"), socket, "get"),
        ("GET", format!("{POD}/log"), None, "get"),
        ("GET", "/apis/g/v/namespaces/a/pods/b/log".into(), socket, CONNECT),
        ("GET", "/exec".into(), None, "get"),
        ("GET", "/api/v1/exec/proxy".into(), None, "get"),
        ("PUT", format!("{POD}/status"), None, "update"),
    ] {
        assert_eq!(info(method, &path).access_verb(upgrade), verb, "{method} {path}");
    }
}
