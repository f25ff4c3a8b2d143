//! The first message of a request to an agent: its head.

use bytes::{BufMut as _, BytesMut};
use callers::Impersonation;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use http_tunnel::kas_end::impersonation_extra;
use kube_request::{RequestInfo, Target, Upgrade, headers::canonical};
use observe::audit::Rule;
use prost::Message as _;
use tunnel::{
    features::Features,
    frame,
    protobuf::{put_entry, put_field, put_varint},
};

use crate::{failure::Failure, request_id::RequestId};

const AUDIT_ID: HeaderName = HeaderName::from_static("audit-id");
/// The headers of the trace context.
const CONTEXT: [HeaderName; 2] =
    [HeaderName::from_static("traceparent"), HeaderName::from_static("tracestate")];
/// Bytes that a head may grow by when the context of the request's span replaces that of the client: the
/// field `traceparent` with 55 characters, an empty `tracestate`, and what encodes them.
const CONTEXT_GROWTH: usize = 128;
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Numbers of the fields of a `prototool.HttpRequest`.
mod request {
    pub(super) const METHOD: u32 = 1;
    pub(super) const HEADER: u32 = 2;
    pub(super) const URL_PATH: u32 = 3;
    pub(super) const QUERY: u32 = 4;
}

/// The head of a request, for any agentk: a `grpctool.HttpRequest.Header`.
#[derive(Debug)]
pub(crate) struct RequestHead {
    /// The first fields of a `prototool.HttpRequest`, encoded: the method and the headers, without `context`.
    request: BytesMut,
    /// The headers of the trace context.
    context: HeaderMap,
    /// The field `extra`, encoded.
    extra: Option<Vec<u8>>,
    content_length: i64,
    target: Target,
    /// The client sent no `Accept-Encoding`.
    encodes_freely: bool,
}

/// The parts of a request from which its head is made.
#[derive(Debug)]
pub(crate) struct HeadParts<'a> {
    pub(crate) method: &'a Method,
    pub(crate) target: Target,
    pub(crate) info: &'a RequestInfo,
    /// The headers that are forwarded.
    pub(crate) headers: &'a HeaderMap,
    /// The length of the body in bytes; `None`: unknown.
    pub(crate) content_length: Option<u64>,
    /// As whom the request runs; `None`: as agentk.
    pub(crate) impersonation: Option<&'a Impersonation>,
    /// To which protocol the request asks to upgrade the connection.
    pub(crate) upgrade: Option<Upgrade>,
    pub(crate) id: &'a RequestId,
}

impl RequestHead {
    /// Makes the head, and returns what agentk must support to carry it out as it is meant.
    ///
    /// # Errors
    /// If a header is not text, or the head is too large for the tunnel's protocol.
    pub(crate) fn new(parts: HeadParts<'_>) -> Result<(Self, Features), Failure> {
        let HeadParts { method, target, info, headers, content_length, impersonation, upgrade, id } = parts;
        let mut request = BytesMut::with_capacity(1024);
        put_field(request::METHOD, method.as_str().as_bytes(), &mut request);
        let mut context = HeaderMap::new();
        for name in headers.keys() {
            let values = headers.get_all(name);
            if values.iter().any(|value| std::str::from_utf8(value.as_bytes()).is_err()) {
                return Err(Failure::malformed(format!("the header {name} is not UTF-8")));
            }
            if CONTEXT.contains(name) {
                context.extend(values.iter().map(|value| (name.clone(), value.clone())));
            } else if !is_replaced(name, upgrade) {
                put_header(name, headers, &mut request);
            }
        }
        put_text(&AUDIT_ID, &id.audit_id(), &mut request);
        put_text(&REQUEST_ID, id.as_str(), &mut request);
        if let Some(upgrade) = upgrade {
            put_text(&header::CONNECTION, "upgrade", &mut request);
            put_text(&header::UPGRADE, upgrade.token(), &mut request);
        }
        let head = Self {
            request,
            context,
            extra: impersonation.map(|user| impersonation_extra(user).encode_to_vec()),
            // No body can be that long.
            content_length: content_length.map_or(-1, |length| i64::try_from(length).unwrap_or(i64::MAX)),
            target,
            encodes_freely: !headers.contains_key(header::ACCEPT_ENCODING),
        };
        // Both forms have a limit, and one of them is chosen with the agentk.
        let fits =
            |features| head.is_small() || head.encode(features).len() + CONTEXT_GROWTH <= frame::MAX_CONTROL;
        if !fits(Features::TARGET) {
            return Err(Failure::refused(
                Rule::Form,
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                format!("the head of the request has more than {} bytes for the agent", frame::MAX_CONTROL),
            ));
        }
        let needs_target = !head.target.fits_url_path(info.is_proxy()) || !fits(Features::NONE);
        let needs = Features::TARGET.when(needs_target)
            | Features::IMPERSONATION.when(impersonation.is_some())
            | Features::UPGRADE.when(upgrade.is_some());
        Ok((head, needs))
    }

