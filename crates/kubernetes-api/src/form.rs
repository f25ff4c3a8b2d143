//! Checks of a request's head that need to know nothing about the client or the agent.

use http::{HeaderMap, Method, StatusCode, Version, header, request};
use observe::audit::Rule;

use crate::failure::Failure;

/// Limits of the head of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLimits {
    /// Names and values of all headers and the request line, in bytes as RFC 9113 counts them. ID tokens of
    /// GitLab have 12 kB.
    pub bytes: usize,
    /// Header fields.
    pub fields: usize,
    /// The target of the request, in bytes.
    pub target: usize,
}

impl Default for HeadLimits {
    fn default() -> Self {
        Self { bytes: 64 * 1024, fields: 100, target: 32 * 1024 }
    }
}

/// Checks method, size and host, and returns the host that the request is for; empty for HTTP/1.0 without
/// one.
///
/// # Errors
/// [`Failure`] for a request that must not be served.
pub(crate) fn check(parts: &request::Parts, limits: HeadLimits) -> Result<String, Failure> {
    if parts.method == Method::TRACE || parts.method == Method::CONNECT {
        return Err(Failure::method(&parts.method));
    }
    let target = parts.uri.path_and_query().map_or(0, |target| target.as_str().len());
    if target > limits.target {
        return Err(Failure::refused(
            Rule::Form,
            StatusCode::URI_TOO_LONG,
            format!("the target of the request has {target} bytes, more than the limit of {}", limits.target),
        ));
    }
    let (fields, bytes) = (parts.headers.len(), size(parts));
    if fields > limits.fields || bytes > limits.bytes {
        return Err(Failure::refused(
            Rule::Form,
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            format!(
                "the head of the request has {fields} fields and {bytes} bytes, at most {} and {} are accepted",
                limits.fields, limits.bytes
            ),
        ));
    }
    coding(&parts.headers)?;
    host(parts)
}

/// Checks that the body has no coding that would be lost. Chunks are taken apart here and made anew for the
/// API server. Another coding, such as `gzip, chunked`, belongs to the connection as well, so the API server
/// would not be told of it, and would take the coded body for the body.
fn coding(headers: &HeaderMap) -> Result<(), Failure> {
    let mut values = headers.get_all(header::TRANSFER_ENCODING).iter();
    let Some(value) = values.next() else { return Ok(()) };
    if values.next().is_none() && value.as_bytes().trim_ascii().eq_ignore_ascii_case(b"chunked") {
        return Ok(());
    }
    Err(Failure::refused(
        Rule::Form,
        StatusCode::NOT_IMPLEMENTED,
        "the only Transfer-Encoding that is accepted is chunked",
    ))
}

/// Returns the host, by the rules of RFC 9112, 3.2, and RFC 9113, 8.3.1.
fn host(parts: &request::Parts) -> Result<String, Failure> {
    let mut values = parts.headers.get_all(header::HOST).iter();
    let host = values.next();
    if values.next().is_some() {
        return Err(Failure::malformed("there are several Host headers"));
    }
    let text = match host {
        None => None,
        Some(value) => match value.to_str() {
            Ok(text) => Some(text),
            Err(_) => return Err(Failure::malformed("the Host header has illegal characters")),
        },
    };
    let authority = parts.uri.authority().map(|authority| authority.as_str());
    if authority.is_some_and(|authority| authority.contains('@')) {
        return Err(Failure::malformed("the target of the request has a user name"));
    }
    match (authority, text) {
        (Some(authority), Some(host)) if parts.version >= Version::HTTP_2 => {
            if authority.eq_ignore_ascii_case(host) {
                Ok(host.to_owned())
            } else {
                Err(Failure::malformed(":authority and Host differ"))
            }
        }
        // In HTTP/1.1, the target in absolute form overrides the header.
        (Some(authority), _) => Ok(authority.to_owned()),
        (None, Some(host)) => Ok(host.to_owned()),
        (None, None) if parts.version == Version::HTTP_11 => {
            Err(Failure::malformed("the Host header is missing"))
        }
        (None, None) => Ok(String::new()),
    }
}