    /// Whether every form is far below the limit, so that it need not be encoded to find out.
    fn is_small(&self) -> bool {
        // A parameter of one letter and its separator takes 14 bytes as decoded fields.
        const GROWTH: usize = 8;
        let context: usize =
            self.context.iter().map(|(name, value)| name.as_str().len() + value.len() + 16).sum();
        let extra = self.extra.as_ref().map_or(0, Vec::len);
        let target = self.target.as_sent().as_str().len();
        self.request.len() + context + extra + GROWTH * target + 512 <= frame::MAX_CONTROL
    }

    /// Replaces the trace context by this one, which is text.
    pub(crate) fn replace_context(&mut self, context: HeaderMap) {
        self.context = context;
    }

    /// Returns the encoded head for an agentk that supports `features`.
    pub(crate) fn encode(&self, features: Features) -> BytesMut {
        let mut request = self.request.clone();
        for name in self.context.keys() {
            put_header(name, &self.context, &mut request);
        }
        let has_target = features.contains(Features::TARGET);
        if !has_target {
            put_field(request::URL_PATH, self.target.path().as_bytes(), &mut request);
            for (key, values) in self.target.query_values() {
                put_entry(request::QUERY, &key, || values.iter().map(String::as_bytes), &mut request);
            }
            if self.encodes_freely {
                // Go asks for gzip otherwise, and sends the answer without it.
                put_text(&header::ACCEPT_ENCODING, "identity", &mut request);
            }
        }
        let target = self.target.as_sent().as_str().as_bytes();
        let mut head = BytesMut::with_capacity(request.len() + target.len() + 256);
        put_field(1, &request, &mut head);
        if let Some(extra) = &self.extra {
            put_field(2, extra, &mut head);
        }
        // A number: the tag is the field's number times eight. -1 is encoded as its two's complement.
        put_varint(3 << 3, &mut head);
        put_varint(self.content_length.cast_unsigned(), &mut head);
        if has_target {
            put_varint(1000 << 3 | 2, &mut head);
            put_varint(target.len() as u64, &mut head);
            head.put_slice(target);
        }
        head
    }
}

/// Whether the head has a value of its own for a header, instead of the client's.
fn is_replaced(name: &HeaderName, upgrade: Option<Upgrade>) -> bool {
    *name == AUDIT_ID
        || *name == REQUEST_ID
        || upgrade.is_some() && (*name == header::CONNECTION || *name == header::UPGRADE)
}

/// Writes a header by its canonical name, which GitLab's agents look for.
fn put_header(name: &HeaderName, headers: &HeaderMap, out: &mut BytesMut) {
    let values = headers.get_all(name);
    let key = canonical(name.as_str());
    put_entry(request::HEADER, &key, || values.iter().map(HeaderValue::as_bytes), out);
}

fn put_text(name: &HeaderName, value: &str, out: &mut BytesMut) {
    put_entry(request::HEADER, &canonical(name.as_str()), || std::iter::once(value.as_bytes()), out);
}

#[cfg(test)]
mod tests {
    use proto::gitlab::agent::grpctool::http_request::Header;

    use super::*;

    fn head(
        target: &str,
        headers: &[(&'static str, &'static str)],
        impersonation: Option<&Impersonation>,
    ) -> Result<(RequestHead, Features), Failure> {
        let target = Target::parse(target.to_owned()).unwrap();
        let info = RequestInfo::new("GET", &target);
        let headers = headers
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
            .collect();
        RequestHead::new(HeadParts {
            method: &Method::GET,
            target,
            info: &info,
            headers: &headers,
            content_length: Some(0),
            impersonation,
            upgrade: None,
            id: &RequestId::of_bits(0xab),
        })
    }

    fn decoded(head: &RequestHead, features: Features) -> Header {
        Header::decode(head.encode(features)).unwrap()
    }

    #[test]
    fn the_target_goes_verbatim_to_an_agentk_that_supports_it() {
        let (head, needs) = head("/a%20b;c//d?b=%41&a=1&a=&c", &[("accept", "x")], None).unwrap();
        assert_eq!(needs, Features::NONE);
        let ours = decoded(&head, Features::TARGET | Features::IMPERSONATION);
        assert_eq!(ours.target, "/a%20b;c//d?b=%41&a=1&a=&c");
        assert_eq!(ours.content_length, Some(0));
        let request = ours.request.unwrap();
        assert!(request.url_path.is_empty() && request.query.is_empty());
        assert!(!request.header.contains_key("Accept-Encoding"));
        assert_eq!(request.header["Audit-Id"].value, [format!("kas-{:032x}", 0xab)]);
        assert_eq!(request.header["X-Request-Id"].value, [format!("{:032x}", 0xab)]);

        let old = decoded(&head, Features::NONE);
        assert!(old.target.is_empty());
        let request = old.request.unwrap();
        assert_eq!(request.url_path, "/a b;c//d");
        let query: Vec<_> =
            request.query.iter().map(|(key, values)| (&**key, values.value.join("|"))).collect();
        assert_eq!(query, [("a", "1|".to_owned()), ("b", "A".to_owned()), ("c", String::new())]);
        assert_eq!(request.header["Accept-Encoding"].value, ["identity"]);
    }

    #[test]
    fn the_clients_encoding_stays_for_every_agentk() {
        let (head, _) = head("/", &[("accept-encoding", "gzip, br")], None).unwrap();
        for features in [Features::NONE, Features::TARGET] {
            let request = decoded(&head, features).request.unwrap();
            assert_eq!(request.header["Accept-Encoding"].value, ["gzip, br"]);
        }
    }

    #[test]
    fn what_decoded_fields_cannot_carry_is_a_need() {
        for (target, needs) in [
            ("/a%2Fb", Features::TARGET),
            ("/a%ff", Features::TARGET),
            ("/a?b=%ff", Features::TARGET),
            ("/a%252Fb", Features::NONE),
        ] {
            assert_eq!(head(target, &[], None).unwrap().1, needs, "{target}");
        }
        let user = Impersonation { username: "u".into(), ..Impersonation::default() };
        assert_eq!(head("/", &[], Some(&user)).unwrap().1, Features::IMPERSONATION);
    }

    #[test]
    fn impersonation_has_the_bytes_of_the_reference() {
        let user =
            Impersonation { username: "u".into(), groups: vec!["g".into()], uid: None, extra: Vec::new() };
        let (head, _) = head("/", &[], Some(&user)).unwrap();
        let extra = decoded(&head, Features::TARGET).extra.unwrap();
        assert_eq!(extra.type_url, "type.googleapis.com/gitlab.agent.kubernetes_api.rpc.HeaderExtra");
        assert_eq!(hex::encode(extra.value), "0a060a0175120167");
    }