/// Returns the size of a head as RFC 9113 counts it.
fn size(parts: &request::Parts) -> usize {
    /// Bytes that each field counts besides its name and its value.
    const FIELD: usize = 32;
    let headers = |headers: &HeaderMap| {
        headers.iter().map(|(name, value)| name.as_str().len() + value.len() + FIELD).sum::<usize>()
    };
    let target = parts.uri.path_and_query().map_or(0, |target| target.as_str().len());
    parts.method.as_str().len() + target + 2 * FIELD + headers(&parts.headers)
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn checked(build: impl FnOnce(http::request::Builder) -> http::request::Builder) -> Result<String, u16> {
        let request = build(Request::builder().uri("/a")).body(()).unwrap();
        check(&request.into_parts().0, HeadLimits::default())
            .map_err(|failure| failure.status.code().as_u16())
    }

    #[test]
    fn host_is_that_of_the_protocol() {
        let of = |uri: &str, version: Version, hosts: &[&str]| {
            checked(|mut request| {
                for host in hosts {
                    request = request.header("host", *host);
                }
                request.uri(uri).version(version)
            })
        };
        for (uri, version, hosts, expected) in [
            ("/a", Version::HTTP_11, &["h:1"][..], Ok("h:1")),
            ("/a", Version::HTTP_11, &[], Err(400)),
            ("/a", Version::HTTP_10, &[], Ok("")),
            ("/a", Version::HTTP_11, &["a", "a"], Err(400)),
            ("http://x/a", Version::HTTP_11, &["other"], Ok("x")),
            ("http://x/a", Version::HTTP_2, &[], Ok("x")),
            ("http://x/a", Version::HTTP_2, &["X"], Ok("X")),
            ("http://x/a", Version::HTTP_2, &["y"], Err(400)),
            ("http://me@x/a", Version::HTTP_2, &[], Err(400)),
        ] {
            assert_eq!(of(uri, version, hosts), expected.map(str::to_owned), "{uri} {hosts:?}");
        }
    }

    #[test]
    fn bodies_have_no_coding_but_chunks() {
        let with = |codings: &[&str]| {
            checked(|request| {
                codings.iter().fold(request.header("host", "h"), |request, coding| {
                    request.header("transfer-encoding", *coding)
                })
            })
        };
        for accepted in [&[][..], &["chunked"], &["Chunked"], &["\tchunked "]] {
            assert_eq!(with(accepted), Ok("h".to_owned()), "{accepted:?}");
        }
        for refused in
            [&["gzip, chunked"][..], &["chunked, chunked"], &["identity", "chunked"], &["chunked,"], &[""]]
        {
            assert_eq!(with(refused), Err(501), "{refused:?}");
        }
    }

    #[test]
    fn methods_and_sizes_have_limits() {
        let with = |request: http::request::Builder| request.header("host", "h");
        assert_eq!(checked(|request| with(request).method("TRACE")), Err(405));
        assert_eq!(checked(|request| with(request).method("CONNECT")), Err(405));
        assert_eq!(checked(|request| with(request).method("REPORT")), Ok("h".to_owned()));
        let long = format!("/{}", "a".repeat(32 * 1024));
        assert_eq!(checked(|request| with(request).uri(&*long)), Err(414));
        assert_eq!(checked(|request| with(request).uri(long[1..].replacen('a', "/", 1))), Ok("h".to_owned()));
        assert_eq!(checked(|request| with(request).header("x", "y".repeat(64 * 1024))), Err(431));
        let many = checked(|request| {
            (0..100).fold(with(request), |request, n| request.header(format!("x{n}"), "y"))
        });
        assert_eq!(many, Err(431));
        let fewer =
            checked(|request| (0..99).fold(with(request), |request, n| request.header(format!("x{n}"), "y")));
        assert_eq!(fewer, Ok("h".to_owned()));
    }
}