    #[test]
    fn a_head_that_is_too_large_or_not_text_is_refused() {
        let code = |headers: &HeaderMap| {
            let target = Target::parse("/").unwrap();
            let info = RequestInfo::new("GET", &target);
            let parts = HeadParts {
                method: &Method::GET,
                target,
                info: &info,
                headers,
                content_length: None,
                impersonation: None,
                upgrade: None,
                id: &RequestId::of_bits(1),
            };
            RequestHead::new(parts).map(|_| ()).map_err(|failure| failure.status.code().as_u16())
        };
        let mut headers = HeaderMap::new();
        headers.insert("x", HeaderValue::from_bytes(b"\xfc").unwrap());
        assert_eq!(code(&headers), Err(400));
        headers.insert("x", HeaderValue::from_str(&"y".repeat(64 * 1024)).unwrap());
        assert_eq!(code(&headers), Err(431));
        headers.insert("x", HeaderValue::from_str(&"y".repeat(63 * 1024)).unwrap());
        assert_eq!(code(&headers), Ok(()));
    }

    #[test]
    fn an_upgrade_is_asked_for_by_canonical_names_and_is_a_need() {
        let target = Target::parse("/").unwrap();
        let info = RequestInfo::new("GET", &target);
        let parts = HeadParts {
            method: &Method::GET,
            target,
            info: &info,
            headers: &HeaderMap::new(),
            content_length: Some(0),
            impersonation: None,
            upgrade: Some(Upgrade::Spdy31),
            id: &RequestId::of_bits(1),
        };
        let (head, needs) = RequestHead::new(parts).unwrap();
        assert_eq!(needs, Features::UPGRADE);
        let header = decoded(&head, Features::UPGRADE);
        assert_eq!(header.content_length, Some(0));
        let fields = header.request.unwrap().header;
        assert_eq!(
            (&*fields["Connection"].value, &*fields["Upgrade"].value),
            (&["upgrade".to_owned()][..], &["SPDY/3.1".to_owned()][..])
        );
    }

    #[test]
    fn a_head_that_fits_still_does_with_the_context_of_its_span() {
        let context: HeaderMap =
            [("traceparent", "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"), ("tracestate", "")]
                .into_iter()
                .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
                .collect();
        let of = |headers: HeaderMap| {
            let target = Target::parse("/a").unwrap();
            let info = RequestInfo::new("GET", &target);
            RequestHead::new(HeadParts {
                method: &Method::GET,
                target,
                info: &info,
                headers: &headers,
                content_length: Some(0),
                impersonation: None,
                upgrade: None,
                id: &RequestId::of_bits(1),
            })
        };
        let mut largest = 0;
        for length in frame::MAX_CONTROL - 400..frame::MAX_CONTROL {
            let value = HeaderValue::from_str(&"y".repeat(length)).unwrap();
            let Ok((mut head, _)) = of([(HeaderName::from_static("x"), value)].into_iter().collect()) else {
                continue;
            };
            head.replace_context(context.clone());
            let encoded = head.encode(Features::TARGET).len();
            assert!(encoded <= frame::MAX_CONTROL, "{length}: {encoded}");
            largest = largest.max(encoded);
        }
        assert!(largest > frame::MAX_CONTROL - 64, "{largest}");
    }

    #[test]
    fn a_small_head_has_no_form_that_is_too_large() {
        for target in [format!("/?{}", "a&".repeat(500)), format!("/{}", "%41".repeat(900))] {
            let (head, _) = head(&target, &[("traceparent", "00-1-2-01")], None).unwrap();
            assert!(head.is_small());
            for features in [Features::NONE, Features::TARGET] {
                let encoded = head.encode(features).len();
                assert!(encoded <= head.request.len() + 8 * target.len() + 512, "{encoded}");
            }
        }
    }

    #[test]
    fn unknown_lengths_are_told() {
        let target = Target::parse("/").unwrap();
        let info = RequestInfo::new("POST", &target);
        let headers = HeaderMap::new();
        let parts = HeadParts {
            method: &Method::POST,
            target,
            info: &info,
            headers: &headers,
            content_length: None,
            impersonation: None,
            upgrade: None,
            id: &RequestId::of_bits(1),
        };
        let (head, _) = RequestHead::new(parts).unwrap();
        assert_eq!(decoded(&head, Features::TARGET).content_length, Some(-1));
    }
}
